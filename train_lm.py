"""Trains a GPT whose feed-forward layers compute explicit fuzzy logic (paper A).

    python train_lm.py --preset=tiny --ffn=nc --quant=on         # a CPU, two minutes, makes its own data
    python train_lm.py --ffn=nc --quant=on                       # one GPU: GPT-2 small on OpenWebText
    torchrun --nproc_per_node=8 train_lm.py --ffn=nc --quant=on  # eight; on several machines, the same on each, with
                                                                 # --nnodes=N --rdzv_backend=c10d --rdzv_endpoint=HOST

    python train_lm.py --ffn=nc --quant=on --count_params        # parameters by FFN kind; needs no data
    python train_lm.py --resume --out_dir=latest                 # continues a run, bit for bit on a CPU
    python train_lm.py --preset=tiny --compare=all               # seven settings, three seeds: table and figure
    python train_lm.py --preset=books --compare=gelu,nc,nc+quant   # three of them on a text prepared as `books`
    python train_lm.py --preset=tiny --boundary                  # how Boolean can an FFN be? twelve settings

batch_size counts the sequences of a step over all processes, so the same command takes the same steps on any number of
them: a step's sequences are a function of (seed, step), each process takes its share, micro_batch of them at a time.
A loss or gradient that is not finite stops the run with status 3; a signal, after the step at hand, with 128 + signal.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import prepare
from evaluate import batch_at, mean_loss, pair_accuracy, windows
from model import FFN_KINDS, GPT, MODEL_KEYS, param_groups
from runtime import (Diverged, Log, StopSignal, all_sum, check_numbers, conclude, configure, fail, finish, launch,
                     main_first, open_run, precision, pyplot, restore, result, save_checkpoint, save_figure, spread,
                     study, table, write_config, write_results, write_text)

DEFAULTS = dict(
    # the run
    out_dir='',                 # folder of the run; '' is a new dated one below out/lm
    resume=False,               # continue the run in out_dir
    overwrite=False,            # replace the run in out_dir
    seed=1,                     # initial weights and the order of the data
    device='auto',              # auto | cpu | cuda | mps
    dtype='bfloat16',           # precision of the forward pass: bfloat16 (weights stay fp32) | float32
    compile=True,               # torch.compile, on cuda only
    # the data
    dataset='openwebtext',      # a folder below data_dir, made by prepare.py
    data_dir='data',            # where prepare.py writes
    # the GPT: GPT-2 small
    n_layer=12,                 # blocks
    n_head=12,                  # attention heads
    n_embd=768,                 # width D; an FFN has 4 D hidden units
    block_size=1024,            # context in tokens
    # its feed-forward layers
    ffn='gelu',                 # gelu | relu | glu | swiglu | bilinear | sigbilinear | nc
    bool_frac=0.25,             # nc: share of the hidden units that are Boolean
    quant=False,                # nc: turn part of the Boolean units into quantifiers along the sequence
    quant_frac=0.5,             # that part
    quant_form='corrected',     # proportion units: corrected (a weighted mean) | printed (the paper's recurrence)
    bound_write=False,          # tanh on what an FFN writes to the residual stream
    highway=False,              # a linear path beside each FFN
    op_init='normal',           # write weights of the Boolean units: normal | zero (a layer starts as its GELU part)
    # optimisation: AdamW, linear warm-up, cosine decay to a tenth
    batch_size=480,             # sequences a step over all processes: 0.49M tokens
    micro_batch=16,             # sequences a process computes at once
    max_steps=36_800,           # two epochs of OpenWebText
    warmup=700,                 # steps
    lr=6e-4,                    # highest learning rate
    decay_lr_mult=100.0,        # learning rate of the quantifiers' decays over lr
    weight_decay=0.1,           # on matrices
    grad_clip=1.0,              # largest gradient norm; 0 is none
    # what is written down
    log_every=10,               # steps between lines in log.jsonl
    eval_every=500,             # steps between evaluations and saved checkpoints
    eval_windows=512,           # windows of the validation split, evenly spread; 0 is all
    keep=0,                     # also keep the checkpoint of every keep-th step
    # instead of training one model
    count_params=False,         # print parameter counts and stop
    compare='',                 # train rows of COMPARE, all or names with commas, over `seeds`: results/compare.*
    boundary=False,             # train BOUNDARY's rows over `seeds`; results/boundary.json, .md and .png
    seeds='1,2,3',              # of those studies
)
PRESETS = dict(
    tiny=dict(dataset='licensing', n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=32, micro_batch=32,
              max_steps=1000, warmup=50, lr=3e-3, eval_every=50, dtype='float32', compile=False),
)
PRESETS['books'] = PRESETS['tiny'] | dict(
    dataset='books', block_size=256, batch_size=8, micro_batch=2, max_steps=1500, eval_every=125, eval_windows=128,
    keep=250, dtype='bfloat16')
CHOICES = dict(ffn=FFN_KINDS, quant_form=('corrected', 'printed'), op_init=('normal', 'zero'),
               dtype=('bfloat16', 'float32'))

NC_QUANT = dict(ffn='nc', quant=True)
COMPARE = {
    'gelu': dict(ffn='gelu'),
    'nc': dict(ffn='nc'),
    'bilinear': dict(ffn='bilinear'),
    'nc+quant': NC_QUANT,
    'nc+quant, as printed': NC_QUANT | dict(quant_form='printed'),
    'nc+quant, decays at lr': NC_QUANT | dict(decay_lr_mult=1.0),
    'nc+quant, shuffled text': NC_QUANT | dict(dataset='licensing_shuffled'),
}
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
REMEDIES = {'none': {}, 'bound_write': dict(bound_write=True), 'highway': dict(highway=True)}
# ten times the usual learning rate and no clipping; at lr=0.1 no fraction tried left the unigram loss in 80 steps
HARSH = dict(lr=0.03, grad_clip=0.0, max_steps=300, eval_every=100)
BOUNDARY = {f'{frac:g}, {remedy}': HARSH | dict(ffn='nc', bool_frac=frac, **keys)
            for frac in FRACTIONS for remedy, keys in REMEDIES.items()}

# bf16 operations a second without sparsity, as the makers publish them; by name, the first that fits
PEAK_FLOPS = {'H100 PCIe': 756e12, 'H100': 989e12, 'H200': 989e12, 'A100': 312e12, 'RTX 4090': 165e12}


# ---- data

def open_data(config, run):
    """(tokens by split, meta, minimal pairs) of the dataset; the generated ones are made if they are not there."""
    where, name = config['data_dir'], config['dataset']

    def make():
        if name in ('licensing', 'licensing_shuffled') and not Path(where, name, 'meta.json').exists():
            prepare.make_licensing(where, name, shuffled=name == 'licensing_shuffled')

    main_first(run, make)
    try:
        (tokens, meta), pairs = prepare.load_tokens(where, name), prepare.load_pairs(where, name)
    except (ValueError, OSError) as error:
        fail(error)
    for split, ids in tokens.items():
        if len(ids) <= config['block_size']:
            fail(f'block_size={config["block_size"]} is beyond the {len(ids)} tokens of {where}/{name}/{split}.bin: '
                 'it must be smaller')
    return tokens, meta, pairs


# ---- what is measured

@torch.no_grad()
def saturation(model, ids_BT):
    """Share of memberships close to 0 or 1 (FFN.saturation), the mean over layers. None without Boolean units."""
    shares = []
    hooks = [block.ffn.register_forward_pre_hook(lambda ffn, inputs: shares.append(ffn.saturation(inputs[0])))
             for block in model.blocks]
    model(ids_BT)
    for hook in hooks:
        hook.remove()
    return None if None in shares else sum(share.item() for share in shares) / len(shares)


def measure(model, ids, pairs, tokenizer, config, run):
    """Validation loss (nats a token), minimal pairs, memory and saturation of the model as it stands."""
    starts = windows(ids, config['block_size'], config['eval_windows'])
    read = lambda starts: batch_at(ids, starts, config['block_size'], run.device)
    model.eval()
    context = precision(run.device, config['dtype'])
    record = dict(val_loss=mean_loss(model, read, starts, config['micro_batch'], run, context))
    if pairs:
        families = pair_accuracy(model, pairs, tokenizer, run.device)
        record |= dict(licensing_accuracy=families.pop('overall'), licensing_families=families)
    record |= model.memory() | dict(saturation=saturation(model, read(starts[:8])[0]))
    model.train()
    return record


# ---- training

def peak_flops(device):
    """What this GPU could do a second, or None where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else ''
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)


