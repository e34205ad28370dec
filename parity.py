"""What can a feed-forward layer reason about, per parameter? N-bit parity, learned by a stack of nothing else (paper A,
section 5).

    python parity.py --n 12 --ffn=bilinear            # one setting, eight seeds at once: half a minute on a CPU
    python parity.py --sweep                          # claims A2, A3: the largest N by kind, depth and width
    python parity.py --sweep --norm=off               # the same without LayerNorm, where 2^depth bounds bilinear
    python parity.py --fixed                          # one layer, each point of the grid by itself: who solves 8 bits?
    python parity.py --dynamics                       # claim A8: does logic crystallise where the task pays for it?

Parity is 1 where an odd number of bits is set. No smaller set of the bits says anything about it, so all of them have
to be combined: the largest N that a stack solves measures how well its hidden units combine.

    bits [B,N] -> embed -> depth x ( FFN(norm(x)) ) -> norm -> readout -> logit [B]          x + FFN(..) with --residual

Solved means right on every one of the 2^N inputs; above N=16, on 65,536 inputs drawn anew at each check. All models,
one a seed (in a study of the grid one a seed and point), are one computation: their weights are the rows of one matrix,
and torch.func.vmap runs them side by side.

A study fixes most settings itself; beside device it heeds those below and refuses any other:

    --sweep      kinds residual norm bool_frac weight_decay check_every seed        results/parity.json, .md, .png
    --fixed      residual norm bool_frac weight_decay check_every seed              results/parity_fixed.json, .md
    --dynamics   d_model bool_frac residual norm init_scale check_every n_seeds seed
                                                                                    results/parity_dynamics.json, .png

With --norm=off the names end in _plain. What a study has trained is kept in out/parity, and a study that was stopped
goes on from there.
"""

import itertools
import math
import os
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

from model import FFN, FFN_KINDS
from runtime import (check_numbers, check_results, configure, fail, interruptible, launch, plain, pyplot, read_json,
                     result, save_figure, shown, table, write_json, write_text)

DEFAULTS = dict(
    n=12,                   # bits
    ffn='bilinear',         # gelu | relu | glu | swiglu | bilinear | sigbilinear | nc
    depth=4,                # layers
    width=64,               # hidden units of a GELU layer; the other kinds get its parameters
    d_model=64,             # width of what the layers read and write
    bool_frac=0.25,         # nc: share of the hidden units that are Boolean
    residual=False,         # add each layer's input to its output
    norm=True,              # LayerNorm before each layer and before the readout
    bits='pm',              # coding of the input: pm is -1 and +1, 01 is 0 and 1
    lr=3e-3,                # learning rate of AdamW
    init_scale=2.0,         # initial weights have the standard deviation init_scale / sqrt(fan-in)
    weight_decay=0.0,       # on everything
    batch_size=1024,        # inputs a step, drawn anew; all 2^n where that is no more
    steps=2000,             # at most
    check_every=25,         # steps between checks of all inputs
    n_seeds=8,              # models, trained side by side
    seed=1,                 # of the first
    device='auto',          # auto | cpu | cuda | mps
    # instead of one setting, a study
    sweep=False,            # the frontier over SWEEP
    kinds='gelu,nc,sigbilinear,bilinear',   # that it compares
    fixed=False,            # each point of SWEEP's grid by itself, at depth 1 and the widths and N of FIXED
    dynamics=False,         # nc over the steps of DYNAMICS
)
CHOICES = dict(ffn=FFN_KINDS, bits=('pm', '01'))

# what each study heeds, beside device
HEEDED = dict(
    sweep=('kinds', 'residual', 'norm', 'bool_frac', 'weight_decay', 'check_every', 'seed'),
    fixed=('residual', 'norm', 'bool_frac', 'weight_decay', 'check_every', 'seed'),
    dynamics=('d_model', 'bool_frac', 'residual', 'norm', 'init_scale', 'check_every', 'n_seeds', 'seed'),
)

