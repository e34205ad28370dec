"""What a trained language model is measured by.

    python evaluate.py                                         # the newest run of train_lm.py: all that it can be asked
    python evaluate.py --ckpt=out/lm/NC --vs=out/lm/GELU       # two models on the same items: the paired difference
    python evaluate.py --tasks=lambada,blimp --lambada=FILE.jsonl --blimp=FILE.jsonl           # without network
    python evaluate.py --study=out/compare_books              # the runs of train_lm.py --compare, over their seeds
    python evaluate.py --generate='The king' --tokens=50       # a sample instead

    ppl          perplexity of a token over the whole validation split (train_lm.py's val_loss: of eval_windows of it);
                 --stride=S gives each at least block_size - S tokens of context, at block_size / S times the cost
    lambada      is the last word of a passage the greedy choice, token by token? and the perplexity of that word
    blimp        is the grammatical sentence of a pair the likelier one? by paradigm, phenomenon, and overall
    licensing    the same for prepare.py's minimal pairs, by family

Scored in fp32 by the conventions of lm-evaluation-harness, but for ties, which count as misses and are shown. Standard
errors: sqrt(p(1-p)/n) for a share of items; over paradigms (or families) for a mean of those, since the sentences of
one are alike; over windows or passages for a perplexity, to first order. With --vs, the difference ckpt minus vs is
paired in the same way, with a 95% interval by Student's t. All of it goes to eval.json in the run's folder, where a
task keeps its place until it is measured again. The last line: ppl, lambada_acc, lambada_ppl, blimp, licensing, vs.
"""

import difflib
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import prepare
from model import GPT, MODEL_KEYS
from runtime import (all_sum, check_numbers, check_results, configure, fail, folder_of, interruptible, latest, launch,
                     load_checkpoint, load_weights, read_json, result, seeds_of, spread, student_t, table, write_json,
                     write_text)

DEFAULTS = dict(
    ckpt='latest',              # a run's folder (its best.pt, else last.pt), a checkpoint, or latest
    vs='',                      # another one to compare it with
    tasks='',                   # of ppl,lambada,blimp,licensing; '' is all that suit the model's tokens
    data_dir='',                # where prepare.py writes; '' is where the model was trained from
    device='auto',              # auto | cpu | cuda | mps
    batch_size=16,              # windows or sentences at once
    stride=0,                   # ppl: tokens scored in a window; 0 is block_size
    lambada='',                 # .jsonl file with text; '' is EleutherAI/lambada_openai on the hub
    blimp='',                   # .jsonl file in BLiMP's columns; '' is nyu-mll/blimp on the hub
    study='',                   # folder of the runs of train_lm.py --compare, in place of ckpt and vs
    seeds='1,2,3',              # of that study
    # instead of measuring
    generate='',                # text to continue
    tokens=100,                 # by so many tokens
    temperature=0.8,            # 0 takes the likeliest token each time
    top_k=0,                    # sample among so many likeliest tokens; 0 is all
    seed=1,                     # of the sample
)
TASKS = ('ppl', 'lambada', 'blimp', 'licensing')
STUDIED = ('gelu', 'nc', 'nc+quant')        # rows of a study: each is compared with the one before it
HEADLINES = dict(ppl=('ppl', 'perplexity'), lambada_acc=('lambada', 'accuracy'), lambada_ppl=('lambada', 'perplexity'),
                 blimp=('blimp', 'overall'), licensing=('licensing', 'overall'))