def learning_rate(step, config):
    """Linear warm-up, then a cosine to a tenth of lr at max_steps."""
    if step < config['warmup']:
        return config['lr'] * (step + 1) / config['warmup']
    share = min(1.0, (step - config['warmup']) / max(1, config['max_steps'] - config['warmup']))
    return config['lr'] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def check(config, run):
    """Ends in one line where the numbers do not fit."""
    check_numbers(
        config,
        positive=('batch_size', 'micro_batch', 'block_size', 'n_layer', 'n_head', 'n_embd', 'eval_every',
                  'log_every'),
        not_negative=('max_steps', 'warmup', 'lr', 'decay_lr_mult', 'weight_decay', 'grad_clip',
                      'eval_windows', 'keep'))
    if config['batch_size'] % run.world:
        fail(f'batch_size={config["batch_size"]} must be divisible by the {run.world} processes')


def build(vocab_size, config):
    try:
        return GPT(vocab_size, **{key: config[key] for key in MODEL_KEYS})
    except ValueError as error:
        fail(error)


def gradients(net, model, ids, step, config, run):
    """Accumulates the gradients of one step's batch, a function of (seed, step), and clips them. Returns (loss, norm
    before clipping)."""
    draw = np.random.default_rng([config['seed'], step])
    starts = draw.integers(len(ids) - config['block_size'], size=config['batch_size'])[run.rank::run.world]
    loss = 0.0
    for first in range(0, len(starts), config['micro_batch']):
        rows = starts[first:first + config['micro_batch']]
        if run.world > 1:                                       # the processes exchange gradients once, at the end
            net.require_backward_grad_sync = first + len(rows) == len(starts)
        with precision(run.device, config['dtype']):
            part = net(*batch_at(ids, rows, config['block_size'], run.device)) * (len(rows) / len(starts))
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config['grad_clip'] or math.inf)
    return all_sum(loss)[0] / run.world, norm.item()