# each kind, depth and width gets its best of the same grid: a point is a learning rate, an initial scale and a coding
SWEEP = dict(depths=(1, 2, 4), widths=(8, 16, 32), largest=10, lrs=(3e-3, 1e-2, 3e-2), init_scales=(1.0, 2.0, 4.0),
             codings=('pm', '01'))
SWEEP_SETTINGS = dict(d_model=16, batch_size=256, steps=1000, n_seeds=8)

FIXED = dict(widths=(8, 12, 16), ns=(6, 8), kinds=('gelu', 'nc', 'sigbilinear'))

# what is trained past the point where it generalises: a quarter or two fifths of all inputs are held out
DYNAMICS = {
    'parity of 8 bits': dict(n=8, held_out=0.25, depth=1, width=32, lr=5e-3, weight_decay=0.3, steps=6000),
    'addition modulo 31': dict(modulus=31, held_out=0.4, depth=1, width=128, lr=3e-3, weight_decay=0.3, steps=6000),
}


class Stack(nn.Module):
    """inputs [B,n_in] -> logits [B,n_out] through depth feed-forward layers, which alone can combine inputs.

    bits='pm' turns inputs 0 and 1 into -1 and +1 first.
    """

    def __init__(self, config, n_in, n_out=1):
        super().__init__()
        d, width, depth, scale = (config[key] for key in ('d_model', 'width', 'depth', 'init_scale'))
        self.embed, self.readout = nn.Linear(n_in, d), nn.Linear(d, n_out)
        self.ffns = nn.ModuleList(FFN(config['ffn'], d, width, bool_frac=config['bool_frac']) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(d) if config['norm'] else nn.Identity() for _ in range(depth + 1))
        self.residual = config['residual']
        for linear in (self.embed, self.readout):
            nn.init.normal_(linear.weight, std=scale / math.sqrt(linear.in_features))
            nn.init.zeros_(linear.bias)
        for ffn in self.ffns:
            ffn.init_weights(scale / math.sqrt(d), scale / math.sqrt(ffn.down.in_features))
        self.register_buffer('pm', torch.tensor(float(config['bits'] == 'pm')))     # so that a stack may hold both

    def forward(self, x, read=None):
        """read(ffn, its input), where given, is called at each layer, and its answers are returned beside the logits.
        """
        x_BD = self.embed(x * (1 + self.pm) - self.pm)
        answers = []
        for norm, ffn in zip(self.norms, self.ffns):
            h_BD = norm(x_BD)
            if read:
                answers.append(read(ffn, h_BD))
            x_BD = x_BD + ffn(h_BD) if self.residual else ffn(h_BD)
        logits = self.readout(self.norms[-1](x_BD))
        return (logits, answers) if read else logits


def all_inputs(n):
    """All 2^n rows of n bits [2^n,n]."""
    return (torch.arange(2 ** n)[:, None] >> torch.arange(n) & 1).float()


def parity(bits):
    """[...,N] -> [...], 1.0 where an odd number of bits is set."""
    return bits.sum(-1) % 2


# ---- many models as one

CHECKED = 4096      # inputs in one forward pass of a check