def load_model(where, device, data_dir=''):
    """(model in eval mode on device, config, meta) of a run of train_lm.py.

    where: the run's folder (best.pt, else last.pt), a checkpoint file, or 'latest'. config: the run's settings, with
    ckpt and step, and data_dir replaced if given. meta: its dataset's, which prepare.get_tokenizer takes.
    """
    path = latest('lm') if where == 'latest' else Path(where)
    if path.is_dir():
        path = next((path / name for name in ('best.pt', 'last.pt') if (path / name).is_file()), path)
    if path.is_dir():
        fail(f'no checkpoint in {path}: expected the folder of a run of train_lm.py, with best.pt or last.pt')
    saved = load_checkpoint(path)
    try:
        config = {**saved['config'], 'ckpt': str(path), 'step': saved['step']}
        if 'variant' in config:
            fail(f'{path} is of a run of train_cls.py: expected one of train_lm.py')
        config['data_dir'], name = str(data_dir or config['data_dir']), str(config['dataset'])
        if not all(type(config[key]) is int for key in ('block_size', 'n_layer', 'n_head', 'n_embd')):
            raise TypeError
        model = GPT(saved['vocab_size'], **{key: config[key] for key in MODEL_KEYS})
    except Exception as error:      # of as many kinds as a setting can be wrong in
        fail(f'{path} is no checkpoint of train_lm.py, or is damaged ({type(error).__name__})')
    load_weights(model, saved['model'], path)
    try:
        meta = prepare.load_tokens(config['data_dir'], name)[1]
    except (ValueError, OSError) as error:
        fail(error)
    if meta['vocab_size'] != model.vocab_size:
        fail(f'{path} has a vocabulary of {model.vocab_size}, and {config["data_dir"]}/{name} one of '
             f'{meta["vocab_size"]}: expected the dataset that it was trained on, see --data_dir')
    return model.to(device).eval(), config, meta


def tokenizer_of(meta):
    """prepare.get_tokenizer, whose failure ends in one line."""
    try:
        return prepare.get_tokenizer(meta)
    except ValueError as error:
        fail(error)


# ---- loss over windows