def train(config, run, stop):
    """One run, to max_steps or a signal. Returns its result; raises Diverged."""
    check(config, run)
    tokens, meta, pairs = open_data(config, run)
    tokenizer = prepare.get_tokenizer(meta) if pairs else None
    torch.manual_seed(config['seed'])
    model = build(meta['vocab_size'], config).to(run.device)
    groups = param_groups(model, config['weight_decay'], config['decay_lr_mult'])
    optimizer = torch.optim.AdamW(groups, lr=config['lr'], betas=(0.9, 0.95), fused=run.device.type == 'cuda')
    step, measured, best, last_loss, record = 0, -1, math.inf, math.nan, {}

    # --count_params and --max_steps=0 leave nothing behind
    folder = open_run('lm', config, run) if config['max_steps'] else None
    logged = None                                               # the step up to which log.jsonl holds
    if folder and config['resume']:
        logged = -1
        if (folder / 'last.pt').exists():
            step, measured, best, last_loss, record = restore(
                folder / 'last.pt', model, optimizer, config, run.device,
                loop=('step', 'measured', 'best', 'last_loss', 'record'), same=(*MODEL_KEYS, 'dataset'),
                own=('weight_decay', 'lr_mult'))
            logged = step
        if run.main:
            write_config(folder, config, run)
    log = Log(folder or '.', logged, main=run.main and folder is not None)

    net = torch.compile(model) if config['compile'] and run.device.type == 'cuda' else model
    if run.world > 1:
        net = DistributedDataParallel(net, device_ids=[run.local_rank] if run.device.type == 'cuda' else None)
    peak = peak_flops(run.device)

    if run.main and folder:
        print(f'{model.num_params():,} parameters; {config["ffn"]}{" with quantifiers" * config["quant"]}; '
              f'{config["dataset"]}; {run.device.type} x {run.world}; {folder}', flush=True)
    seconds, trained, tokens_per_second = 0.0, 0, 0.0
    quiet = not (run.main and folder)
    bar = tqdm(total=config['max_steps'], initial=step, disable=quiet, unit='step', dynamic_ncols=True)

    def save(*names):
        bar.clear()                                             # should it fail, its line stands alone
        if not all(p.isfinite().all() for p in model.parameters()):
            raise Diverged(step, last_loss)
        if run.main and folder:
            for name in names:
                save_checkpoint(folder / name, dict(
                    model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, measured=measured, best=best,
                    last_loss=last_loss, record=record, config=config, vocab_size=meta['vocab_size']))

    with bar:
        while True:
            if (step % config['eval_every'] == 0 or step == config['max_steps']) and step != measured:
                record = measure(model, tokens['val'], pairs, tokenizer, config, run)
                if not math.isfinite(record['val_loss']):
                    raise Diverged(step, last_loss)
                measured, improved = step, record['val_loss'] < best
                best = min(best, record['val_loss'])
                bar.clear()
                log.write(step=step, **record)
                if step:
                    save(*['best.pt'] * improved, 'last.pt')
            if step >= config['max_steps']:
                break
            if signum := stop.agreed(run):
                save('last.pt')
                return dict(interrupted=signum, step=step, out_dir=str(folder))

            started = time.perf_counter()
            lr = learning_rate(step, config)
            for group in optimizer.param_groups:
                group['lr'] = lr * group['lr_mult']
            loss, norm = gradients(net, model, tokens['train'], step, config, run)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(step, last_loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, last_loss = step + 1, loss
            seconds += time.perf_counter() - started
            trained += config['batch_size'] * config['block_size']
            tokens_per_second = trained / seconds

            bar.update()
            status = f'loss {loss:.3f}, val {record["val_loss"]:.3f}, {tokens_per_second:,.0f} tokens/s'
            bar.set_postfix_str(status, refresh=False)
            if step % config['log_every'] == 0 or step == config['max_steps']:
                log.write(step=step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=tokens_per_second,
                          **{'mfu': tokens_per_second * model.flops_per_token() / (run.world * peak)} if peak else {})
            if config['keep'] and step % config['keep'] == 0:
                save(f'step_{step:06d}.pt')
    return dict(params=model.num_params(), steps=step, tokens_per_second=tokens_per_second, **record,
                **{'out_dir': str(folder)} if folder else {})


# ---- instead of training one model

def count_params(config):
    """Parameters of the model by FFN kind, against GELU's, on the meta device."""
    try:
        vocab_size = prepare.load_tokens(config['data_dir'], config['dataset'])[1]['vocab_size']
    except (ValueError, OSError):
        vocab_size = len(prepare.WORDS) if config['dataset'].startswith('licensing') else 50257      # GPT-2's
    with torch.device('meta'):
        asked = build(vocab_size, config)
        rows = {kind: dict(ffn=kind, quant=False) for kind in FFN_KINDS} | {'nc, quant=on': NC_QUANT}
        models = {name: build(vocab_size, config | row | dict(highway=False)) for name, row in rows.items()}
        counts = {name: model.num_params() for name, model in models.items()}
    print(f'{"ffn":<14}{"parameters":>14}{"over gelu":>12}')
    for name, n in counts.items():
        print(f'{name:<14}{n:>14,}{n - counts["gelu"]:>+12,}{n / counts["gelu"] - 1:>+10.4%}')
    return dict(params=asked.num_params(), over_gelu=asked.num_params() - counts['gelu'],
                params_ffn=sum(p.numel() for p in asked.blocks[0].ffn.parameters()))


def signs(outcome, settings, lines):
    """Adds to a run's result the curve of measurements, the last saturation, and signs of instability in the log: rise,
    the most that the training loss rose over its lowest value before, and spike, the largest gradient norm after the
    warm-up over the median one."""
    losses = [line['loss'] for line in lines if 'loss' in line]
    norms = [line['grad_norm'] for line in lines if 'loss' in line and line['step'] > settings['warmup']]
    outcome['curve'] = [line for line in lines if 'val_loss' in line]
    outcome['saturation'] = outcome['curve'][-1]['saturation']
    outcome['rise'] = max((loss - min(losses[:i + 1]) for i, loss in enumerate(losses)), default=0.0)
    outcome['spike'] = max(norms) / float(np.median(norms)) if norms else None
    return outcome


def publish(name, results, config, header, lines, draw):
    """Writes results/NAME.json, .md and .png, and prints the table."""
    write_results(name, config, results)
    write_text(Path('results', f'{name}.md'), table(header, lines))
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.8), layout='constrained')
    draw(*axes)
    save_figure(figure, Path('results', f'{name}.png'))


