"""Fine-tunes Llama with a logic stream beside its layers as a classifier of three labels (paper B).

    python train_cls.py --preset=tiny --variant=inter8                        # a CPU, two minutes, makes its own data
    python train_cls.py --backbone=FOLDER --task=proofwriter --variant=inter8 # one GPU: the paper's run
    torchrun --nproc_per_node=8 train_cls.py --backbone=FOLDER --task=mnli    # eight; one step for all of them

    python train_cls.py --count_params                                        # Table 2 of the paper; needs no weights
    python train_cls.py --preset=tiny --variants=table1 --seeds=42,777,123    # every run of a table, then the table
    python train_cls.py --preset=tiny --variants=depth                        # shallow proofs in training, then deeper
    python train_cls.py --summarize=tests/paper_b_runs.json                   # the paper's tables from its own runs
    python train_cls.py --resume --out_dir=latest                             # continues a run

FOLDER is a Llama of HF or of Meta; without one a Llama of the given shape starts from scratch on the words of the
training split. A variant is a row of model.VARIANTS, and each key of a row can be given for itself. --preset=fair is
the paper's run with what this repository would change: logic modules in fp32, eq 17 as printed, a control that matches;
on a CPU, --preset=tiny --logic_dtype=float32 --residual=state --control=matched. --count_params counts Llama 3.1's
vocabulary for every shape, and adds a line for logic keys given beside the variants.

batch_size counts the examples of a step over all processes; a step's examples are a function of (seed, step). A loss
or gradient that is not finite stops the run with status 3; a signal, after the step at hand, with 128 + signal.
"""

import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import prepare
from model import CHOICES, VARIANTS, Classifier, Llama, load_llama
from runtime import (Diverged, Log, StopSignal, all_sum, check_numbers, conclude, configure, fail, launch, main_first,
                     open_run, pyplot, reason, restore, result, save_checkpoint, save_figure, spread, student_t, study,
                     table, write_config, write_results, write_text)

DEFAULTS = dict(
    # the run
    out_dir='',                 # folder of the run; '' is a new dated one below out/cls
    resume=False,               # continue the run in out_dir
    overwrite=False,            # replace the run in out_dir
    seed=42,                    # draws the subsets, the new modules' weights and the order of the data
    device='auto',              # auto | cpu | cuda | mps
    dtype='bfloat16',           # of the weights, as in the paper: bfloat16 | float32
    # the data
    task='proofwriter',         # rulebase | proofwriter | mnli | multi (the last two, half and half)
    data_dir='data',            # where prepare.py writes
    n_train=10_000,             # training examples, drawn by the seed; 0 is all
    n_val=5_000,                # validation examples, drawn by the seed; 0 is all
    max_tokens=250,             # longest input; the context loses its beginning
    train_depth=-1,             # train on theories with proofs so deep, validate on deeper proofs; -1 is all on all
    # the backbone
    backbone='',                # folder of a Llama; '' is one from scratch, of this shape:
    n_layer=32,                 # layers (Llama-3.1-8B's here and below)
    n_head=32,                  # attention heads
    n_kv_head=8,                # heads of keys and values
    n_embd=4096,                # width D
    d_ff=14336,                 # hidden units of a feed-forward layer
    rope_factor=8.0,            # for Meta's folders: 8 is Llama 3.1, 32 Llama 3.2
    # the variant: a row of model.VARIANTS over these
    variant='inter8',           # baseline | nogate | intra8 | inter8 | ... (--help ends with all)
    branch='routed',            # none | nogate | routed
    axis='inter',               # windows along tokens (inter), along gates (intra); all earlier tokens (quant)
    gates=8,                    # G, gates of each of AND, OR and NOT
    window=2,                   # C, how many values a gate combines
    tau=1.0,                    # temperature of the routing
    cross_attn=True,            # the logic state attends to the backbone's layers
    alpha=0.01,                 # weight of the branch in the fusion
    learn_alpha=False,          # alpha is a parameter
    gate_mode='soft',           # soft | ste (hard gates, straight-through gradient; they fire with route_scale alone)
    control='paper',            # nogate: paper | matched (the same fusion and parameters as the routed branch)
    residual='attended',        # what eq 17 adds to: attended (the attended state, as released) | state (as printed)
    route_scale=False,          # u = min(3G pi, 1) s in place of pi s
    logic_dtype='same',         # of all modules but the backbone: same | float32
    d_logic=256,                # L, width of the logic state
    n_head_logic=4,             # heads of the cross-attention
    # optimisation: AdamW at a constant rate
    batch_size=30,              # examples a step over all processes
    micro_batch=30,             # examples a process computes at once
    eval_batch=30,              # the same in validation
    epochs=3,                   # passes over the training examples
    warmup=0,                   # steps in which the rate grows to lr
    lr=1e-5,                    # learning rate
    alpha_lr=2e-4,              # of a learned alpha and of quant's rates, none of which decays
    beta2=0.999,                # decay of AdamW's mean of squared gradients
    weight_decay=0.01,          # on everything but alpha and quant's rates
    grad_clip=0.0,              # largest gradient norm; 0 is none
    checkpointing=True,         # recompute each layer in the backward pass
    # what is written down
    log_every=10,               # steps between lines in log.jsonl
    # instead of training one model
    count_params=False,         # print Table 2 for this shape and stop
    variants='',                # train a table of TABLES or NAME,NAME; a variant's own keys stand over those given
    seeds='42,777,123',         # with each of these
    summarize='',               # print the tables of a file of finished runs
)
# what each task changes in the paper (its appendices A to C)
TASKS = dict(
    rulebase=dict(),
    proofwriter=dict(),
    mnli=dict(n_train=5_000, n_val=500, batch_size=20, micro_batch=20, eval_batch=10, epochs=2, alpha=0.1,
              learn_alpha=True, checkpointing=False),
    multi=dict(n_val=1_000, batch_size=20, micro_batch=20, eval_batch=100, epochs=6, alpha=0.1, learn_alpha=True),
)
PRESETS = dict(
    tiny=dict(task='rulebase', n_train=0, n_val=2_000, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, d_ff=256,
              d_logic=64, batch_size=16, micro_batch=16, eval_batch=200, epochs=1, warmup=50, lr=1e-3, alpha_lr=1e-2,
              beta2=0.98, grad_clip=1.0, checkpointing=False, dtype='float32'),
    fair=dict(logic_dtype='float32', residual='state', control='matched'),
)
LOGIC_KEYS = ('branch', 'axis', 'gates', 'window', 'tau', 'cross_attn', 'alpha', 'learn_alpha', 'gate_mode', 'control',
              'residual', 'route_scale', 'logic_dtype', 'd_logic', 'n_head_logic')
