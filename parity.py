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
one a seed (in the sweep one a seed and grid point), are one computation: their weights are stacked, and
torch.func.vmap runs them side by side.

--sweep writes results/parity.json, .md and .png, and takes up where it was left; --fixed results/parity_fixed.json and
.md; --dynamics results/parity_dynamics.json and .png. With --norm=off the first two are parity_plain and
parity_fixed_plain.
"""

import itertools
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state, vmap
from tqdm import tqdm

from model import FFN, FFN_KINDS
from runtime import (check_numbers, configure, fail, launch, plain, pyplot, result, save_figure, table, write_json,
                     write_text)

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
    # instead of one setting
    sweep=False,            # the frontier over SWEEP
    kinds='gelu,nc,sigbilinear,bilinear',   # that it compares
    fixed=False,            # each point of SWEEP's grid by itself, at depth 1 and the widths and N of FIXED
    dynamics=False,         # nc over the steps of DYNAMICS
)
CHOICES = dict(ffn=FFN_KINDS, bits=('pm', '01'))

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
            x_BD = ffn(h_BD) + (x_BD if self.residual else 0)
        logits = self.readout(self.norms[-1](x_BD))
        return (logits, answers) if read else logits


def all_inputs(n):
    """All 2^n rows of n bits [2^n,n]."""
    return (torch.arange(2 ** n)[:, None] >> torch.arange(n) & 1).float()


def parity(bits):
    """[...,N] -> [...], 1.0 where an odd number of bits is set."""
    return bits.sum(-1) % 2


# ---- many models as one

def start(config, points, n_in, n_out=1, device='cpu'):
    """n_seeds models for each point (settings over config that leave the shapes), stacked in that order.

    Returns (forward, params, lr_M): forward(params, x) -> logits [M,B,n_out] for x [M,B,n_in], or [B,n_in] where all
    see the same; params: name -> [M,...], trainable.
    """
    stacks, lrs = [], []
    for point, seed in itertools.product(points, range(config['n_seeds'])):
        torch.manual_seed(config['seed'] + seed)
        stacks.append(Stack(config | point, n_in, n_out).to(device))
        lrs.append((config | point)['lr'])
    params, buffers = stack_module_state(stacks)

    def forward(params, x, **options):
        one = lambda params, buffers, x: functional_call(stacks[0], (params, buffers), (x,), options)
        return vmap(one, in_dims=(0, 0, 0 if x.dim() == 3 else None))(params, buffers, x)

    return forward, params, torch.tensor(lrs, device=device)


@torch.no_grad()
def adam_step(optimizer, params, lr_M):
    """One step of an optimizer whose own rate is 1, cut to each model's rate."""
    before = {name: p.clone() for name, p in params.items()}
    optimizer.step()
    optimizer.zero_grad()
    for name, p in params.items():
        p.copy_(before[name].lerp(p, lr_M.view(-1, *[1] * (p.dim() - 1))))


@torch.no_grad()
def solved(forward, params, n, generator):
    """[M] bool: right on all 2^n inputs, or above n=16 on 2^16 drawn by generator."""
    device = next(iter(params.values())).device
    right = torch.tensor(True, device=device)
    x = all_inputs(n) if n <= 16 else torch.randint(0, 2, (2 ** 16, n), generator=generator).float()
    for bits in x.to(device).split(4096):
        right = right & ((forward(params, bits)[..., 0] > 0) == (parity(bits) > 0)).all(dim=1)
    return right.cpu()


def train(config, points, wanted, device='cpu', bar=None):
    """Trains n_seeds models for each point at once, until `wanted` seeds of one point have solved it, or for `steps`.

    Returns solved_at [points, n_seeds]: the step at which each was first seen to be right on all inputs, or -1.
    """
    n, seeds, shape = config['n'], config['n_seeds'], (len(points), config['n_seeds'])
    forward, params, lr_M = start(config, points, n, device=device)
    optimizer = torch.optim.AdamW(params.values(), lr=1.0, weight_decay=config['weight_decay'])
    generator = torch.Generator().manual_seed(config['seed'])
    every = all_inputs(n).to(device) if 2 ** n <= config['batch_size'] else None
    solved_at = torch.full(shape, -1)
    for step in range(config['steps'] + 1):
        if step % config['check_every'] == 0 or step == config['steps']:
            right = solved(forward, params, n, generator).view(shape)
            solved_at[right & (solved_at < 0)] = step
            best = int((solved_at >= 0).sum(dim=1).max())
            if bar is not None:
                bar.set_postfix_str(f'{best} of {seeds} seeds have solved it')
        if step == config['steps'] or best >= wanted:
            break
        x = every
        if x is None:                           # each seed draws its own inputs, the same at every point
            x = torch.randint(0, 2, (seeds, config['batch_size'], n), generator=generator).float()
            x = x.repeat(len(points), 1, 1).to(device)
        logits_MB = forward(params, x)[..., 0]
        loss_MB = F.binary_cross_entropy_with_logits(logits_MB, parity(x).expand_as(logits_MB), reduction='none')
        loss_MB.mean(dim=1).sum().backward()    # a sum: no model feels another
        adam_step(optimizer, params, lr_M)
        if bar is not None:
            bar.update()
    return solved_at