def batch_at(ids, starts, block_size, device):
    """The windows at `starts` as (ids_BT, targets_BT): a target is the next token."""
    rows = torch.from_numpy(np.stack([ids[start:start + block_size + 1] for start in starts]).astype(np.int64))
    if device.type == 'cuda':
        rows = rows.pin_memory().to(device, non_blocking=True)
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def windows(tokens, block_size, most=0):
    """Starts of the windows that tile the tokens, the last target included; at most `most` of them, evenly spread (0:
    all)."""
    starts = list(range(0, len(tokens) - block_size, block_size))
    if most and len(starts) > most:
        starts = [starts[i * len(starts) // most] for i in range(most)]
    return starts


@torch.no_grad()
def mean_loss(model, read, starts, batch_size, run, context):
    """Cross-entropy in nats a token over the windows at `starts`: summed, then divided by the count, over all
    processes.

    read(starts) -> (ids_BT, targets_BT). run: the processes, see runtime.launch. context: the precision, see
    runtime.precision.
    """
    total = count = 0
    mine = starts[run.rank::run.world]
    for i in range(0, len(mine), batch_size):
        ids_BT, targets_BT = read(mine[i:i + batch_size])
        with context:
            total += model(ids_BT, targets_BT).item() * targets_BT.numel()
        count += targets_BT.numel()
    total, count = all_sum(total, count)
    return total / count


def segments(n_tokens, block_size, stride):
    """[(start, end, count)]: score the last `count` tokens of [start:end], and every token but the first is scored
    once, `stride` at a time, after as many others as the context holds."""
    ends = [*range(block_size + 1, n_tokens, stride), n_tokens]
    return [(max(0, end - block_size - 1), end, end - before) for before, end in zip([1, *ends], ends)]


# ---- log-probabilities of sequences

@torch.no_grad()
def scored(model, sequences, counts, device, batch_size=256, desc=''):
    """The summed log-probability, in fp32, of the last `count` tokens of each sequence of ids given those before, and
    whether each of them was the likeliest. [N] float and [N] bool arrays.

    Batched by length; of a sequence beyond the context, the end that fits is read. desc: a progress bar's label.
    """
    sequences = [ids[-model.block_size - 1:] for ids in sequences]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    score_N, greedy_N = np.zeros(len(order)), np.zeros(len(order), dtype=bool)
    with tqdm(total=len(order), desc=desc, disable=not desc, dynamic_ncols=True) as bar:
        for i in range(0, len(order), batch_size):
            rows = order[i:i + batch_size]
            ids = [torch.as_tensor(sequences[r]) for r in rows]
            targets = [ids_T[1:].clone() for ids_T in ids]
            for r, target_T in zip(rows, targets):
                target_T[:max(0, len(target_T) - counts[r])] = -1
            # padding stands at the end, where a causal model's earlier logits cannot see it
            ids_BT = pad_sequence([ids_T[:-1] for ids_T in ids], batch_first=True).to(device)
            targets_BT = pad_sequence(targets, batch_first=True, padding_value=-1).to(device)
            logits_BTV = model(ids_BT).float()
            loss_BT = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-1, reduction='none')
            score_N[rows] = -loss_BT.view_as(targets_BT).cpu().double().sum(1)
            greedy_N[rows] = ((logits_BTV.argmax(-1) == targets_BT) | (targets_BT < 0)).all(1).cpu()
            bar.update(len(rows))
    return score_N, greedy_N


def last_word(tokenizer, text):
    """A passage's ids, and how many of them are its last word. What parts the word from the passage goes with the word;
    a passage of one word follows an end-of-text token."""
    context, _, word = text.rpartition(' ')
    before = tokenizer.encode(context.rstrip())
    target = tokenizer.encode(f'{context} {word}')[len(before):]
    return (before or [tokenizer.eot]) + target, len(target)


def sentence(tokenizer, text):
    """A sentence's ids, as it would stand after another: an end-of-text token, a space, the text."""
    return [tokenizer.eot, *tokenizer.encode(' ' + text)]


# ---- measurements: {row: (values, ties)}, where the mean of the values is the measurement

def perplexity(loss_N):
    """Values whose mean is exp(mean loss), and whose standard error is that of it to first order (delta method)."""
    return np.exp(loss_N.mean()) * (1 + loss_N - loss_N.mean())


def window_rows(model, ids, device, batch_size, stride):
    """Loss and perplexity of the tokens `ids`, by window."""
    parts = segments(len(ids), model.block_size, stride)
    count_N = np.array([count for _, _, count in parts])
    score_N = scored(model, [ids[start:end] for start, end, _ in parts], count_N, device, batch_size, 'ppl')[0]
    # windows differ in length: values whose mean is the ratio of sums, and whose variance is the ratio's
    ratio = -score_N.sum() / count_N.sum()
    loss_N = ratio + (-score_N - ratio * count_N) / count_N.mean()
    return {'loss': (loss_N, 0), 'perplexity': (perplexity(loss_N), 0)}


def passage_rows(model, passages, tokenizer, device, batch_size):
    """LAMBADA: accuracy and perplexity of the last word, by passage."""
    sequences, counts = zip(*(last_word(tokenizer, text) for text in passages))
    score_N, greedy_N = scored(model, sequences, counts, device, batch_size, 'lambada')
    return {'accuracy': (greedy_N, 0), 'perplexity': (perplexity(-score_N), 0)}


def pair_rows(model, pairs, tokenizer, device, batch_size=256, desc=''):
    """Share of pairs whose good sentence is strictly likelier: of each family by pair, of each phenomenon (where
    pairs have one) and overall by family. pairs: dicts family, good, bad, and in BLiMP phenomenon."""
    good, bad = ([sentence(tokenizer, pair[key]) for pair in pairs] for key in ('good', 'bad'))
    sequences = good + bad
    score_N = scored(model, sequences, [len(ids) - 1 for ids in sequences], device, batch_size, desc)[0]
    good_N, bad_N = np.split(score_N, 2)
    tie_N = (good_N == bad_N) | [one == other for one, other in zip(good, bad)]     # however rounding went
    win_N = (good_N > bad_N) & ~tie_N
    family_N = np.array([pair['family'] for pair in pairs])
    phenomenon = {pair['family']: pair.get('phenomenon') for pair in pairs}
    rows = {family: (win_N[family_N == family], int(tie_N[family_N == family].sum())) for family in phenomenon}

    def mean_of(families):
        return np.array([rows[family][0].mean() for family in families]), sum(rows[family][1] for family in families)

    groups = {f'phenomenon {name}': mean_of([family for family in phenomenon if phenomenon[family] == name])
              for name in phenomenon.values() if name}
    return {**rows, **groups, 'overall': mean_of(phenomenon)}


def pair_accuracy(model, pairs, tokenizer, device):
    """Share of pairs whose good sentence is strictly the likelier one, by family and their mean as 'overall' (BLiMP's
    convention, ties as misses). pairs: dicts family, good, bad."""
    return {row: float(values.mean()) for row, (values, _) in pair_rows(model, pairs, tokenizer, device).items()}


# ---- what chance could have done

def standard_error(values_N):
    """Of the mean: sqrt(p(1-p)/n) for hits and misses, else sd / sqrt(n), which one value leaves unknown (nan)."""
    n = len(values_N)
    if values_N.dtype == bool:
        return math.sqrt(values_N.mean() * (1 - values_N.mean()) / n)
    return values_N.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan


def summary(values_N, ties, vs_N=None, vs_ties=0):
    """A measurement with its standard error; with another model's values of the same items, the paired difference."""
    record = dict(value=values_N.mean(), se=standard_error(values_N), n=len(values_N), ties=ties)
    if vs_N is not None:
        difference_N = values_N.astype(float) - vs_N
        half = student_t(max(1, len(values_N) - 1)) * standard_error(difference_N)
        record |= dict(vs=vs_N.mean(), vs_se=standard_error(vs_N), vs_ties=vs_ties, difference=difference_N.mean(),
                       low=difference_N.mean() - half, high=difference_N.mean() + half)
    return record


def unit(task, row):
    """What a measurement has a value of each of."""
    if task in ('ppl', 'lambada'):
        return dict(ppl='windows', lambada='passages')[task]
    return 'families' if row.startswith(('overall', 'phenomenon ')) else 'pairs'


def aligned(task, records):
    """The records {row: summary} as lines of text."""
    number = lambda x: '' if math.isnan(x) else f'{x:.4f}' if abs(x) < 1e5 else f'{x:.4g}'
    width = max(map(len, [task, *records])) + 2
    keys = ['value', 'se', *['ties'] * any(record['ties'] for record in records.values()),
            *['vs', 'difference', 'low', 'high'] * ('vs' in records[next(iter(records))])]
    lines = [f'{task:<{width}}' + f'{"n":>16}' + ''.join(f'{key:>12}' for key in keys)]
    for row, record in records.items():
        cells = (str(record[key]) if key == 'ties' else number(record[key]) for key in keys)
        lines.append(f'{row:<{width}}' + f'{record["n"]} {unit(task, row)}'.rjust(16)
                     + ''.join(f'{cell:>12}' for cell in cells))
    return '\n'.join(lines)


# ---- the command

def items_of(task, config, c):
    """What a task measures on: the tokens, the passages or the pairs. Ends in one line where there are none."""
    where = config['data_dir']
    try:
        if task == 'ppl':
            return prepare.load_tokens(where, config['dataset'])[0]['val'].astype(np.int64)
        if task == 'lambada':
            return prepare.load_lambada(c.lambada)
        if task == 'blimp':
            return prepare.load_blimp(c.blimp)
        pairs = prepare.load_pairs(where, config['dataset']) or prepare.load_pairs(where, 'licensing')
    except (ValueError, OSError) as error:
        fail(error)
    return pairs or fail(f'no minimal pairs in {where}/licensing: make them with `python prepare.py licensing`')


def measure(task, items, model, tokenizer, device, c):
    """{row: (values, ties)} of one model."""
    if task == 'ppl':
        return window_rows(model, items, device, c.batch_size, c.stride or model.block_size)
    if task == 'lambada':
        return passage_rows(model, items, tokenizer, device, c.batch_size)
    return pair_rows(model, items, tokenizer, device, c.batch_size, desc=task)


def generate(model, tokenizer, text, device, n, temperature, top_k, seed):
    """The text and n tokens more, as they would begin a document. Keys, values and quantifiers are carried from token
    to token; at temperature 0 the result is that of reading all of it anew for each."""
    generator = torch.Generator(device).manual_seed(seed)
    ids_BT = torch.tensor([[tokenizer.eot, *tokenizer.encode(text)]], device=device)
    return tokenizer.decode(model.generate(ids_BT, n, temperature, top_k, generator)[0, 1:].tolist())


def choose_tasks(c, models):
    """The tasks asked for, or all that suit; ends in one line where one does not."""
    wordy = [(config, meta) for _, config, meta in models if meta['tokenizer'] == 'words']
    if not c.tasks:
        return ['ppl', 'licensing'] if wordy else ['ppl', 'lambada', 'blimp']
    tasks = list(dict.fromkeys(c.tasks.split(',')))
    for task in tasks:
        if task not in TASKS:
            nearest = difflib.get_close_matches(task.lower(), TASKS, n=1, cutoff=0)[0]
            fail(f'--tasks={c.tasks}: no task {task!r}, the nearest is {nearest} (of {",".join(TASKS)}, with commas)')
        if task in ('lambada', 'blimp') and wordy:
            config, meta = wordy[0]
            fail(f'{task} is English, and {config["ckpt"]} knows only the {meta["vocab_size"]} words of '
                 f'{config["dataset"]}: expected --tasks=ppl,licensing, or a model of gpt2 or bytes tokens')
    return tasks


def check(c, run):
    """Ends in one line where the settings do not fit."""
    if run.world > 1:
        fail('evaluate.py is one process: run it without torchrun')
    check_numbers(vars(c), positive=('batch_size', 'tokens'), not_negative=('stride', 'temperature', 'top_k'))
    if 0 < c.temperature < 1e-6:
        fail(f'temperature={c.temperature}: expected 0, for the likeliest token, or at least 1e-06')
    if c.generate and (c.vs or c.tasks or c.study):
        fail('--generate samples from one model and measures nothing: leave out --vs, --tasks and --study')
    if c.study and (c.vs or c.ckpt != DEFAULTS['ckpt']):
        fail('--study measures the runs of its folder: leave out --ckpt and --vs')


def check_models(c, configs, tasks):
    """Ends in one line where the models do not fit the tasks."""
    if not c.stride <= min(config['block_size'] for config in configs):
        fail(f'stride={c.stride}: expected at most the block_size of {configs[0]["block_size"]}')
    for key in ('dataset', 'block_size'):
        if 'ppl' in tasks and configs[0][key] != configs[-1][key]:
            fail(f'ppl compares window by window: {configs[0]["ckpt"]} has {key}={configs[0][key]}, '
                 f'{configs[-1]["ckpt"]} {key}={configs[-1][key]}; leave ppl out of --tasks')


def report(c, models, tokenizers, device):
    """Measures task after task, prints its table, keeps it in eval.json; returns the last line's values."""
    tasks, configs = choose_tasks(c, models), [config for _, config, _ in models]
    check_models(c, configs, tasks)
    path = Path(configs[0]['ckpt']).with_name('eval.json')
    items = {task: items_of(task, configs[0], c) for task in tasks}
    written = read_json(path, 'move it away, it is written anew') if path.exists() else {}
    which = {key: dict(ckpt=config['ckpt'], step=config['step']) for key, config in zip(('model', 'vs'), configs)}
    headlines = {}
    for task in tasks:
        rows, *vs = [measure(task, items[task], model, tokenizer, device, c)
                     for (model, _, _), tokenizer in zip(models, tokenizers)]
        records = {row: summary(*rows[row], *(vs[0][row] if vs else ())) | dict(unit=unit(task, row)) for row in rows}
        print('\n' + aligned(task, records), flush=True)
        settings = {key: getattr(c, key) for key in {'ppl': ['stride'], 'licensing': []}.get(task, [task])}
        written[f'{task} vs {c.vs}' if c.vs else task] = {**which, **settings, 'rows': records}
        write_json(path, written)
        headlines |= {key: records[row] for key, (of_task, row) in HEADLINES.items() if of_task == task}
    values = {key: record['value'] for key, record in headlines.items()}
    differences = {key: {name: record[name] for name in ('difference', 'low', 'high')}
                   for key, record in headlines.items() if c.vs}
    return values | dict(vs=differences) if c.vs else values


def study(c, device):
    """The tasks on every run ROW-seedN of a study, ROW one of STUDIED: results/eval_NAME.json and .md.

    A cell is the mean and sd over seeds. A difference is of what a row's seeds do on average, paired by item (in BLiMP
    by paradigm), so its 95% interval speaks of other items. Last line: the differences of the overall measurements.
    """
    name, seeds = Path(c.study).name, seeds_of(c.seeds)
    present = [row for row in STUDIED if all(folder_of(c.study, row, seed).is_dir() for seed in seeds)]
    if 'gelu' not in present or len(present) < 2:
        fail(f'{c.study} holds no study: expected the runs of `train_lm.py --compare=gelu,nc` with seeds {c.seeds}, in '
             f'folders such as gelu-seed{seeds[0]}')
    check_results()
    values, items, tasks = {}, {}, ()                           # (task, measurement) -> row -> [values of each seed]
    for row, seed in [(row, seed) for row in present for seed in seeds]:
        model, config, meta = load_model(folder_of(c.study, row, seed), device, c.data_dir)
        tasks = tasks or choose_tasks(c, [(model, config, meta)])
        for task in tasks:
            if task not in items:
                items[task] = items_of(task, config, c)
            print(f'{row}, seed {seed}: {task}', flush=True)
            for key, (values_N, _) in measure(task, items[task], model, tokenizer_of(meta), device, c).items():
                values.setdefault((task, key), {}).setdefault(row, []).append(values_N)
    shown = [key for key in values if key[0] != 'blimp' or key[1].startswith(('phenomenon', 'overall'))]
    lines, records = [], {}
    for task, key in shown:
        rows = values[task, key]
        mean = {row: np.mean(rows[row], axis=0, dtype=float) for row in present}
        pairs = {f'{row} - {before}': summary(mean[row], 0, mean[before]) for before, row in zip(present, present[1:])}
        pairs = {pair: {part: record[part] for part in ('difference', 'low', 'high')} for pair, record in pairs.items()}
        by_seed = {row: [seed_N.mean() for seed_N in rows[row]] for row in present}
        records[f'{task} {key}'] = dict(n=len(mean['gelu']), unit=unit(task, key), by_seed=by_seed, differences=pairs)
        digits = 1 if 'perplexity' in key else 3
        lines.append([f'{task}, {key.removeprefix("phenomenon ")}', f'{len(mean["gelu"])} {unit(task, key)}',
                      *(spread(by_seed[row], digits) for row in present),
                      *(f'{d["difference"]:+.{digits}f} [{d["low"]:+.{digits}f}, {d["high"]:+.{digits}f}]'
                        for d in pairs.values())])
    write_json(Path('results', f'eval_{name}.json'), dict(seeds=seeds, tasks=tasks, records=records))
    write_text(Path('results', f'eval_{name}.md'), table(['', 'items', *present, *pairs], lines))
    return {f'{task} {key}': records[f'{task} {key}']['differences'] for task, key in HEADLINES.values()
            if f'{task} {key}' in records}


def main():
    c = SimpleNamespace(**configure(__file__, DEFAULTS))
    run = launch(c.device)
    check(c, run)
    with interruptible('nothing is kept' if c.generate or c.study else 'what was measured before is in eval.json'):
        if c.study:
            return result(**study(c, run.device))
        models = [load_model(where, run.device, c.data_dir) for where in [c.ckpt] + [c.vs] * bool(c.vs)]
        tokenizers = [tokenizer_of(meta) for _, _, meta in models]
        if c.generate:
            text = generate(models[0][0], tokenizers[0], c.generate, run.device, c.tokens, c.temperature, c.top_k,
                            c.seed)
            print(text)
            values = dict(text=text)
        else:
            values = report(c, models, tokenizers, run.device)
    result(**values)


if __name__ == '__main__':
    main()