TABLES = dict(
    table1=('baseline', 'nogate', 'intra8', 'inter8', 'inter8_alpha01', 'inter8_learned', 'inter16', 'inter8_noxattn'),
    table3=('nogate', 'intra8', 'inter8'),
    table4=('nogate', 'inter8'),
    table5=('inter8', 'inter8_noxattn', 'nogate'),
    all=tuple(name for name in VARIANTS if name != 'inter8_fp32'),
    precision=('inter8', 'inter8_fp32'),
    depth=('baseline', 'nogate', 'inter8', 'quant'),
    alpha=('inter8_learned',),
    fair=('baseline', 'matched', 'inter8_noxattn'),
)
# depth: of rulebase's 20,000 and 2,000 examples, 9,816 and 665 are left, both balanced, and two depths to test; with 0
# no rule applies in training, with 2 there are 332 to test, of one depth
TABLE_ROWS = dict(table3=dict(task='mnli'), table4=dict(task='multi'), depth=dict(train_depth=1),
                  precision=dict(dtype='bfloat16', logic_dtype='same'), alpha=dict(alpha_lr=2e-4),
                  fair=dict(residual='state', logic_dtype='float32'))
# what a key's value brings: a row of settings, the later over the earlier, keys given over all
ROWS = dict(task=TASKS, preset=PRESETS, variants=TABLE_ROWS, variant=VARIANTS)
CHOICES = CHOICES | dict(dtype=('bfloat16', 'float32'), task=tuple(TASKS), variant=tuple(VARIANTS))
# differences over the runs of a seed, the first minus the second: those that the paper tests, then ours
PAIRS = (('nogate', 'baseline'), ('intra8', 'nogate'), ('inter8', 'nogate'), ('inter8_alpha01', 'nogate'),
         ('inter8_learned', 'nogate'), ('inter16', 'nogate'), ('inter8_noxattn', 'nogate'), ('inter8', 'intra8'),
         ('inter8_noxattn', 'inter8'), ('inter8', 'baseline'), ('matched', 'baseline'), ('inter8_noxattn', 'matched'),
         ('nogate_xattn', 'nogate'), ('inter8', 'nogate_xattn'), ('scaled', 'inter8'), ('ste', 'scaled'),
         ('quant', 'inter8'), ('quant', 'nogate'), ('quant', 'baseline'), ('inter8_fp32', 'inter8'))