# ---- one setting

def check(config):
    """Ends in one line where the numbers do not fit, or would not fit the memory."""
    check_numbers(
        config,
        positive=('n', 'depth', 'width', 'd_model', 'batch_size', 'check_every', 'n_seeds'),
        not_negative=('steps', 'lr', 'init_scale', 'weight_decay', 'seed'))
    n, d, width, depth = (config[key] for key in ('n', 'd_model', 'width', 'depth'))
    rows = min(config['batch_size'], 2 ** min(n, 64))
    weights = n * d + depth * (2 * d + 1) * width
    # floats: weights, gradients and two moments; activations of a step, forward and backward; the inputs of a check
    floats = config['n_seeds'] * (4 * weights + rows * (n + depth * (4 * width + 6 * d))) + 2 ** min(n, 16) * n
    there = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else 2 ** 34
    if 4 * floats > there:
        fail(f'n={n} with d_model={d}, width={width}, depth={depth}, n_seeds={config["n_seeds"]}: would take about '
             f'{4 * floats / 2 ** 30:,.0f} GB of memory, this machine has {there / 2 ** 30:,.0f}: take smaller numbers')
    with torch.device('meta'):
        layer = layer_of(config)
    if config['ffn'] == 'nc' and config['bool_frac'] and layer.units['and'].stop == layer.units['and'].start:
        fail(f'width={width} with bool_frac={config["bool_frac"]:g} leaves no pair of Boolean units for nc: expected a '
             f'width of at least {math.floor(1 / config["bool_frac"]) + 1}')


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


# ---- the frontier