def start(config, points, n_in, n_out=1, device='cpu'):
    """n_seeds models for each point (settings over config that leave the shapes), in that order.

    Returns (forward, weights_MP, update): weights_MP holds a model's P weights in each row, in the order of its
    parameters(); forward(weights_MP, x) -> logits [M,B,n_out] for x [M,B,n_in], or [B,n_in] where all see the same;
    update() is a step of AdamW, each model at its own learning rate, and clears the gradients.
    """
    models = [config | point | dict(seed=config['seed'] + seed)
              for point, seed in itertools.product(points, range(config['n_seeds']))]
    stacks = []
    for model in models:
        torch.manual_seed(model['seed'])
        stacks.append(Stack(model, n_in, n_out).to(device))
    with torch.no_grad():
        weights_MP = torch.stack([parameters_to_vector(stack.parameters()) for stack in stacks]).requires_grad_()
    pm_M = torch.stack([stack.pm for stack in stacks])
    lr_M = torch.tensor([model['lr'] for model in models], device=device)
    stack = stacks[0]                                            # the others were there for their weights alone
    names, shapes = zip(*((name, p.shape) for name, p in stack.named_parameters()))
    sizes = [shape.numel() for shape in shapes]

    def forward(weights_MP, x, **options):
        def one(weights_P, pm, x):
            params = {name: p.view(shape) for name, p, shape in zip(names, weights_P.split(sizes), shapes)}
            return functional_call(stack, params | {'pm': pm}, (x,), options)
        return vmap(one, in_dims=(0, 0, 0 if x.dim() == 3 else None))(weights_MP, pm_M, x)

    # AdamW's step, its decay included, is proportional to its rate, and its moments know nothing of the rate: so each
    # model's step is one of rate 1, cut to the model's own
    optimizer = torch.optim.AdamW([weights_MP], lr=1.0, weight_decay=config['weight_decay'], fused=True)

    @torch.no_grad()
    def update():
        before_MP = weights_MP.clone()
        optimizer.step()
        optimizer.zero_grad()
        torch.lerp(before_MP, weights_MP, lr_M[:, None], out=weights_MP)

    return forward, weights_MP, update


@torch.no_grad()
def solved(forward, weights_MP, n, generator):
    """[M] bool: right on all 2^n inputs, or above n=16 on 2^16 drawn by generator."""
    right_M = torch.tensor(True, device=weights_MP.device)
    x = all_inputs(n) if n <= 16 else torch.randint(0, 2, (2 ** 16, n), generator=generator).float()
    for bits in x.to(weights_MP.device).split(CHECKED):
        right_M = right_M & ((forward(weights_MP, bits)[..., 0] > 0) == (parity(bits) > 0)).all(dim=1)
    return right_M.cpu()


def train(config, points, wanted, device='cpu', bar=None):
    """Trains n_seeds models for each point at once, until `wanted` seeds of one point have solved it, or for `steps`.

    Returns solved_at [points, n_seeds]: the step at which each was first seen to be right on all inputs, or -1.
    """
    n, seeds = config['n'], config['n_seeds']
    forward, weights_MP, update = start(config, points, n, device=device)
    generator = torch.Generator().manual_seed(config['seed'])
    every = all_inputs(n).to(device) if 2 ** n <= config['batch_size'] else None
    solved_at = torch.full((len(points), seeds), -1)
    for step in range(config['steps'] + 1):
        if step % config['check_every'] == 0 or step == config['steps']:
            right = solved(forward, weights_MP, n, generator).view_as(solved_at)
            solved_at[right & (solved_at < 0)] = step
            best = int((solved_at >= 0).sum(dim=1).max())
            if bar is not None:
                bar.set_postfix_str(f'{best} of {seeds} seeds have solved it')
        if step == config['steps'] or best >= wanted:
            break
        if every is None:                       # each seed draws its own inputs, the same at every point
            bits = torch.randint(0, 2, (seeds, config['batch_size'], n), generator=generator).float().to(device)
            x, odd = bits.repeat(len(points), 1, 1), parity(bits).repeat(len(points), 1)
        else:
            x, odd = every, parity(every).expand(len(weights_MP), -1)
        loss_MB = F.binary_cross_entropy_with_logits(forward(weights_MP, x)[..., 0], odd, reduction='none')
        loss_MB.mean(dim=1).sum().backward()    # a sum: no model feels another
        update()
        if bar is not None:
            bar.update()
    return solved_at


# ---- one setting