# ---- data

def shallow_or_deep(rows, split, config):
    """The training rows of theories whose deepest question is at most train_depth deep; the validation rows whose proof
    is deeper, which leaves Unknown out.

    Unknown has no depth: one of rulebase counts as its theory's rules, which bound its proofs; a theory of ProofWriter
    that has no other question is left out.
    """
    most, deepest = config['train_depth'], {}
    if most < 0:
        return rows
    if split == 'validation':
        kept = [row for row in rows if row['depth'] is not None and row['depth'] > most]
    else:
        for row in rows:
            unknown = row['context'].count('If ') if config['task'] == 'rulebase' else -1
            depth = unknown if row['depth'] is None else row['depth']
            deepest[row['context']] = max(depth, deepest.get(row['context'], depth))
        kept = [row for row in rows if 0 <= deepest[row['context']] <= most]
    if not kept:
        raise ValueError(f'train_depth={most}: {config["task"]} has no {split} examples of '
                         f'{"deeper" if split == "validation" else "such"} proofs: take another depth, or rulebase or '
                         'proofwriter, whose questions have one')
    return kept


def open_data(config, run):
    """(examples by split, tokenizer, parts) of the task: an example has ids, label, depth and task; parts are tasks.

    Those of multi alternate, so that every even batch is half and half.
    """
    parts = ('proofwriter', 'mnli') if config['task'] == 'multi' else (config['task'],)
    where = config['data_dir']

    def make():
        if parts == ('rulebase',) and not Path(where, 'rulebase', 'meta.json').exists():
            prepare.make_rulebase(where)
    main_first(run, make)
    loaded = {part: prepare.load_examples(where, part) for part in parts}
    if config['backbone']:
        tokenizer = prepare.llama_tokenizer(config['backbone'])
    else:
        words = sorted({word for _, meta in loaded.values() for word in meta['words']})
        tokenizer = prepare.get_tokenizer('words', words)
    examples = {}
    for split, n in (('train', config['n_train']), ('validation', config['n_val'])):
        rows = [prepare.subset(shallow_or_deep(loaded[part][0][split], split, config), -(-n // len(parts)),
                               config['seed']) for part in parts]
        rows = [part[:min(map(len, rows))] for part in rows]
        examples[split] = [
            dict(ids=prepare.encode_example(tokenizer, row, loaded[part][1]['template'], config['max_tokens']),
                 label=row['label'], depth=row['depth'], task=part)
            for mixed in zip(*rows) for part, row in zip(parts, mixed)]
    return examples, tokenizer, parts


def order_of(n, parts, config, epoch):
    """The order of n training examples in an epoch: each part is shuffled by itself, so that parts still alternate."""
    draw = np.random.default_rng([config['seed'], epoch])
    return np.stack([parts * draw.permutation(n // parts) + part for part in range(parts)], axis=1).ravel()


def batch_of(examples, pad, device):
    """(ids_BS, mask_BS, labels_B) of examples, padded on the right."""
    ids_BS, mask_BS = prepare.collate([example['ids'] for example in examples], pad)
    return ids_BS.to(device), mask_BS.to(device), torch.tensor([e['label'] for e in examples], device=device)


# ---- what is measured

@torch.no_grad()
def measure(model, examples, pad, config, run):
    """Validation of the model as it stands, over all processes: loss (nats); accuracy, by proof depth in tasks that
    have proofs (Unknown apart, which has none) and by task where there are several; statistics of the routing over
    all real tokens (see Classifier.forward); the median half-life of quant's rates, in tokens."""
    tasks = [example['task'] for example in examples]
    proved = {example['task'] for example in examples if example['depth'] is not None}
    groups = ['' if example['task'] not in proved else 'unknown' if example['depth'] is None else
              f'depth {example["depth"]}' for example in examples]
    depths = sorted(set(groups) - {''})
    names = ['', *depths, *sorted(set(tasks))]
    count = {name: [0, 0] for name in names}                    # right, all
    layers, gates = len(model.llama.layers), 3 * config['gates']
    loss, tokens, sums = 0.0, 0, torch.zeros((layers * gates + 2) if config['branch'] == 'routed' else 0)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i]['ids']))
    batches = [order[i:i + config['eval_batch']] for i in range(0, len(order), config['eval_batch'])]
    model.eval()
    for batch in batches[run.rank::run.world]:
        ids_BS, mask_BS, labels_B = batch_of([examples[i] for i in batch], pad, run.device)
        logits_BN, stats = model(ids_BS, mask_BS)
        loss += F.cross_entropy(logits_BN, labels_B, reduction='sum').item()
        for i, right in zip(batch, (logits_BN.argmax(dim=-1) == labels_B).tolist()):
            for name in (groups[i], tasks[i]):
                count[name][0] += right
                count[name][1] += 1
        if len(sums):
            real = int(mask_BS.sum())
            tokens += real
            sums = sums + real * torch.cat([stats['routing'].flatten(), stats['entropy'][None],
                                            stats['fired'][None]]).double().cpu()
    model.train()
    loss, tokens, *counts = all_sum(loss, tokens, *(number for name in names for number in count[name]), *sums.tolist())
    counts, sums = counts[:2 * len(names)], counts[2 * len(names):]
    count = dict(zip(names, zip(counts[::2], counts[1::2])))
    right = sum(count[name][0] for name in set(tasks))
    record = dict(val_loss=loss / len(examples), val_accuracy=right / len(examples),
                  accuracy_by_depth={name: count[name][0] / count[name][1] for name in depths})
    if len(set(tasks)) > 1:
        record['accuracy_by_task'] = {name: count[name][0] / count[name][1] for name in sorted(set(tasks))}
    if model.fusion is not None:
        record['alpha'] = model.fusion.alpha.item()
    if (config['branch'], config['axis']) == ('routed', 'quant'):
        half_lives = [layer.quantifier.half_life() for layer in model.stream.layers]
        record['half_life_median'] = torch.cat(half_lives).median().item()
    if sums:
        *routing, entropy, fired = (number / tokens for number in sums)
        record |= dict(entropy=entropy, fired=fired, routing=torch.tensor(routing).view(layers, gates).tolist())
    return record


# ---- training

def check(config):
    """Ends in one line where the numbers do not fit."""
    check_numbers(
        config,
        positive=('batch_size', 'micro_batch', 'eval_batch', 'max_tokens', 'log_every', 'd_logic',
                  'n_head_logic', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'd_ff'),
        not_negative=('n_train', 'n_val', 'epochs', 'warmup', 'lr', 'alpha_lr', 'weight_decay', 'grad_clip'))
    for key in ('lr', 'alpha_lr', 'weight_decay', 'alpha', 'tau'):
        if abs(config[key]) > 1e30:
            fail(f'{key}={config[key]}: expected at most 1e30, for the arithmetic of fp32')
    if config['train_depth'] < -1:
        fail(f'train_depth={config["train_depth"]}: expected a depth of proofs, or -1 for all')
    if not 0 <= config['beta2'] < 1:
        fail(f'beta2={config["beta2"]}: expected a number from 0 to below 1')
    if config['task'] == 'multi' and config['batch_size'] % 2:
        fail(f'batch_size={config["batch_size"]}: multi halves each batch, expected an even number')


def llama_of(config, vocab_size):
    """A Llama of the given shape, from scratch."""
    return Llama(vocab_size, config['n_embd'], config['d_ff'], config['n_layer'], config['n_head'], config['n_kv_head'],
                 head=False)


def build(config, vocab_size, run):
    """The classifier on its device: the backbone as stored or from scratch, all else drawn by the seed."""
    dtype = getattr(torch, config['dtype'])
    torch.manual_seed(config['seed'])
    if config['backbone']:
        llama = load_llama(config['backbone'], dtype, run.device, rope_factor=config['rope_factor'])
        if vocab_size > llama.tokens.num_embeddings:
            raise ValueError(f'the tokenizer in {config["backbone"]} has {vocab_size} tokens, its model only '
                             f'{llama.tokens.num_embeddings}: expected the files of one model')
    else:
        llama = llama_of(config, vocab_size).to(run.device, dtype)
    return Classifier(llama, checkpointing=config['checkpointing'], **{key: config[key] for key in LOGIC_KEYS})


def optimizer_of(model, config):
    """AdamW; a learned alpha and the quantifiers' rates have a learning rate of their own and no decay, and an epsilon
    below the rates' gradients, which are smaller than AdamW's 1e-8."""
    own = {name for name, _ in model.named_parameters() if name == 'fusion.alpha' or name.endswith('.decay')}
    groups = [dict(params=[p for name, p in model.named_parameters() if (name in own) == apart], **settings)
              for apart, settings in ((False, dict(weight_decay=config['weight_decay'], rate=config['lr'])),
                                      (True, dict(weight_decay=0.0, rate=config['alpha_lr'], eps=1e-12)))]
    assert sum(len(group['params']) for group in groups) == len(list(model.parameters()))
    return torch.optim.AdamW(groups, lr=config['lr'], betas=(0.9, config['beta2']))


def gradients(net, model, batch, pad, config, run):
    """Accumulates the gradients of one step's batch, the mean over all processes' examples, and clips them. Returns
    (loss, norm before clipping)."""
    mine = batch[run.rank::run.world]
    weight = run.world / len(batch)                             # the processes' gradients are averaged
    if not mine:                                                # more processes than examples: take part, add nothing
        mine, weight = batch[:1], 0.0
    loss = 0.0
    for first in range(0, len(mine), config['micro_batch']):
        part = mine[first:first + config['micro_batch']]
        if run.world > 1:                                       # exchange gradients once, at the end
            net.require_backward_grad_sync = first + len(part) == len(mine)
        part_loss = net(*batch_of(part, pad, run.device))[0] * (len(part) * weight)
        part_loss.backward()
        loss += part_loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config['grad_clip'] or math.inf)
    return all_sum(loss)[0] / run.world, norm.item()