def sweep(config, device):
    """Claims A2, A3 of paper A: the largest N that at least half of the seeds solve, at the best point of the grid, for
    each kind, depth and width; by bisection."""
    started = time.perf_counter()
    name = 'parity' if config['norm'] else 'parity_plain'
    kinds = config['kinds'].split(',')
    for kind in kinds:
        if kind not in FFN_KINDS:
            fail(f'kinds={config["kinds"]}: {kind!r} is none of {", ".join(FFN_KINDS)}')
    keys = ('residual', 'norm', 'bool_frac', 'weight_decay', 'check_every', 'seed')
    grid = plain(SWEEP | SWEEP_SETTINGS | {key: config[key] for key in keys})
    path = Path('out', 'parity', f'{name}.json')
    cells = {}
    if path.exists():
        try:
            there = json.loads(path.read_text())
            cells, theirs = dict(there['cells']), dict(there['grid'])
        except (OSError, ValueError, KeyError, TypeError):
            fail(f'{path} is no sweep of parity.py, or is damaged: move it away to begin anew')
        if theirs != grid:
            key = next(key for key in {**grid, **theirs} if theirs.get(key) != grid.get(key))
            fail(f'{path} is a sweep of another grid ({key}={theirs.get(key)}, not {grid.get(key)}): '
                 'move it away to begin anew')
    points = grid_points()
    settings = config | SWEEP_SETTINGS
    wanted = -(-settings['n_seeds'] // 2)
    todo = [*itertools.product(SWEEP['depths'], SWEEP['widths'], kinds)]
    for depth, width, kind in todo:
        check(settings | dict(n=SWEEP['largest'], ffn=kind, depth=depth, width=width,
                              n_seeds=settings['n_seeds'] * len(points)))
    with tqdm(todo, unit='cell', dynamic_ncols=True) as bar:
        for depth, width, kind in bar:
            cell_name = f'{kind}, depth {depth}, width {width}'
            cell = cells.setdefault(cell_name, dict(kind=kind, depth=depth, width=width, trials={}))
            shape = settings | dict(ffn=kind, depth=depth, width=width)
            cell['params'] = depth * sum(p.numel() for p in layer_of(shape).parameters())
            low, high = 0, SWEEP['largest'] + 1                 # solved, not solved
            while high - low > 1:
                n = (low + high) // 2
                bar.set_postfix_str(f'{cell_name}: n={n}')
                if str(n) not in cell['trials']:
                    begun = time.perf_counter()
                    solved_at = train(shape | dict(n=n), points, wanted, device)
                    count = (solved_at >= 0).sum(dim=1)
                    best = int(count.argmax())
                    cell['trials'][str(n)] = dict(
                        solved=int(count[best]), **points[best], seconds=round(time.perf_counter() - begun, 1),
                        step=int(solved_at[best].max()) if count[best] >= wanted else None)
                    write_json(path, dict(grid=grid, cells=cells))
                low, high = (n, high) if cell['trials'][str(n)]['solved'] >= wanted else (low, n)
            cell['largest'] = low
    cells = {name: cell for name, cell in cells.items() if cell['kind'] in kinds}
    seconds = sum(trial['seconds'] for cell in cells.values() for trial in cell['trials'].values())
    write_json(Path('results', f'{name}.json'), dict(grid=grid, torch=torch.__version__, seconds=seconds, cells=cells))
    write_text(Path('results', f'{name}.md'), table(*frontier_table(cells)))
    draw_frontier(cells, Path('results', f'{name}.png'))
    print(f'{seconds / 60:.0f} minutes of training, {(time.perf_counter() - started) / 60:.0f} of them now')
    return dict(seconds=seconds, largest={name: cell['largest'] for name, cell in cells.items()})


def grid_points():
    return [dict(lr=lr, init_scale=scale, bits=bits) for lr, scale, bits in
            itertools.product(SWEEP['lrs'], SWEEP['init_scales'], SWEEP['codings'])]


def fixed(config, device):
    """Claim A2 without tuning: at how many points of the grid does half of the seeds solve N bits with one layer? And
    at how many points and widths does one kind solve the larger N where another, which solves the smaller, does not
    (the paper: 8 bits for nc, 6 for GELU)?"""
    name = 'parity_fixed' if config['norm'] else 'parity_fixed_plain'
    points, settings = grid_points(), config | SWEEP_SETTINGS
    shapes = {(kind, width, n): settings | dict(ffn=kind, width=width, n=n, depth=1) for kind, width, n in
              itertools.product(FIXED['kinds'], FIXED['widths'], FIXED['ns'])}
    for shape in shapes.values():
        check(shape | dict(n_seeds=settings['n_seeds'] * len(points)))
    counts, wins = {}, {}
    with tqdm(shapes, unit='cell', dynamic_ncols=True) as bar:
        for kind, width, n in bar:
            bar.set_postfix_str(f'{kind}, width {width}: n={n}')
            solved_at = train(shapes[kind, width, n], points, settings['n_seeds'] + 1, device)      # to the end
            counts[kind, width, n] = (solved_at >= 0).sum(dim=1)
    half, (small, large) = settings['n_seeds'] / 2, FIXED['ns']
    for one, other in itertools.permutations(FIXED['kinds'], 2):
        wins[f'{one} over {other}'] = sum(int((
            (counts[one, width, large] >= half) & (counts[other, width, large] < half)
            & (counts[other, width, small] >= half)).sum()) for width in FIXED['widths'])
    header = ['points solved', *(f'width {width}, N={n}' for width in FIXED['widths'] for n in FIXED['ns'])]
    lines = [[kind, *(f'{int((counts[kind, width, n] >= half).sum())} of {len(points)}'
                      for width in FIXED['widths'] for n in FIXED['ns'])] for kind in FIXED['kinds']]
    stored = [dict(kind=kind, width=width, n=n, solved=count) for (kind, width, n), count in counts.items()]
    write_json(Path('results', f'{name}.json'), dict(points=points, norm=config['norm'], torch=torch.__version__,
                                                     n_seeds=settings['n_seeds'], counts=stored, wins=wins))
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


def dynamics_of(settings, config, device, bar):
    """The curve of one task: a list of dict(step, train, held_out (accuracies), saturation, two_operand), each a list
    over the seeds."""
    x, y, bits = task_of(settings)
    config = config | settings | dict(ffn='nc', bits=bits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(config['seed']))
    held, shown = order.split([round(settings['held_out'] * len(x)), len(x) - round(settings['held_out'] * len(x))])
    x, y = x.to(device), y.to(device)
    forward, params, lr_M = start(config, [{}], x.size(1), int(y.max()) + 1, device)
    optimizer = torch.optim.AdamW(params.values(), lr=1.0, weight_decay=config['weight_decay'])
    curve = []
    for step in range(config['steps'] + 1):
        if step % config['check_every'] == 0 or step == config['steps']:
            with torch.no_grad():
                logits_MKC, layers = forward(params, x, read=read_operands)
            right = (logits_MKC.argmax(dim=-1) == y).float()
            saturation, two = (torch.stack(z).mean(dim=0).tolist() for z in zip(*layers))
            curve.append(dict(step=step, train=right[:, shown].mean(dim=1).tolist(),
                              held_out=right[:, held].mean(dim=1).tolist(), saturation=saturation, two_operand=two))
            bar.set_postfix_str(f'held out {right[:, held].mean():.2f}')
        if step < config['steps']:
            logits_MKC = forward(params, x[shown])
            loss = F.cross_entropy(logits_MKC.flatten(0, 1), y[shown].repeat(len(logits_MKC)), reduction='sum')
            (loss / len(shown)).backward()
            adam_step(optimizer, params, lr_M)
            bar.update()
    return curve


def dynamics(config, device):
    """Claim A8 of paper A: accuracy, saturation and two-operand share of nc over the steps of each task."""
    if not config['bool_frac']:
        fail('bool_frac=0 leaves no Boolean units to look at: expected a share above 0')
    for settings in DYNAMICS.values():
        check(config | settings | dict(ffn='nc', n=settings.get('n', 1)))
    with tqdm(total=sum(settings['steps'] for settings in DYNAMICS.values()), unit='step', dynamic_ncols=True) as bar:
        curves = {name: dynamics_of(settings, config, device, bar) for name, settings in DYNAMICS.items()}
    kept = {key: config[key] for key in ('d_model', 'bool_frac', 'residual', 'norm', 'init_scale', 'n_seeds', 'seed')}
    write_json(Path('results', 'parity_dynamics.json'),
               dict(config=kept, tasks=DYNAMICS, torch=torch.__version__, curves=curves))
    draw_dynamics(curves, Path('results', 'parity_dynamics.png'))
    mean = lambda values: sum(values) / len(values)
    lines = {'accuracy, train': 'train', 'accuracy, held out': 'held_out', 'saturation': 'saturation',
             'two-operand share': 'two_operand'}
    return {name: {line: [mean(point[key]) for point in (curve[0], max(curve, key=lambda p: mean(p['saturation'])),
                                                         curve[-1])] for line, key in lines.items()}
            for name, curve in curves.items()}


def draw_dynamics(curves, path):
    figure, axes = pyplot().subplots(1, len(curves), figsize=(5 * len(curves), 3.8), sharey=True, layout='constrained')
    lines = (('train', 'accuracy, train', '#bbbbbb'), ('held_out', 'accuracy, held out', '#333333'),
             ('saturation', 'memberships near 0 or 1', '#d55e00'),
             ('two_operand', 'units that use two operands', '#0072b2'))
    for axis, (name, curve) in zip(axes, curves.items()):
        steps = [point['step'] for point in curve]
        for key, label, color in lines:
            values = torch.tensor([point[key] for point in curve])
            axis.plot(steps, values, color=color, alpha=0.15, lw=0.7)
            axis.plot(steps, values.mean(dim=1), color=color, lw=2, label=label)
        axis.set(title=name, xlabel='step', ylim=(-0.02, 1.04))
    axes[0].set_ylabel('share; seeds and their mean')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=len(lines))
    save_figure(figure, path)


def main():
    config = configure(__file__, DEFAULTS, choices=CHOICES)
    device = launch(config['device']).device
    try:
        modes = dict(sweep=sweep, fixed=fixed, dynamics=dynamics)
        outcome = next((mode for key, mode in modes.items() if config[key]), one_setting)(config, device)
    except KeyboardInterrupt:
        fail('interrupted' + '; the same command goes on from there' * config['sweep'], status=130)
    result(**outcome)


if __name__ == '__main__':
    main()