COLORS = ('#666666', '#0072b2', '#d55e00')


def compare(config, run, stop):
    """Claims A1, A4, A10, A13 of paper A at small size: loss, licensing accuracy and half-lives by kind of FFN."""
    names = list(COMPARE) if config['compare'] == 'all' else config['compare'].split(',')
    if unknown := [row for row in names if row not in COMPARE]:
        fail(f'--compare={config["compare"]}: {unknown[0]!r} is none of all, {", ".join(COMPARE)}')
    if 'gelu' not in names:
        fail(f'--compare={config["compare"]}: expected gelu among them, which the others are measured against')
    name = 'compare' if config['dataset'] == 'licensing' else f'compare_{config["dataset"]}'
    results = study(name, {row: COMPARE[row] for row in names}, config, run, stop, train, signs)
    for row, lost in [(row, r) for row, runs in results.items() for r in runs if 'diverged_at' in r]:
        fail(f'{row} diverged with seed {lost["seed"]} at step {lost["diverged_at"]}, and --compare is of runs that '
             f'end: move {Path("out", name)} away and lower lr', status=3)
    lines = []
    for row, runs in results.items():
        of = lambda key, digits: spread([r.get(key) for r in runs], digits)
        over = [100 * (r['val_loss'] / g['val_loss'] - 1) for r, g in zip(runs, results['gelu'])]
        lines.append([row, f'{runs[0]["params"]:,}', of('val_loss', 4), '' if 'shuffled' in row else spread(over, 2),
                      of('licensing_accuracy', 3), of('half_life_median', 1), of('half_life_median_top', 1),
                      of('half_life_median_proportion', 1), of('latches', 0)])

    shown = [row for row in ('gelu', 'nc', 'nc+quant') if row in results]
    curves = {row: [r['curve'] for r in results[row]] for row in shown}
    history = lambda row, key: np.array([[point[key] for point in curve] for curve in curves[row]])    # seeds, steps
    steps = [point['step'] for point in curves['gelu'][0]]
    licensed = 'licensing_accuracy' in curves['gelu'][0][0]

    def draw(left, right):
        for color, row in zip(COLORS, shown):
            axes = {right: history(row, 'val_loss')}
            axes[left] = history(row, 'licensing_accuracy') if licensed else 100 * np.expm1(
                axes[right] - history('gelu', 'val_loss'))
            for axis, values in axes.items():
                axis.plot(steps, values.T, color=color, alpha=0.25, lw=1)
                axis.plot(steps, values.mean(0), color=color, lw=2, label=row)
        left.set(xlabel='step', ylabel='perplexity over gelu, %', xlim=(0, steps[-1]))
        floor = min(history(row, 'val_loss')[:, -1].min() for row in shown)
        right.set(xlabel='step', ylabel='validation loss, nats a token', xlim=(0, steps[-1]), ylim=(floor, floor + 0.6))
        if licensed:
            left.set(ylabel='licensing accuracy, held-out pairs', ylim=(0.45, 1.01))
        if name == 'compare':                                   # the paper's difference is one of the first epoch
            left.set_xlim(0, steps[-1] / 2)
            right.set_xlim(0, steps[-1] / 2)
        left.legend()

    header = ['FFN', 'parameters', 'val loss, nats', 'over gelu, %', 'licensing accuracy', 'half-life, exists',
              'its top fifth', 'half-life, proportion', 'latches']
    filled = [i for i in range(len(header)) if any(line[i] for line in lines)]
    publish(name, results, config, [header[i] for i in filled], [[line[i] for i in filled] for line in lines], draw)
    return {row: spread([r['val_loss'] for r in runs], 4) for row, runs in results.items()}