def train(config, run, stop):
    """One run, to its last epoch or a signal. Returns its result; raises Diverged."""
    check(config)
    if not config['backbone'] and config['preset'] != 'tiny' and config['n_embd'] == DEFAULTS['n_embd']:
        fail('no backbone: give --backbone=FOLDER, a Llama of HF or of Meta; or --preset=tiny, which needs none')
    try:
        examples, tokenizer, parts = open_data(config, run)
        model = build(config, tokenizer.vocab_size, run)
    except (ValueError, OSError) as error:
        fail(error)
    except (RuntimeError, MemoryError, OverflowError) as error:
        fail(f'the model does not fit this machine: take smaller numbers ({reason(error)})')
    training, validation = examples['train'], examples['validation']
    labels = [example['label'] for example in validation]
    majority = max(map(labels.count, set(labels))) / len(labels)
    trainable, used = model.num_params()
    optimizer = optimizer_of(model, config)
    per_epoch = -(-len(training) // config['batch_size'])
    last = config['epochs'] * per_epoch
    step, measured, last_loss, record = 0, -1, math.nan, {}
    norms, order = [], None                                     # of the epoch at hand

    folder = open_run('cls', config, run) if last else None     # --epochs=0 leaves nothing behind
    logged = None
    if folder and config['resume']:
        logged = -1
        if (folder / 'last.pt').exists():
            step, measured, last_loss, norms, record = restore(
                folder / 'last.pt', model, optimizer, config, run.device,
                loop=('step', 'measured', 'last_loss', 'norms', 'record'),
                same=(*LOGIC_KEYS, 'task', 'seed', 'n_train', 'train_depth', 'max_tokens', 'batch_size', 'backbone',
                      'dtype'),
                own=('weight_decay', 'rate'))
            logged = step
        if run.main:
            write_config(folder, config, run)
    log = Log(folder or '.', logged, main=run.main and folder is not None)
    net = model
    if run.world > 1:
        net = DistributedDataParallel(model, device_ids=[run.local_rank] if run.device.type == 'cuda' else None)

    if run.main and folder:
        print(f'{used:,} parameters; {config["variant"]}; {config["task"]}, {len(training):,} + {len(validation):,} '
              f'examples, majority {majority:.3f}; {run.device.type} x {run.world}; {folder}', flush=True)
    seconds, trained, tokens, speed = 0.0, 0, 0, 0.0
    quiet = not (run.main and folder)
    bar = tqdm(total=last, initial=step, disable=quiet, unit='step', dynamic_ncols=True)

    def save():
        bar.clear()
        if not all(p.isfinite().all() for p in model.parameters()):
            raise Diverged(step, last_loss)
        if run.main and folder:
            save_checkpoint(folder / 'last.pt', dict(
                model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, measured=measured,
                last_loss=last_loss, norms=norms, record=record, config=config))

    with bar:
        while True:
            if (step == last or step and step % per_epoch == 0) and step != measured:
                record = measure(model, validation, tokenizer.pad, config, run)
                if not math.isfinite(record['val_loss']):
                    raise Diverged(step, last_loss)
                measured = step
                bar.clear()
                log.write(step=step, epoch=step // per_epoch if per_epoch else 0, majority=majority, **record)
                save()
            if step >= last:
                break
            if signum := stop.agreed(run):
                save()
                return dict(interrupted=signum, step=step, out_dir=str(folder))

            started = time.perf_counter()
            epoch, at = divmod(step, per_epoch)
            if at == 0:
                norms = []
            if at == 0 or order is None:
                order = order_of(len(training), len(parts), config, epoch)
            batch = [training[i] for i in order[at * config['batch_size']:][:config['batch_size']]]
            for group in optimizer.param_groups:
                group['lr'] = group['rate'] * min(1.0, (step + 1) / max(1, config['warmup']))
            loss, norm = gradients(net, model, batch, tokenizer.pad, config, run)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(step, last_loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, last_loss = step + 1, loss
            norms.append(norm)
            seconds += time.perf_counter() - started
            trained += len(batch)
            tokens += sum(len(example['ids']) for example in batch)
            speed = trained / seconds

            bar.update()
            accuracy = f', val accuracy {record["val_accuracy"]:.3f}' if record else ''
            bar.set_postfix_str(f'loss {loss:.3f}{accuracy}, {speed:,.1f} examples/s', refresh=False)
            if step % config['log_every'] == 0 or step == last:
                log.write(step=step, loss=loss, grad_norm=norm, examples_per_second=speed,
                          tokens_per_second=tokens / seconds,
                          **{} if model.fusion is None else dict(alpha=model.fusion.alpha.item()))
    return dict(variant=config['variant'], params_trainable=trainable, params_used=used, steps=step, majority=majority,
                **{key: value for key, value in record.items() if key != 'routing'},
                grad_norm=sum(norms) / len(norms) if norms else None, examples_per_second=speed,
                **{'out_dir': str(folder)} if folder else {})


# ---- instead of training one model

VOCAB = 128_256         # Llama 3.1's


def count_params(config):
    """Table 2 of the paper for the given shape, on the meta device, our two controls beside it, the variant asked for
    and, where logic keys given make it another, that."""
    check(config)
    names = ('baseline', 'nogate', 'inter8', 'inter16', 'inter8_noxattn', 'matched', 'nogate_xattn', config['variant'])
    paper = {key: DEFAULTS[key] for key in LOGIC_KEYS} | {key: config[key] for key in ('d_logic', 'n_head_logic')}
    rows = {name: paper | VARIANTS[name] for name in names}
    asked = {key: config[key] for key in LOGIC_KEYS}
    if asked != rows[config['variant']]:
        rows['as given'] = asked
    try:
        with torch.device('meta'):
            llama = llama_of(config, VOCAB)
            counts = {name: Classifier(llama, unused=True, **row).num_params() for name, row in rows.items()}
    except ValueError as error:
        fail(error)
    lines = [[name, f'{trainable:,}', f'{used:,}', f'{used - counts["baseline"][1]:,}']
             for name, (trainable, used) in counts.items()]
    print(table(['variant', 'trainable', 'used', 'used beyond the baseline'], lines))
    print(f'with a vocabulary of {VOCAB:,}\n')
    return {name: dict(trainable=trainable, used=used) for name, (trainable, used) in counts.items()}


def paired(first, second):
    """The seed-paired difference in accuracy of two variants' runs, over the seeds that both have: its mean, standard
    error (sd / sqrt(n)), t, number of seeds, and whether it is supported: positive and more than two standard errors
    (the paper's rule, section 4.1). None for fewer than two seeds."""
    second = {r['seed']: r['val_accuracy'] for r in second if 'val_accuracy' in r}
    diffs = torch.tensor([round(r['val_accuracy'] - second[r['seed']], 9) for r in first      # equal ones stay equal
                          if 'val_accuracy' in r and r['seed'] in second], dtype=torch.float64)
    if len(diffs) < 2:
        return None
    mean, se = diffs.mean().item(), diffs.std().item() / math.sqrt(len(diffs))
    return dict(mean=mean, se=se, t=mean / se if se else math.copysign(math.inf, mean) if mean else 0.0, n=len(diffs),
                supported=mean > 0 and mean > 2 * se)


def summary(results):
    """Text and numbers of the runs {variant: [result of each seed]}: the table of means and sds, accuracy by proof
    depth and by task where there are several, and the paired differences of PAIRS with the paper's verdict, in multi
    for each task too.

    A variant's name may start with its task (mnli_inter8); pairs are of one task.
    """
    lines = []
    forgets = ['half_life_median'] if any('half_life_median' in r for runs in results.values() for r in runs) else []
    for name, runs in results.items():
        sd_of = lambda key, digits: f' ± {runs[0][key + "_sd"]:.{digits}f}' if key + '_sd' in runs[0] else ''
        of = lambda key, digits=3: spread([r.get(key) for r in runs], digits) + sd_of(key, digits)
        used = f'{runs[0]["params_used"]:,}' if 'params_used' in runs[0] else ''
        lines.append([name, len(runs), of('val_accuracy', 4), of('val_loss'), of('entropy', 4), of('fired', 4),
                      of('alpha', 4), of('grad_norm', 2), *(of(key, 1) for key in forgets), used])
    header = ['variant', 'seeds', 'accuracy', 'loss, nats', 'entropy', 'fired', 'alpha', 'gradient norm',
              *(['half-life, tokens'] if forgets else []), 'parameters used']
    majority = {r['seed']: r['majority'] for runs in results.values() for r in runs if 'majority' in r}
    text = table(header, lines)
    if majority:
        text += f'\nThe commonest label alone: {spread(majority.values(), 4)}.\n'
    for key in ('accuracy_by_depth', 'accuracy_by_task'):
        shares = {name: [r.get(key, {}) for r in runs] for name, runs in results.items()}
        parts = list(dict.fromkeys(part for rows in shares.values() for row in rows for part in row))
        if len(parts) > 1:
            text += '\n' + table(['accuracy', *parts], [
                [name, *(spread([row.get(part) for row in rows]) for part in parts)] for name, rows in shares.items()])
    tasks = dict.fromkeys(task for runs in results.values() for r in runs for task in r.get('accuracy_by_task', {}))
    compared = {'': results} | {f', {task}': {
        name: [r | dict(val_accuracy=r['accuracy_by_task'][task]) for r in runs if 'accuracy_by_task' in r]
        for name, runs in results.items()} for task in tasks}
    differences = {}
    for suffix, rows in compared.items():
        for prefix, (first, second) in itertools.product(('', 'mnli_', 'multi_'), PAIRS):
            first, second = prefix + first, prefix + second
            if first in rows and second in rows and (pair := paired(rows[first], rows[second])):
                differences[f'{first} - {second}{suffix}'] = pair
    if differences:
        text += '\n' + table(
            ['difference in accuracy', 'mean, points', 'SE', 't', 't that 95% needs', 'supported (over 2 SE)'],
            [[name, f'{100 * d["mean"]:+.2f}', f'{100 * d["se"]:.2f}', f'{d["t"]:.2f}', round(student_t(d['n'] - 1), 2),
              'yes' if d['supported'] else 'no'] for name, d in differences.items()])
    return text, differences


def summarize(path):
    """The tables of a file of finished runs: one of --variants, or the paper's (variant -> accuracy by seed)."""
    try:
        stored = json.loads(Path(path).read_text(encoding='utf-8'))
        if 'results' in stored:
            results = stored['results']
        else:
            # the paper gives the other figures as means and sds over seeds, entropy in nats
            results = {name: [dict(seed=int(seed), val_accuracy=accuracy) for seed, accuracy in row['seeds'].items()]
                       for name, row in stored['runs'].items()}
            for name, row in stored['runs'].items():
                uniform = math.log(3 * VARIANTS.get(name.split('_')[-1], {}).get('gates', 8))
                results[name][0] |= {key: row[key] for key in row if key.removesuffix('_sd') in (
                    'val_loss', 'alpha', 'grad_norm')}
                results[name][0] |= {'entropy': row['entropy'] / uniform} if 'entropy' in row else {}
        text, differences = summary(results)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f'{path} is no file of runs ({type(error).__name__}: {error}): expected results/NAME.json or the paper\'s '
             'runs as in tests/paper_b_runs.json')
    print(text)
    return {name: {key: d[key] for key in ('mean', 'se', 'supported')} for name, d in differences.items()}


def with_routing(outcome, settings, lines):
    """Adds the last routing weights and the curve of evaluations to a run's result."""
    outcome['curve'] = [{key: value for key, value in line.items() if key != 'routing'}
                        for line in lines if 'val_loss' in line]
    outcome['routing'] = next((line['routing'] for line in reversed(lines) if 'routing' in line), None)
    return outcome


def run_variants(config, run, stop):
    """Trains the variants of a table with every seed; writes results/cls_TASK_NAME.json, .md and two figures."""
    asked = config['variants']
    names = TABLES.get(asked) or tuple(asked.split(','))
    if config['out_dir'] or config['overwrite']:
        fail(f'--variants={asked} names the folders of its runs itself and keeps those that are done: expected neither '
             '--out_dir nor --overwrite')
    if config['variant'] != DEFAULTS['variant']:                # its row would reach into the others
        fail(f'--variant={config["variant"]} trains one model and --variants={asked} several: give one of the two')
    if unknown := [name for name in names if name not in VARIANTS]:
        fail(f'--variants={asked}: {unknown[0]!r} is no variant: expected one table ({", ".join(TABLES)}) or some of '
             f'{", ".join(VARIANTS)}')
    check(config)
    rows = {name: dict(variant=name) | VARIANTS[name] for name in names}
    own = asked if TABLE_ROWS.get(asked, {}).keys() - {'task'} else ''     # its runs are not those of other tables
    results = study('-'.join(filter(None, ('cls', config['task'], own))), rows, config, run, stop, train, with_routing)
    name = f'cls_{config["task"]}_{asked.replace(",", "_")}'
    text, differences = summary(results)
    write_results(name, config, results, differences=differences)
    write_text(Path('results', f'{name}.md'), text)
    draw_seeds(results, Path('results', f'{name}.png'))
    draw_routing(results, Path('results', f'{name}_routing.png'))
    return {variant: spread([r.get('val_accuracy') for r in runs], 4) for variant, runs in results.items()}


def draw_seeds(results, path):
    """The paper's Figure 2: a dot a seed, mean and sd beside them, the majority rate as a line."""
    figure, axis = pyplot().subplots(figsize=(1.2 + 0.75 * len(results), 4), layout='constrained')
    for x, runs in enumerate(results.values()):
        values = torch.tensor([r['val_accuracy'] for r in runs if 'val_accuracy' in r])
        axis.plot([x] * len(values), values, 'o', color='#0072b2', alpha=0.6, ms=5)
        if len(values) > 1:
            axis.errorbar(x + 0.2, values.mean(), values.std(), fmt='_', color='#d55e00', capsize=3, ms=10)
    if majority := [r['majority'] for runs in results.values() for r in runs if 'majority' in r]:
        axis.axhline(max(majority), color='#999999', lw=1, ls='--', label='commonest label')
        figure.legend(loc='outside upper right')
    axis.set_xticks(range(len(results)), list(results), rotation=35, ha='right')
    axis.set_ylabel('validation accuracy; mean and sd')
    save_figure(figure, path)


def draw_routing(results, path):
    """The paper's Figure 3 for the first routed variant and seed: mean routing weight, layers by 3G channels."""
    runs = [(name, r) for name, rows in results.items() for r in rows if r.get('routing')]
    if not runs:
        return
    name, first = next(((name, r) for name, r in runs if name == 'inter8'), runs[0])
    weights = torch.tensor(first['routing'])
    layers, channels = weights.shape
    figure, axis = pyplot().subplots(figsize=(8, 2 + 0.25 * layers), layout='constrained')
    image = axis.imshow(weights.numpy(), aspect='auto', cmap='viridis', vmin=0)
    for group, label in enumerate(('AND', 'OR', 'NOT')):
        axis.axvline(group * channels / 3 - 0.5, color='white', lw=2)
        axis.text((group + 0.5) * channels / 3 - 0.5, -0.7, label, ha='center', va='bottom')
    axis.set(xlabel='routed channel', ylabel='layer', yticks=range(0, layers, max(1, layers // 8)))
    top = float(weights.max())
    bar = figure.colorbar(image, label='mean routing weight')
    bar.set_ticks([1 / channels, top], labels=[f'uniform, 1/{channels}', f'{top:.2f}'])
    figure.suptitle(f'{name}, seed {first["seed"]}')
    save_figure(figure, path)


def main():
    config = configure(__file__, DEFAULTS, choices=CHOICES, rows=ROWS)
    if config['summarize']:
        return result(**summarize(config['summarize']))
    if config['count_params']:
        return result(**count_params(config))
    run = launch(config['device'])
    torch.set_float32_matmul_precision('high')
    stop = StopSignal()
    try:
        outcome = (run_variants if config['variants'] else train)(config, run, stop)
    except Diverged as error:
        fail(error, status=3)
    except torch.cuda.OutOfMemoryError as error:
        fail(f'out of memory: take a smaller micro_batch, eval_batch or max_tokens ({reason(error)})', status=1)
    conclude(outcome, __file__)


if __name__ == '__main__':
    main()