def check(config, rows=None, n_in=None, n_out=1):
    """Ends in one line where the numbers do not fit, or would not fit the memory.

    rows, n_in, n_out: of a task other than the parity of n bits, with the operands read at each check.
    """
    check_numbers(
        config,
        positive=('n', 'depth', 'width', 'd_model', 'batch_size', 'check_every', 'n_seeds'),
        not_negative=('steps', 'lr', 'init_scale', 'weight_decay', 'seed'))
    needed = memory(config, rows, n_in, n_out)
    there = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else 2 ** 34
    if needed > there:
        keys = (*['n', 'batch_size'] * (rows is None), 'd_model', 'width', 'depth', 'n_seeds')
        fail(', '.join(f'{key}={config[key]}' for key in keys) + f': would take about {needed / 2 ** 30:,.0f} GB of '
             f'memory, this machine has {there / 2 ** 30:,.0f}: take smaller numbers')
    with torch.device('meta'):
        layer = layer_of(config)
    if config['ffn'] == 'nc' and config['bool_frac'] and not layer.splits[1]:
        fail(f'width={config["width"]} with bool_frac={config["bool_frac"]:g} leaves no pair of Boolean units for nc: '
             f'expected a width above 1 / bool_frac = {1 / config["bool_frac"]:g}')


def memory(config, rows=None, n_in=None, n_out=1):
    """Bytes that training takes at its worst moment, roughly; the arguments are those of check."""
    n, d, width, depth = (config[key] for key in ('n', 'd_model', 'width', 'depth'))
    inputs, n_in = rows or 2 ** min(n, 64), n_in or n
    weights = n_in * d + depth * (2 * d + 1) * width + d * n_out
    layer = 3 * width + 5 * d                                    # a step keeps all layers for the backward pass
    step = (rows or min(config['batch_size'], inputs)) * (2 * n_in + depth * layer + 4 * n_out)
    operands = 5 * config['bool_frac'] * width if rows else 0    # read in doubles, one layer at a time
    check = min(inputs, CHECKED) * (2 * n_in + layer + operands + n_out)
    drawn = min(inputs, 2 ** 16) * 5 * n_in                      # whole numbers before they are floats
    return 4 * (config['n_seeds'] * (6 * weights + max(step, check)) + drawn)       # 6: gradients, two moments, copies


def layer_of(config):
    try:
        return FFN(config['ffn'], config['d_model'], config['width'], bool_frac=config['bool_frac'])
    except ValueError as error:
        fail(error)


def one_setting(config, device):
    check(config)
    with torch.device('meta'):
        params = sum(p.numel() for p in Stack(config, config['n']).parameters())
    print(f'{params:,} parameters; {config["n"]} bits; {config["depth"]} x {config["ffn"]}; '
          f'{config["n_seeds"]} seeds side by side')
    if config['n'] > 16:
        print('2^n inputs are too many: solved means right on 65,536 inputs drawn anew at each check')
    with tqdm(total=config['steps'], unit='step', dynamic_ncols=True) as bar:
        solved_at = train(config, [{}], config['n_seeds'], device, bar)[0].tolist()
    for seed, step in enumerate(solved_at, config['seed']):
        print(f'seed {seed}: ' + (f'solved at step {step}' if step >= 0 else f'not solved in {config["steps"]} steps'))
    return dict(n=config['n'], ffn=config['ffn'], depth=config['depth'], width=config['width'], params=params,
                seeds=config['n_seeds'], solved=sum(step >= 0 for step in solved_at),
                steps=[step if step >= 0 else None for step in solved_at])


# ---- studies