def boundary(config, run, stop):
    """Claim A9 of paper A at small size: what the Boolean fraction and the remedies do at BOUNDARY's learning rate."""
    results = study('boundary', BOUNDARY, config, run, stop, train, signs)
    losses = {row: [r['val_loss'] for r in runs if 'diverged_at' not in r] for row, runs in results.items()}
    saturations = {row: [r['saturation'] for r in runs] for row, runs in results.items()}
    lines = []
    for row, runs in results.items():
        steps = ', '.join(str(r['diverged_at']) for r in runs if 'diverged_at' in r)
        lines.append([*row.split(', '), spread(losses[row]), steps or 'none', spread([r['rise'] for r in runs], 2),
                      spread([r['spike'] for r in runs], 1), spread(saturations[row], 2)])

    def draw(left, right):
        for color, remedy in zip(COLORS, REMEDIES):
            rows = {frac: f'{frac:g}, {remedy}' for frac in FRACTIONS}
            for axis, values in ((left, losses), (right, saturations)):
                points = [(frac, value) for frac, row in rows.items() for value in values[row]]
                means = [(frac, np.mean(values[row])) for frac, row in rows.items() if values[row]]
                axis.plot(*zip(*points), 'o', ms=4, color=color, alpha=0.5)
                axis.plot(*zip(*means), color=color, label=remedy)
        left.set(xlabel='Boolean fraction', ylabel='validation loss at the end, nats a token', xticks=FRACTIONS)
        right.set(xlabel='Boolean fraction', ylabel='memberships within 0.05 of 0 or 1', xticks=FRACTIONS, ylim=(0, 1))
        left.legend(title='remedy')

    header = ['Boolean fraction', 'remedy', 'val loss, nats', 'diverged at step', 'largest rise of the loss, nats',
              'largest gradient norm over the median', 'saturation']
    publish('boundary', results, config, header, lines, draw)
    return {row: spread(values) or 'diverged' for row, values in losses.items()}


def main():
    config = configure(__file__, DEFAULTS, CHOICES, rows=dict(preset=PRESETS))
    run = launch(config['device'])
    torch.set_float32_matmul_precision('high')
    if config['count_params']:
        check(config, run)
        result(**count_params(config))
        return finish()
    stop = StopSignal()
    try:
        outcome = (compare if config['compare'] else boundary if config['boundary'] else train)(config, run, stop)
    except Diverged as error:
        fail(error, status=3)
    conclude(outcome, __file__)


if __name__ == '__main__':
    main()