def study_of(study, constants, config, valid):
    """(name, grid, cell) of a study that goes on where it was stopped.

    cell(key, work) is what work(), a dict, has returned with the `seconds` it took, now or in an earlier start. All of
    it is kept in out/parity/NAME.json beside the grid: the constants and what of config the study heeds. valid(key,
    kept) is false or raises where what was kept is damaged.
    """
    name = {'sweep': 'parity'}.get(study, f'parity_{study}') + ('' if config['norm'] else '_plain')
    grid = plain(constants | {key: config[key] for key in HEEDED[study] if key != 'kinds'})
    path, cells, anew = Path('out', 'parity', f'{name}.json'), {}, 'move it away to begin anew'
    if path.exists():
        stored = read_json(path, anew)
        try:
            theirs, cells = dict(stored['grid']), dict(stored['cells'])
            whole = theirs != grid or all(kept['seconds'] >= 0 and valid(key, kept) for key, kept in cells.items())
        except Exception:                                       # of many kinds, as damage is
            whole = False
        if not whole:
            fail(f'{path} is none of parity.py --{study}, or is damaged: {anew}')
        if theirs != grid:
            key = next(key for key in {**grid, **theirs} if theirs.get(key) != grid.get(key))
            fail(f'{path} was made with {key}={theirs.get(key)}, not {grid.get(key)}: {anew}')
    check_results()

    def cell(key, work):
        if key not in cells:
            started = time.perf_counter()
            cells[key] = work() | dict(seconds=round(time.perf_counter() - started, 1))
            write_json(path, dict(grid=grid, cells=cells))
        return cells[key]

    return name, grid, cell


def is_array(value, dtype, *shape):
    array = torch.tensor(value)
    return array.dtype == dtype and array.shape == shape


def grid_points():
    return [dict(lr=lr, init_scale=scale, bits=bits) for lr, scale, bits in
            itertools.product(SWEEP['lrs'], SWEEP['init_scales'], SWEEP['codings'])]


def study_of_grid(study, constants, config, device, shapes, largest):
    """(name, grid, trial) of a study whose cells are trainings of all points and seeds of the grid.

    trial(shape, n, wanted) -> (solved_at, as train has it, seconds), for the shapes (kind, depth, width), n <= largest.
    """
    points, config = grid_points(), config | SWEEP_SETTINGS

    def settings(shape, n):
        return config | dict(zip(('ffn', 'depth', 'width'), shape), n=n)

    def trial(shape, n, wanted):
        kept = cell(f'{name_of(shape)}, n={n}',
                    lambda: dict(solved_at=train(settings(shape, n), points, wanted, device).tolist()))
        return torch.tensor(kept['solved_at']), kept['seconds']

    for shape in shapes:
        check(settings(shape, largest) | dict(n_seeds=config['n_seeds'] * len(points)))
    name, grid, cell = study_of(study, constants | SWEEP_SETTINGS, config, lambda key, kept: is_array(
        kept['solved_at'], torch.int64, len(points), config['n_seeds']))
    return name, grid, trial


def name_of(shape):
    return '{}, depth {}, width {}'.format(*shape)


# ---- the frontier

def sweep(config, device):
    """Claims A2, A3 of paper A: the largest N that at least half of the seeds solve, at the best point of the grid, for
    each kind, depth and width; by bisection."""
    started, kinds = time.perf_counter(), config['kinds'].split(',')
    for kind in kinds:
        if kind not in FFN_KINDS:
            fail(f'kinds={config["kinds"]}: {kind!r} is none of {", ".join(FFN_KINDS)}')
    shapes = [(kind, depth, width) for depth, width, kind in itertools.product(SWEEP['depths'], SWEEP['widths'], kinds)]
    name, grid, trial = study_of_grid('sweep', SWEEP, config, device, shapes, SWEEP['largest'])
    half, cells = -(-SWEEP_SETTINGS['n_seeds'] // 2), {}
    with tqdm(shapes, unit='cell', dynamic_ncols=True) as bar:
        for shape in bar:
            kind, depth, width = shape
            params = sum(p.numel() for p in FFN(kind, SWEEP_SETTINGS['d_model'], width).parameters())
            cell = dict(kind=kind, depth=depth, width=width, params=depth * params, trials={})
            low, high = 0, SWEEP['largest'] + 1                 # solved, not solved
            while high - low > 1:
                n = (low + high) // 2
                bar.set_postfix_str(f'{name_of(shape)}: n={n}')
                solved_at, seconds = trial(shape, n, half)
                count = (solved_at >= 0).sum(dim=1)
                best = int(count.argmax())
                enough = bool(count[best] >= half)
                cell['trials'][n] = dict(solved=int(count[best]), **grid_points()[best], seconds=seconds,
                                         step=int(solved_at[best].max()) if enough else None)
                low, high = (n, high) if enough else (low, n)
            cells[name_of(shape)] = cell | dict(largest=low)
    seconds = sum(trial['seconds'] for cell in cells.values() for trial in cell['trials'].values())
    write_json(Path('results', f'{name}.json'), dict(grid=grid, torch=torch.__version__, seconds=seconds, cells=cells))
    write_text(Path('results', f'{name}.md'), table(*frontier_table(cells)))
    draw_frontier(cells, Path('results', f'{name}.png'))
    print(f'{seconds / 60:.0f} minutes of training, {(time.perf_counter() - started) / 60:.0f} of them now')
    return dict(seconds=seconds, largest={name: cell['largest'] for name, cell in cells.items()})


def fixed(config, device):
    """Claim A2 without tuning: at how many points of the grid does half of the seeds solve N bits with one layer? And
    at how many points and widths does one kind solve the larger N where another, which solves the smaller, does not
    (the paper: 8 bits for nc, 6 for GELU)?"""
    kinds, widths, (small, large) = FIXED['kinds'], FIXED['widths'], FIXED['ns']
    points, seeds = grid_points(), SWEEP_SETTINGS['n_seeds']
    grid = {key: SWEEP[key] for key in ('lrs', 'init_scales', 'codings')}
    shapes = [*itertools.product(kinds, [1], widths)]
    name, _, trial = study_of_grid('fixed', FIXED | grid, config, device, shapes, large)
    solved_by, wins = {}, {}
    with tqdm([*itertools.product(shapes, (small, large))], unit='cell', dynamic_ncols=True) as bar:
        for shape, n in bar:
            bar.set_postfix_str(f'{name_of(shape)}: n={n}')
            solved_at, _ = trial(shape, n, seeds + 1)                                               # to the end
            solved_by[shape[0], shape[2], n] = (solved_at >= 0).sum(dim=1)
    half = {key: count >= seeds / 2 for key, count in solved_by.items()}
    for one, other in itertools.permutations(kinds, 2):
        wins[f'{one} over {other}'] = sum(int((half[one, width, large] & ~half[other, width, large]
                                               & half[other, width, small]).sum()) for width in widths)
    columns = [*itertools.product(widths, (small, large))]
    header = ['points solved', *(f'width {width}, N={n}' for width, n in columns)]
    lines = [[kind, *(f'{int(half[kind, width, n].sum())} of {len(points)}' for width, n in columns)]
             for kind in kinds]
    stored = [dict(kind=kind, width=width, n=n, solved=count) for (kind, width, n), count in solved_by.items()]
    write_json(Path('results', f'{name}.json'), dict(points=points, norm=config['norm'], torch=torch.__version__,
                                                     n_seeds=seeds, counts=stored, wins=wins))
    write_text(Path('results', f'{name}.md'), table(header, lines))
    return wins


def frontier_table(cells):
    """Header and lines: a line a kind, a column a depth and width."""
    shapes = sorted({(cell['depth'], cell['width']) for cell in cells.values()})
    kinds = list(dict.fromkeys(cell['kind'] for cell in cells.values()))
    largest = {(cell['kind'], cell['depth'], cell['width']): cell['largest'] for cell in cells.values()}
    return (['largest N', *(f'depth {depth}, width {width}' for depth, width in shapes)],
            [[kind, *(largest[kind, *shape] for shape in shapes)] for kind in kinds])


COLORS = dict(gelu='#666666', nc='#0072b2', sigbilinear='#009e73', bilinear='#d55e00', relu='#999999', glu='#cc79a7',
              swiglu='#e69f00')


def draw_frontier(cells, path):
    depths = sorted({cell['depth'] for cell in cells.values()})
    kinds = list(dict.fromkeys(cell['kind'] for cell in cells.values()))
    figure, axes = pyplot().subplots(1, len(depths), figsize=(3.6 * len(depths), 3.6), sharey=True,
                                     layout='constrained', squeeze=False)
    for axis, depth in zip(axes[0], depths):
        for i, kind in enumerate(kinds):
            mine = [cell for cell in cells.values() if (cell['kind'], cell['depth']) == (kind, depth)]
            offset = 0.06 * (i - (len(kinds) - 1) / 2)          # equal values stay visible
            axis.plot([cell['params'] for cell in mine], [cell['largest'] + offset for cell in mine], 'o-',
                      color=COLORS[kind], ms=4, label=kind)
        axis.set(title=f'depth {depth}', xlabel='parameters of the layers', xscale='log',
                 ylim=(0, SWEEP['largest'] + 1))
        mine = [cell['params'] for cell in cells.values() if (cell['kind'], cell['depth']) == (kinds[0], depth)]
        axis.set_xticks(mine, [f'{params:,}' for params in mine])
        axis.minorticks_off()
        axis.axhline(SWEEP['largest'], color='#cccccc', lw=1, zorder=0)
    axes[0][0].set_ylabel('largest N solved by half of the seeds')
    axes[0][0].legend()
    save_figure(figure, path)


# ---- over the steps

def read_operands(ffn, x_BD):
    """(saturation, two-operand share) of an nc layer at its input."""
    return ffn.saturation(x_BD), ffn.two_operand_share(x_BD)


def task_of(settings):
    """(inputs [K,n_in], classes [K], bits coding): parity of all rows of n bits, or the sum of two numbers below
    `modulus`, each given one-hot."""
    if 'n' in settings:
        x = all_inputs(settings['n'])
        return x, parity(x).long(), 'pm'
    p = settings['modulus']
    a, b = torch.cartesian_prod(torch.arange(p), torch.arange(p)).unbind(dim=1)
    return torch.cat([F.one_hot(a, p), F.one_hot(b, p)], dim=1).float(), (a + b) % p, '01'


MEASURES = dict(        # of DYNAMICS -> label and color of the figure
    train=('accuracy, train', '#bbbbbb'),
    held_out=('accuracy, held out', '#333333'),
    saturation=('memberships near 0 or 1', '#d55e00'),
    two_operand=('units that use two operands', '#0072b2'),
)


def dynamics_of(settings, config, device):
    """The curve of one task: a list of dict(step=, and each of MEASURES: a list over the seeds)."""
    x, y, bits = task_of(settings)
    config = config | settings | dict(ffn='nc', bits=bits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(config['seed']))
    n_held = round(settings['held_out'] * len(x))
    held, shown = order[:n_held], order[n_held:]
    x, y = x.to(device), y.to(device)
    forward, weights_MP, update = start(config, [{}], x.size(1), int(y.max()) + 1, device)
    curve = []
    with tqdm(total=config['steps'], unit='step', dynamic_ncols=True) as bar:
        for step in range(config['steps'] + 1):
            if step % config['check_every'] == 0 or step == config['steps']:
                with torch.no_grad():
                    logits_MKC, layers = forward(weights_MP, x, read=read_operands)
                right_MK = (logits_MKC.argmax(dim=-1) == y).float()
                saturation, two_operand = (torch.stack(layer).mean(dim=0).tolist() for layer in zip(*layers))
                curve.append(dict(step=step, train=right_MK[:, shown].mean(dim=1).tolist(),
                                  held_out=right_MK[:, held].mean(dim=1).tolist(), saturation=saturation,
                                  two_operand=two_operand))
                bar.set_postfix_str(f'held out {right_MK[:, held].mean():.2f}')
            if step < config['steps']:
                logits_MKC = forward(weights_MP, x[shown])
                loss = F.cross_entropy(logits_MKC.flatten(0, 1), y[shown].repeat(len(logits_MKC)), reduction='sum')
                (loss / len(shown)).backward()
                update()
                bar.update()
    return curve


def dynamics(config, device):
    """Claim A8 of paper A: accuracy, saturation and two-operand share of nc over the steps of each task."""
    if not config['bool_frac']:
        fail('bool_frac=0 leaves no Boolean units to look at: expected a share above 0')
    for settings in DYNAMICS.values():
        x, y, _ = task_of(settings)
        check(config | settings | dict(ffn='nc'), len(x), x.size(1), int(y.max()) + 1)

    def valid(task, kept):
        steps, curve = DYNAMICS[task]['steps'], kept['curve']
        return [point['step'] for point in curve] == [*range(0, steps, config['check_every']), steps] and is_array(
            [[point[key] for key in MEASURES] for point in curve], torch.float32, len(curve), len(MEASURES),
            config['n_seeds'])

    name, grid, cell = study_of('dynamics', dict(tasks=DYNAMICS), config, valid)
    curves = {task: cell(task, lambda: dict(curve=dynamics_of(settings, config, device)))['curve']
              for task, settings in DYNAMICS.items()}
    write_json(Path('results', f'{name}.json'), dict(grid=grid, torch=torch.__version__, curves=curves))
    draw_dynamics(curves, Path('results', f'{name}.png'))

    def mean(point):
        return dict(step=point['step'], **{key: sum(point[key]) / config['n_seeds'] for key in MEASURES})

    means = {task: [mean(point) for point in curve] for task, curve in curves.items()}
    return {task: dict(start=points[0], most_saturated=max(points, key=lambda point: point['saturation']),
                       end=points[-1]) for task, points in means.items()}


def draw_dynamics(curves, path):
    figure, axes = pyplot().subplots(1, len(curves), figsize=(5 * len(curves), 3.8), sharey=True, layout='constrained')
    for axis, (name, curve) in zip(axes, curves.items()):
        steps = [point['step'] for point in curve]
        for key, (label, color) in MEASURES.items():
            values = torch.tensor([point[key] for point in curve])
            axis.plot(steps, values, color=color, alpha=0.15, lw=0.7)
            axis.plot(steps, values.mean(dim=1), color=color, lw=2, label=label)
        axis.set(title=name, xlabel='step', ylim=(-0.02, 1.04))
    axes[0].set_ylabel('share; seeds and their mean')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=len(MEASURES))
    save_figure(figure, path)


def study_asked_for(config):
    """sweep, fixed, dynamics or '' for one setting; ends in one line where a key was given that it does not heed."""
    study = next((study for study in HEEDED if config[study]), '')
    heeded = HEEDED[study] if study else [key for key in DEFAULTS if key not in ('kinds', *HEEDED)]
    for key, default in DEFAULTS.items():
        if config[key] != default and key not in (study, 'device', *heeded):
            fail(f'--{key}={shown(config[key])} does not go with ' + (f'--{study}: expected, beside device, no more '
                 f'than {", ".join(heeded)}' if study else 'one setting: it is a matter of --sweep'))
    return study


def main():
    config = configure(__file__, DEFAULTS, choices=CHOICES)
    study = study_asked_for(config)
    device = launch(config['device']).device
    run = dict(sweep=sweep, fixed=fixed, dynamics=dynamics).get(study, one_setting)
    with interruptible('the same command goes on from there' if study else 'nothing is kept'):
        outcome = run(config, device)
    result(**outcome)


if __name__ == '__main__':
    main()
