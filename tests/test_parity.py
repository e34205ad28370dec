"""parity.py: what a stack can compute and what it cannot, weights set by hand as a lesson, many models as one, the
sweep."""
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import parity
from parity import Stack, all_inputs, solved, train

pytestmark = pytest.mark.usefixtures('here')
PROCESS = {key: value for key, value in os.environ.items() if key not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
PLAIN = parity.DEFAULTS | dict(ffn='bilinear', norm=False, d_model=16, width=16, lr=0.01, init_scale=1.0)


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    """Of many, on tensors this small, each would wait for the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def main(run_main):
    """main('--key=value', ...) -> (status, result, stderr) of the script, in this process."""
    def call(*words):
        status, out, err = run_main(parity, '--device=cpu', *words)
        return status, None if status else json.loads(out.splitlines()[-1]), err
    return call


# ---- the exact bound

def top_coefficients(seeds=4, scale=2.0, **settings):
    """|coefficient| of x1 x2 .. xN in the logit of random stacks, as a share of the largest logit. [seeds]

    Every function of N signs is one polynomial in which no sign has a power above 1; the coefficient of a product of
    signs is the mean of function times product over all inputs (Walsh and Fourier).
    """
    config, shares = PLAIN | settings | dict(init_scale=scale), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        stack = Stack(config, config['n']).double()
        for name, p in stack.named_parameters():
            if name.endswith('bias'):
                torch.nn.init.normal_(p)
        bits = all_inputs(config['n']).double()
        with torch.no_grad():
            logits = stack(bits)[:, 0]
        shares.append((logits * (2 * bits - 1).prod(dim=1)).mean().abs() / logits.abs().max())
    return torch.stack(shares)


@pytest.mark.parametrize('residual', (False, True))
@pytest.mark.parametrize('bits', ('pm', '01'))
@pytest.mark.parametrize('depth', (1, 2, 3))
def test_bilinear_of_depth_L_has_no_part_of_the_parity_of_more_than_2_to_the_L_bits(depth, bits, residual):
    """Without normalisation, no weights whatever solve N > 2^L bits.

    Proof. Write the bits as signs x1 .. xN. The embedding is of degree 1 in them. A bilinear layer multiplies two
    linear functions of what it reads, and sums such products: it doubles the degree at most, and adding its input or
    biases raises nothing. So the logit f has a degree of at most 2^L. Parity is the sign of x1 x2 .. xN (up to the sign
    of the whole), which has degree N. If N > 2^L, the coefficient of that product in f, the mean of f x1 x2 .. xN over
    all inputs, is 0. But if f had the right sign on all inputs, f x1 x2 .. xN would have the same sign on all of
    them, and its mean could not be 0. So f is wrong somewhere.
    """
    limit = 2 ** depth
    settings = dict(depth=depth, bits=bits, residual=residual)
    assert top_coefficients(n=limit + 1, **settings).max() < 1e-14
    assert top_coefficients(n=limit, **settings).min() > 1e-9


def test_the_bound_is_of_bilinear_without_normalisation():
    """A GELU is of no finite degree, and LayerNorm divides by a root."""
    assert top_coefficients(depth=1, n=3, ffn='gelu').min() > 1e-6
    assert top_coefficients(depth=1, n=3, norm=True).min() > 1e-6


@pytest.mark.parametrize('depth, bits, residual', [(1, 'pm', False), (1, '01', True), (2, 'pm', False),
                                                   (2, 'pm', True)])
def test_training_reaches_the_bound_and_never_passes_it(depth, bits, residual):
    settings = PLAIN | dict(depth=depth, bits=bits, residual=residual, steps=200)
    assert (train(settings | dict(n=2 ** depth), [{}], 8) >= 0).sum() >= 6
    assert (train(settings | dict(n=2 ** depth + 1), [{}], 9) == -1).all()


# ---- a lesson: weights set by hand

def hand_set(n, width, depth):
    """A stack of all-Boolean nc layers that starts with its bits, 0 and 1, as they are, and ends with h0 - 1/2: the
    feature h0 is 1 for odd. All other weights are 0."""
    stack = Stack(parity.DEFAULTS | dict(ffn='nc', bool_frac=1.0, d_model=n, width=width, depth=depth, norm=False,
                                         bits='01'), n)
    with torch.no_grad():
        for p in stack.parameters():
            p.zero_()
        stack.embed.weight.copy_(torch.eye(n))
        stack.readout.weight[0, 0] = 1
        stack.readout.bias.fill_(-0.5)
    return stack


@torch.no_grad()
def write_xor(ffn, pair, source, target):
    """One pair of a layer: the exclusive or of the features `source`, at 0 or 1, becomes the feature `target`.

        x1 x2 | A: one at least   B: both   A*B: both   A*(1-B): one, but not both
        0  0  | 0                 0         0           0
        0  1  | 1                 0         0           1
        1  0  | 1                 0         0           1
        1  1  | 1                 1         1           0
    """
    a = ffn.units['and'].start + pair                    # pre-activation of A, and hidden unit A*B
    b = ffn.units['and_not'].start + pair                # pre-activation of B, and hidden unit A*(1-B)
    sharp = 40                                           # sigmoid(+-20) is 1 or 0 to nine digits
    ffn.up.weight[[[a], [b]], list(source)] = sharp      # both operands count: x1 + x2 ..
    ffn.up.bias[a] = -0.5 * sharp                        # .. A fires above a half: at least one
    ffn.up.bias[b] = -1.5 * sharp                        # .. B above one and a half: both
    ffn.down.weight[target, b] = 1                       # the unit A*(1-B) is the answer; A*B is not read


def logits_of(stack, n):
    with torch.no_grad():
        return stack(all_inputs(n))[:, 0]


def test_one_nc_pair_computes_xor():
    stack = hand_set(n=2, width=2, depth=1)
    write_xor(stack.ffns[0], pair=0, source=(0, 1), target=0)
    assert all_inputs(2).tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    torch.testing.assert_close(logits_of(stack, 2), torch.tensor([-0.5, 0.5, 0.5, -0.5]))


def test_two_nc_layers_compute_the_parity_of_four_bits():
    """A tree: the exclusive or of two exclusive ors."""
    stack = hand_set(n=4, width=4, depth=2)
    write_xor(stack.ffns[0], pair=0, source=(0, 1), target=0)           # layer 1 has two pairs: x1 xor x2 is feature 0
    write_xor(stack.ffns[0], pair=1, source=(2, 3), target=1)           # x3 xor x4 is feature 1
    write_xor(stack.ffns[1], pair=0, source=(0, 1), target=0)           # layer 2 needs one
    torch.testing.assert_close(logits_of(stack, 4), parity.parity(all_inputs(4)) - 0.5)
    assert solved(lambda weights, x: stack(x)[None], torch.zeros(1, 0), 4, None).tolist() == [True]
    with torch.no_grad():
        stack.ffns[0].up.bias[1] = -60.0                 # the second pair's A turns into its B, and B*(1-B) is 0
    right = (logits_of(stack, 4) > 0) == (parity.parity(all_inputs(4)) > 0)
    assert right.sum() == 8


def test_one_bilinear_layer_computes_the_product_of_two_signs():
    """And 2^L of them at depth L: the bound of the polynomials is reached by hand as well."""
    config = PLAIN | dict(ffn='bilinear', d_model=2, width=3, depth=1)  # 3 units of GELU have the parameters of 2
    stack = Stack(config, 2)
    with torch.no_grad():
        for p in stack.parameters():
            p.zero_()
        stack.embed.weight.copy_(torch.eye(2))
        stack.ffns[0].up.weight[0, 0] = 1                # a = x1
        stack.ffns[0].up.weight[2, 1] = 1                # b = x2
        stack.ffns[0].down.weight[0, 0] = 1
        stack.readout.weight[0, 0] = -1                  # odd where the signs differ
    assert logits_of(stack, 2).tolist() == [-1, 1, 1, -1]


# ---- inputs and answers

def test_all_inputs_are_all_rows_of_bits():
    for n in (1, 3, 10):
        rows = {tuple(row) for row in all_inputs(n).tolist()}
        assert rows == set(itertools.product((0.0, 1.0), repeat=n)) and all_inputs(n).shape == (2 ** n, n)


def test_parity_is_one_where_an_odd_number_of_bits_is_set():
    bits = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]])
    assert parity.parity(bits).tolist() == [0, 1, 0, 1]
    assert parity.parity(bits[None]).shape == (1, 4)
    x = all_inputs(5)
    flipped = x.clone()
    flipped[:, 3] = 1 - flipped[:, 3]
    assert (parity.parity(x) + parity.parity(flipped) == 1).all()       # each bit turns it


def test_the_coding_of_the_bits():
    """pm turns 0 into -1 and leaves 1; 01 leaves both."""
    for bits, low in (('pm', -1.0), ('01', 0.0)):
        stack = Stack(PLAIN | dict(bits=bits), 3)
        seen = []
        stack.embed.register_forward_hook(lambda module, args, out: seen.append(args[0]))
        stack(torch.tensor([[0.0, 1.0, 1.0]]))
        assert seen[0].tolist() == [[low, 1, 1]]


def test_the_stack_is_norm_and_layer_by_turns():
    for norm, residual in itertools.product((False, True), repeat=2):
        torch.manual_seed(0)
        stack = Stack(PLAIN | dict(ffn='nc', depth=2, norm=norm, residual=residual), 3)
        x = all_inputs(3)
        normed = lambda h: F.layer_norm(h, (16,)) if norm else h
        h = stack.embed(2 * x - 1)
        for ffn in stack.ffns:
            h = ffn(normed(h)) + (h if residual else 0)
        torch.testing.assert_close(stack(x), stack.readout(normed(h)))
        reads = []
        logits, answers = stack(x, read=lambda ffn, h: reads.append((ffn, h)) or len(reads))
        assert answers == [1, 2] and [ffn for ffn, _ in reads] == list(stack.ffns)
        torch.testing.assert_close(reads[0][1], normed(stack.embed(2 * x - 1)))
        torch.testing.assert_close(logits, stack(x))


def test_initial_weights_have_the_scale_that_is_asked_for():
    for ffn in ('gelu', 'nc', 'bilinear'):
        torch.manual_seed(0)
        stack = Stack(PLAIN | dict(ffn=ffn, d_model=64, width=256, depth=1, init_scale=3.0), 256)
        linears = [stack.embed, stack.ffns[0].up, stack.ffns[0].down]
        for linear in linears:
            assert linear.weight.std().item() == pytest.approx(3 / linear.in_features ** 0.5, rel=0.05)
            assert linear.bias.eq(0).all()
        assert stack.readout.weight.std().item() == pytest.approx(3 / 8, rel=0.35) and stack.readout.bias.item() == 0


def oracle(wrong):
    """As start()'s forward: a model for each item of `wrong`, right but on the input of that number (None: on all)."""
    def forward(weights, bits):
        number = (bits.double() @ 2.0 ** torch.arange(bits.size(1), dtype=torch.float64)).long()
        right = torch.where(parity.parity(bits) > 0, 1.0, -1.0)
        answers = [right if at is None else torch.where(number == at, -right, right) for at in wrong]
        return torch.stack(answers)[..., None]
    return forward, torch.zeros(len(wrong), 0)


def test_a_model_that_is_wrong_on_one_input_has_not_solved_it():
    """Wherever it is: 2^13 inputs are two blocks of 4,096."""
    assert solved(*oracle([0, 1, 4095, 4096, 8191, None]), 13, None).tolist() == [False] * 5 + [True]
    assert solved(*oracle([2 ** 16 - 1, 54321, None]), 16, None).tolist() == [False, False, True]
    silent = lambda weights, bits: torch.zeros(1, len(bits), 1)
    assert solved(silent, torch.zeros(1, 0), 1, None).tolist() == [False]


def test_above_16_bits_each_check_draws_65536_inputs_anew():
    seen = []

    def forward(weights, bits):
        seen.append(bits)
        wrong_on_a_thousandth = torch.where((bits[:, :10] == 1).all(dim=1), -1.0, 1.0)
        right = torch.where(parity.parity(bits) > 0, 1.0, -1.0)
        return torch.stack([right, right * wrong_on_a_thousandth])[..., None]

    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        assert solved(forward, torch.zeros(2, 0), 20, generator).tolist() == [True, False]
    first, second = torch.cat(seen).split(2 ** 16)
    assert first.shape == second.shape == (2 ** 16, 20) and (first != second).any(dim=1).float().mean() > 0.99
    assert first.unique().tolist() == [0, 1] and first.mean(dim=0).sub(0.5).abs().max() < 0.02
    assert len(first.unique(dim=0)) > 60_000


# ---- many models as one

def alone(config, point, seed):
    """(step at which it has solved all inputs or -1, weights) of one model, trained by plain modules and AdamW.

    The inputs of seed s are row s of those drawn for all seeds.
    """
    mine, n, seeds = config | point, config['n'], config['n_seeds']
    torch.manual_seed(config['seed'] + seed)
    stack = Stack(mine, n)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=mine['lr'], weight_decay=mine['weight_decay'])
    generator, solved_at = torch.Generator().manual_seed(config['seed']), -1
    bits = all_inputs(n)
    for step in range(config['steps'] + 1):
        if step % config['check_every'] == 0 and solved_at < 0:
            if ((logits_of(stack, n) > 0) == (parity.parity(bits) > 0)).all():
                solved_at = step
        if step == config['steps']:
            return solved_at, torch.nn.utils.parameters_to_vector(stack.parameters())
        x = bits
        if 2 ** n > config['batch_size']:
            x = torch.randint(0, 2, (seeds, config['batch_size'], n), generator=generator).float()[seed]
        loss = F.binary_cross_entropy_with_logits(stack(x)[:, 0], parity.parity(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


POINTS = [dict(lr=0.003, init_scale=1.0, bits='pm'), dict(lr=0.03, init_scale=2.0, bits='01'),
          dict(lr=0.01, init_scale=4.0, bits='pm')]


@pytest.mark.parametrize('settings', [
    dict(ffn='nc', n=2, width=16),
    dict(ffn='nc', n=3, depth=2, residual=True, weight_decay=0.1, batch_size=7),
    dict(ffn='bilinear', n=2, norm=False, weight_decay=0.3, batch_size=3),
    dict(ffn='gelu', n=4, weight_decay=0.1),
])
def test_stacked_or_one_by_one_is_the_same(settings, monkeypatch):
    """Each model, in its solving step and its weights: it has its own rate, scale, coding, inputs and weight decay,
    and feels no other."""
    config = parity.DEFAULTS | dict(depth=1, d_model=8, width=8, steps=40, check_every=2, n_seeds=2) | settings
    kept, start = {}, parity.start
    monkeypatch.setattr(parity, 'start', lambda *args, **options: kept.setdefault('start', start(*args, **options)))
    solved_at = train(config, POINTS, wanted=3)                         # more than there are seeds: all steps
    _, weights_MP, _ = kept['start']
    assert solved_at.shape == (3, 2) and len(weights_MP) == 6
    for m, (point, seed) in enumerate(itertools.product(POINTS, range(2))):
        step, weights_P = alone(config, point, seed)
        assert solved_at[POINTS.index(point), seed] == step
        torch.testing.assert_close(weights_MP[m], weights_P, atol=1e-5, rtol=1e-5)


def test_models_that_solve_it_do_so_at_steps_of_their_own():
    """So that the comparison above compares something."""
    config = parity.DEFAULTS | dict(ffn='nc', n=2, depth=1, d_model=8, width=16, steps=40, check_every=2, n_seeds=2)
    assert len(train(config, POINTS, wanted=3).unique()) > 2


def test_training_ends_once_enough_seeds_of_one_point_have_solved_it(monkeypatch):
    """A model that has solved it and is wrong later has solved it."""
    answers = iter([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]])
    monkeypatch.setattr(parity, 'solved', lambda *args: torch.tensor(next(answers), dtype=torch.bool))
    config = parity.DEFAULTS | dict(n=2, n_seeds=2, width=8, d_model=8, depth=1, steps=60, check_every=20)
    assert train(config, [dict(lr=0.0), dict(lr=0.01)], wanted=2).tolist() == [[20, -1], [0, 40]]


def test_the_last_step_is_checked():
    config = parity.DEFAULTS | dict(n=2, n_seeds=1, width=32, d_model=16, depth=1, lr=0.01, check_every=1000)
    assert train(config | dict(steps=60), [{}], 1).tolist() == [[60]]


# ---- the sweep

FRONTIER = {('gelu', 1, 8): 3, ('gelu', 1, 16): 10, ('nc', 1, 8): 0, ('nc', 1, 16): 7,
            ('gelu', 2, 8): 1, ('gelu', 2, 16): 9, ('nc', 2, 8): 5, ('nc', 2, 16): 2}
BEST = 5                                                                # the point of the grid that is best


@pytest.fixture
def planted(monkeypatch):
    """A small sweep whose trainings know the answer: up to FRONTIER half of the seeds solve it, at one point alone;
    beyond it one fewer. The list of trainings is filled as they come."""
    trained = []

    def fake_train(config, points, wanted, device):
        assert wanted == 4                                              # half of the seeds: then it may end
        trained.append((config['ffn'], config['depth'], config['width'], config['n']))
        solved_at = torch.full((len(points), config['n_seeds']), -1)
        count = 4 if config['n'] <= FRONTIER[trained[-1][:3]] else 3
        solved_at[BEST, :count] = torch.arange(25, 25 + count)
        solved_at[BEST + 1:, 0] = 0
        return solved_at

    monkeypatch.setattr(parity, 'train', fake_train)
    monkeypatch.setitem(parity.SWEEP, 'depths', (1, 2))
    monkeypatch.setitem(parity.SWEEP, 'widths', (8, 16))
    return trained


SWEEP = '--sweep', '--kinds=gelu,nc'


def test_the_sweep_finds_the_frontier_by_bisection(main, planted):
    status, result, _ = main(*SWEEP)
    assert status == 0
    cells = json.loads(Path('results/parity.json').read_text())['cells'].values()
    assert {(cell['kind'], cell['depth'], cell['width']): cell['largest'] for cell in cells} == FRONTIER
    assert result['largest'] == {f'{kind}, depth {depth}, width {width}': largest
                                 for (kind, depth, width), largest in FRONTIER.items()}
    assert len(planted) == len(set(planted)) <= 4 * len(FRONTIER)
    assert Path('results/parity.png').read_bytes().startswith(b'\x89PNG')


def test_the_sweep_says_at_which_point_of_the_grid(main, planted):
    """BEST of lr (3) x scale (3) x coding (2): the sixth is the first rate, the last scale, the second coding."""
    main(*SWEEP)
    cells = json.loads(Path('results/parity.json').read_text())['cells']
    best = dict(lr=0.003, init_scale=4.0, bits='01')
    trials = cells['nc, depth 1, width 16']['trials']
    assert trials['7'].items() >= dict(best, solved=4, step=28).items()
    assert trials['8'].items() >= dict(best, solved=3, step=None).items()
    assert cells['gelu, depth 2, width 16']['params'] == 2 * (16 * 16 * 2 + 16 + 16)


def test_the_table_follows_the_cells(main, planted):
    main(*SWEEP)
    assert Path('results/parity.md').read_text() == (
        '| largest N | depth 1, width 8 | depth 1, width 16 | depth 2, width 8 | depth 2, width 16 |\n'
        '| --- | --- | --- | --- | --- |\n'
        '| gelu | 3 | 10 | 1 | 9 |\n'
        '| nc | 0 | 7 | 5 | 2 |\n')


def test_a_stopped_sweep_goes_on_trial_by_trial(main, planted, monkeypatch):
    """Stopped in each training once, the sweep does every training once, and ends as one that nothing stopped."""
    fake_train, finished = parity.train, []

    def stopped_the_first_time(config, *args):
        key = config['ffn'], config['depth'], config['width'], config['n']
        if key not in stops:
            stops.append(key)
            raise KeyboardInterrupt
        finished.append(key)
        return fake_train(config, *args)

    stops = []
    monkeypatch.setattr(parity, 'train', stopped_the_first_time)
    for count in itertools.count():
        status, result, error = main(*SWEEP)
        if status == 0:
            break
        assert status == 130 and error.splitlines()[-1].endswith('interrupted: the same command goes on from there')
        assert list(Path('results').iterdir()) == []
    assert count == len(stops) == len(finished) == len(set(finished))
    assert result['largest']['nc, depth 2, width 8'] == 5
    main(*SWEEP)
    assert len(finished) == count                                       # a finished sweep trains nothing


def test_kinds_on_request_join_those_that_are_there(main, planted):
    main('--sweep', '--kinds=gelu')
    before = len(planted)
    status, result, _ = main(*SWEEP)
    assert status == 0 and {key[0] for key in planted[before:]} == {'nc'} and len(result['largest']) == len(FRONTIER)
    assert len(main('--sweep', '--kinds=nc')[1]['largest']) == len(FRONTIER) / 2            # those that were asked for


def test_without_norm_the_sweep_is_another(main, planted):
    main(*SWEEP)
    before = Path('out/parity/parity.json').read_bytes()
    assert main(*SWEEP, '--norm=off')[0] == 0
    assert Path('out/parity/parity.json').read_bytes() == before
    names = {path.name for path in Path('results').iterdir()}
    assert names == {f'parity{plain}.{end}' for plain in ('', '_plain') for end in ('json', 'md', 'png')}


def test_a_sweep_of_another_grid_is_refused(main, planted):
    main(*SWEEP)
    before, trainings = Path('out/parity/parity.json').read_bytes(), len(planted)
    status, _, error = main(*SWEEP, '--weight_decay=0.1')
    assert status == 2 and error == ('error: out/parity/parity.json was made with weight_decay=0.0, not 0.1: move it '
                                     'away to begin anew\n')
    assert Path('out/parity/parity.json').read_bytes() == before and len(planted) == trainings


@pytest.mark.parametrize('content', ['{"grid": {', '[]', '{"grid": {}}', '{"grid": [1], "cells": {}}', '7', '\xff'])
def test_a_damaged_sweep_is_refused(main, planted, content):
    path = Path('out/parity/parity.json')
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode('latin1'))
    status, _, error = main(*SWEEP)
    assert status == 2 and len(error.splitlines()) == 1 and error.endswith('move it away to begin anew\n')
    assert path.read_bytes() == content.encode('latin1') and planted == []


def changed(content, path, value):
    """content with the item at path, a list of keys, replaced, or removed for value None."""
    *way, last = path
    place = content
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


TRIAL = 'nc, depth 1, width 8, n=5'


DAMAGED_TRIALS = [
    ([TRIAL], 7), ([TRIAL], 'text'), ([TRIAL], []), ([TRIAL], {}),
    ([TRIAL, 'solved_at'], None), ([TRIAL, 'solved_at'], 3), ([TRIAL, 'solved_at'], {}),
    ([TRIAL, 'solved_at', 2], None), ([TRIAL, 'solved_at', 2], [1, 2]), ([TRIAL, 'solved_at', 2], '12345678'),
    ([TRIAL, 'solved_at', 2, 3], 'x'), ([TRIAL, 'solved_at', 2, 3], 1.5), ([TRIAL, 'solved_at', 2, 3], 10 ** 30),
    ([TRIAL, 'seconds'], None), ([TRIAL, 'seconds'], 'x'), ([TRIAL, 'seconds'], []), ([TRIAL, 'seconds'], -1.0),
]


def test_a_damaged_trial_is_refused(main, planted):
    main(*SWEEP)
    file, trainings = Path('out/parity/parity.json'), len(planted)
    whole = file.read_text()
    assert TRIAL in json.loads(whole)['cells']
    for path, value in DAMAGED_TRIALS:
        file.write_text(json.dumps(changed(json.loads(whole), ['cells', *path], value)))
        before = file.read_bytes()
        status, _, error = main(*SWEEP)
        assert status == 2 and error == (f'error: {file} is none of parity.py --sweep, or is damaged: move it away to '
                                         'begin anew\n'), (path, value)
        assert file.read_bytes() == before and len(planted) == trainings


def test_each_point_of_the_grid_by_itself(main, monkeypatch):
    """What half of the seeds solve is 8 bits of gelu and 6 of nc in one place, the reverse in a second, 8 of both in a
    third, nothing elsewhere."""
    plant, calls = {('gelu', 8, 0): 8, ('nc', 8, 0): 6, ('nc', 12, 1): 8, ('gelu', 12, 1): 6,
                    ('gelu', 16, 2): 8, ('nc', 16, 2): 8}, []

    def fake_train(config, points, wanted, device):
        calls.append((config['depth'], wanted, config['norm'], len(points)))
        solved_at = torch.full((len(points), config['n_seeds']), -1)
        for i in range(len(points)):
            largest = plant.get((config['ffn'], config['width'], i), 0)
            solved_at[i, :4 if config['n'] <= largest else 3] = 0
        return solved_at

    monkeypatch.setattr(parity, 'train', fake_train)
    status, result, _ = main('--fixed')
    assert status == 0 and set(calls) == {(1, 9, True, 18)}             # wanted beyond the seeds: to the end
    assert result == {'gelu over nc': 1, 'gelu over sigbilinear': 0, 'nc over gelu': 1, 'nc over sigbilinear': 0,
                      'sigbilinear over gelu': 0, 'sigbilinear over nc': 0}
    lines = Path('results/parity_fixed.md').read_text().splitlines()
    assert lines[0] == ('| points solved | width 8, N=6 | width 8, N=8 | width 12, N=6 | width 12, N=8 | width 16, N=6 '
                        '| width 16, N=8 |')
    assert [[cell.split()[0] for cell in line.split('|')[2:-1]] for line in lines[2:]] == [
        list('111011'), list('101111'), list('000000')]
    written = json.loads(Path('results/parity_fixed.json').read_text())
    assert written['wins'] == result and len(written['points']) == 18
    first = next(row for row in written['counts'] if (row['kind'], row['width'], row['n']) == ('nc', 8, 6))
    assert first['solved'] == [4] + [3] * 17
    assert main('--fixed', '--norm=off')[0] == 0 and calls[-1][2] is False
    assert {path.stem for path in Path('results').iterdir()} == {'parity_fixed', 'parity_fixed_plain'}


def test_fixed_goes_on_trial_by_trial(main, monkeypatch):
    """Stopped in each training once, it does every training once; another grid is refused."""
    finished, stops = [], []

    def stopped_the_first_time(config, points, wanted, device):
        key = config['ffn'], config['width'], config['n']
        if key not in stops:
            stops.append(key)
            raise KeyboardInterrupt
        finished.append(key)
        return torch.full((len(points), config['n_seeds']), 25 if config['n'] == 6 else -1)

    monkeypatch.setattr(parity, 'train', stopped_the_first_time)
    monkeypatch.setitem(parity.FIXED, 'widths', (8,))
    for _ in range(6):
        status, _, error = main('--fixed')
        assert status == 130 and error.splitlines()[-1] == 'error: interrupted: the same command goes on from there'
        assert list(Path('results').iterdir()) == []
    assert main('--fixed')[0] == 0 and main('--fixed')[0] == 0
    assert stops == finished == [*itertools.product(parity.FIXED['kinds'], (8,), (6, 8))]
    written = json.loads(Path('results/parity_fixed.json').read_text())
    assert [row['solved'] for row in written['counts']] == [[8] * 18, [0] * 18] * 3
    status, _, error = main('--fixed', '--seed=2')
    assert status == 2 and error.startswith('error: out/parity/parity_fixed.json was made with seed=1, not 2')
    kept = Path('out/parity/parity_fixed.json')
    first = ['cells', 'gelu, depth 1, width 8, n=6', 'solved_at', 0, 0]
    kept.write_text(json.dumps(changed(json.loads(kept.read_text()), first, '25')))
    status, _, error = main('--fixed')
    assert status == 2 and len(error.splitlines()) == 1 and 'is damaged' in error


def test_a_real_sweep_in_small(main, monkeypatch):
    """Nothing planted: bilinear without normalisation, two seeds, ends at 2 bits at depth 1."""
    for key, value in dict(depths=(1,), widths=(8, 12), largest=3, lrs=(0.01, 0.03), init_scales=(1.0,)).items():
        monkeypatch.setitem(parity.SWEEP, key, value)
    for key, value in dict(steps=150, n_seeds=2).items():
        monkeypatch.setitem(parity.SWEEP_SETTINGS, key, value)
    status, result, _ = main('--sweep', '--kinds=bilinear,gelu', '--norm=off')
    assert status == 0
    largest = {name: value for name, value in result['largest'].items() if 'bilinear' in name}
    assert largest == {'bilinear, depth 1, width 8': 2, 'bilinear, depth 1, width 12': 2}
    assert result['largest']['gelu, depth 1, width 12'] == 3            # the bound is bilinear's alone


# ---- over the steps

SHORT = {'parity of 4 bits': dict(n=4, held_out=0.25, depth=1, width=16, lr=0.01, weight_decay=0.3, steps=20),
         'addition modulo 5': dict(modulus=5, held_out=0.4, depth=2, width=16, lr=0.01, weight_decay=0.3, steps=10)}


def test_the_dynamics_are_drawn_and_written(main, monkeypatch):
    monkeypatch.setattr(parity, 'DYNAMICS', SHORT)
    status, result, _ = main('--dynamics', '--check_every=8', '--n_seeds=3', '--d_model=16')
    assert status == 0 and set(result) == set(SHORT)
    written = json.loads(Path('results/parity_dynamics.json').read_text())
    for name, curve in written['curves'].items():
        steps = SHORT[name]['steps']
        assert [point['step'] for point in curve] == [*range(0, steps, 8), steps]       # the last step is there
        for point in curve:
            for key in ('train', 'held_out', 'saturation', 'two_operand'):
                assert len(point[key]) == 3 and all(0 <= value <= 1 for value in point[key])
        mean = lambda point, key: pytest.approx(sum(point[key]) / 3, abs=1e-5)
        assert result[name]['start']['held_out'] == mean(curve[0], 'held_out')
        assert result[name]['end']['train'] == mean(curve[-1], 'train')
    assert Path('results/parity_dynamics.png').read_bytes().startswith(b'\x89PNG')


def test_the_dynamics_name_start_end_and_the_most_saturated_between(main, monkeypatch):
    """Means over the seeds; what one seed alone saturates most is not what counts."""
    saturations = [[0.0, 0.1], [0.5, 0.5], [0.9, 0.0], [0.4, 0.3]]
    curve = [dict(step=10 * i, train=[i / 4, 0.0], held_out=[0.0, 0.0], saturation=saturation, two_operand=[1.0, i / 4])
             for i, saturation in enumerate(saturations)]
    monkeypatch.setattr(parity, 'DYNAMICS', SHORT)
    monkeypatch.setattr(parity, 'dynamics_of', lambda *args: curve)
    points = main('--dynamics', '--n_seeds=2')[1]['parity of 4 bits']
    assert {name: (point['step'], point['saturation'], point['train'], point['two_operand'])
            for name, point in points.items()} == {
        'start': (0, 0.05, 0, 0.5), 'most_saturated': (10, 0.5, 0.125, 0.625), 'end': (30, 0.35, 0.375, 0.875)}


def test_the_dynamics_go_on_task_by_task(main, monkeypatch):
    monkeypatch.setattr(parity, 'DYNAMICS', SHORT)
    words, trained, dynamics_of = ('--dynamics', '--n_seeds=2', '--d_model=8'), [], parity.dynamics_of

    def stopped_in_the_second(settings, *args):
        trained.append('n' if 'n' in settings else 'modulus')
        if trained == ['n', 'modulus']:
            raise KeyboardInterrupt
        return dynamics_of(settings, *args)

    monkeypatch.setattr(parity, 'dynamics_of', stopped_in_the_second)
    status, _, error = main(*words)
    assert status == 130 and error.splitlines()[-1] == 'error: interrupted: the same command goes on from there'
    resumed = main(*words)[1]
    assert trained == ['n', 'modulus', 'modulus'] and not Path('out/parity/parity_dynamics_plain.json').exists()
    curves = json.loads(Path('results/parity_dynamics.json').read_text())['curves']
    Path('out/parity/parity_dynamics.json').unlink()
    assert main(*words)[1] == resumed and trained[3:] == ['n', 'modulus']
    assert json.loads(Path('results/parity_dynamics.json').read_text())['curves'] == curves
    assert main(*words, '--norm=off')[0] == 0 and Path('results/parity_dynamics_plain.json').exists()
    status, _, error = main(*words, '--n_seeds=3')
    assert status == 2 and 'parity_dynamics.json was made with n_seeds=2, not 3' in error


DAMAGED_CURVES = [
    (['curve'], None), (['curve'], []), (['curve'], 3), (['curve', 1], None), (['curve', 1], 'x'),
    (['curve', 1, 'step'], 7), (['curve', 1, 'step'], None), (['curve', 1, 'train'], None),
    (['curve', 1, 'train'], [0.5]), (['curve', 1, 'saturation', 0], 'x'), (['curve', 1, 'two_operand'], 0.5),
    (['seconds'], None),
]


def test_a_damaged_curve_is_refused(main, monkeypatch):
    monkeypatch.setattr(parity, 'DYNAMICS', SHORT)
    words = '--dynamics', '--n_seeds=2', '--d_model=8', '--check_every=10'
    main(*words)
    file = Path('out/parity/parity_dynamics.json')
    whole = file.read_text()
    for path, value in DAMAGED_CURVES:
        file.write_text(json.dumps(changed(json.loads(whole), ['cells', 'parity of 4 bits', *path], value)))
        before = file.read_bytes()
        status, _, error = main(*words)
        assert status == 2 and error == (f'error: {file} is none of parity.py --dynamics, or is damaged: move it away '
                                         'to begin anew\n'), (path, value)
        assert file.read_bytes() == before
    file.write_text(whole)
    assert main(*words)[0] == 0


@pytest.mark.parametrize('name', SHORT)
def test_held_out_inputs_are_never_trained_on(name, monkeypatch):
    """What is trained on are the same rows at each step, without repetition; other labels on the other rows turn
    their accuracy and nothing else."""
    settings, config = SHORT[name] | dict(width=8), parity.DEFAULTS | dict(d_model=8, n_seeds=2, check_every=5)
    trained_on, start, (x, y, bits) = [], parity.start, parity.task_of(settings)

    def watched(*args, **options):
        forward, weights_MP, update = start(*args, **options)

        def watched_forward(weights_MP, x, **options):
            if torch.is_grad_enabled():
                trained_on.append(x)
            return forward(weights_MP, x, **options)
        return watched_forward, weights_MP, update

    monkeypatch.setattr(parity, 'start', watched)
    curve = parity.dynamics_of(settings, config, 'cpu')
    assert len(trained_on) == settings['steps'] and all(torch.equal(rows, trained_on[0]) for rows in trained_on)
    shown = (x[:, None] == trained_on[0]).all(dim=-1).any(dim=1)
    assert shown.sum() == len(trained_on[0]) == len(x) - round(settings['held_out'] * len(x))
    other = torch.where(shown, y, (y + 1) % (y.max() + 1))
    monkeypatch.setattr(parity, 'task_of', lambda settings: (x, other, bits))
    for point, theirs in zip(curve, parity.dynamics_of(settings, config, 'cpu'), strict=True):
        right, wrong = point.pop('held_out'), theirs.pop('held_out')
        assert point == theirs
        assert all(a + b <= 1 + 1e-6 for a, b in zip(right, wrong)) and right != wrong


def test_the_dynamics_are_those_of_one_model_alone():
    """Trained by cross-entropy over the classes and plain AdamW; both measures are means over the layers."""
    settings = SHORT['addition modulo 5'] | dict(steps=12)
    config = parity.DEFAULTS | dict(d_model=8, n_seeds=2, check_every=12)
    x, y, bits = parity.task_of(settings)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(config['seed']))
    curve = parity.dynamics_of(settings, config, 'cpu')
    for seed in range(2):
        torch.manual_seed(config['seed'] + seed)
        stack = Stack(config | settings | dict(ffn='nc', bits=bits), 10, 5)
        optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01, weight_decay=0.3)
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(stack(x[order[10:]]), y[order[10:]]).backward()
            optimizer.step()
        with torch.no_grad():
            logits, layers = stack(x, read=parity.read_operands)
        right = (logits.argmax(dim=-1) == y).float()
        expected = dict(train=right[order[10:]].mean(), held_out=right[order[:10]].mean(),
                        saturation=(layers[0][0] + layers[1][0]) / 2, two_operand=(layers[0][1] + layers[1][1]) / 2)
        assert {key: curve[-1][key][seed] for key in expected} == pytest.approx(
            {key: value.item() for key, value in expected.items()}, abs=1e-5)


def test_the_tasks():
    x, y, bits = parity.task_of(dict(n=3))
    assert torch.equal(x, all_inputs(3)) and torch.equal(y, parity.parity(x).long()) and bits == 'pm'
    x, y, bits = parity.task_of(dict(modulus=5))
    a, b = x.split(5, dim=1)
    assert x.shape == (25, 10) and len(x.unique(dim=0)) == 25 and bits == '01'
    assert a.sum(dim=1).eq(1).all() and b.sum(dim=1).eq(1).all()
    assert torch.equal((a.argmax(dim=1) + b.argmax(dim=1)) % 5, y)


# ---- the command

def test_the_command_ends_with_one_json_line():
    script = Path(parity.__file__).resolve()
    done = subprocess.run([sys.executable, str(script), '--n', '4', '--ffn=nc', '--device=cpu'], capture_output=True,
                          text=True, env=PROCESS | {'OMP_NUM_THREADS': '1'}, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome.keys() >= {'n', 'ffn', 'depth', 'params', 'seeds', 'solved', 'steps'}
    assert (outcome['n'], outcome['ffn'], outcome['depth'], outcome['seeds']) == (4, 'nc', 4, 8)
    stack = Stack(parity.DEFAULTS | dict(ffn='nc'), 4)
    assert outcome['params'] == sum(p.numel() for p in stack.parameters())
    assert outcome['solved'] == sum(step is not None for step in outcome['steps']) >= 6 and len(outcome['steps']) == 8
    assert list(Path().iterdir()) == []


def test_what_is_not_solved_is_null(main):
    status, result, _ = main('--n=3', '--norm=off', '--depth=1', '--width=8', '--steps=20', '--n_seeds=2')
    assert status == 0 and result['solved'] == 0 and result['steps'] == [None, None]


@pytest.mark.parametrize('words, message', [
    (['--n=0'], 'n=0: expected at least 1'),
    (['--n=-3'], 'n=-3: expected at least 1'),
    (['--n=1000000000000'], 'GB of memory, this machine has'),
    (['--n=30', '--width=1000000000'], 'n=30, batch_size=1024, d_model=64, width=1000000000'),
    (['--n=4', '--n_seeds=1000000000'], 'GB of memory'),
    (['--n=four'], '--n=four: expected a whole number'),
    (['--ffn=nd'], '--ffn=nd: expected one of gelu, relu, glu'),
    (['--ffn=nc', '--width=4'], 'no pair of Boolean units for nc: expected a width above 1 / bool_frac = 4'),
    (['--ffn=nc', '--width=7', '--bool_frac=1'], 'even number of paired units'),
    (['--ffn=nc', '--bool_frac=1.5'], 'bool_frac and quant_frac are shares from 0 to 1'),
    (['--depth=0'], 'depth=0: expected at least 1'),
    (['--lr=-0.1'], 'lr=-0.1: expected no negative number'),
    (['--weight_decay=-1'], 'weight_decay=-1.0: expected no negative number'),
    (['--steps=-1'], 'steps=-1: expected no negative number'),
    (['--bits=foo'], '--bits=foo: expected one of pm, 01'),
    (['--sweep', '--kinds=gelu,nd'], "kinds=gelu,nd: 'nd' is none of gelu, relu"),
    (['--sweep', '--kinds='], 'is none of gelu, relu'),
    (['--dynamics', '--bool_frac=0'], 'bool_frac=0'),
    (['--dynamics', '--check_every=0'], 'check_every=0: expected at least 1'),
    (['--dynamics', '--n_seeds=100000000'], 'd_model=64, width=32, depth=1, n_seeds=100000000: would take about'),
    (['--ffn=nc', '--bool_frac=5e-324'], 'expected a width above 1 / bool_frac = inf'),
    (['--kinds=nc'], '--kinds=nc does not go with one setting: it is a matter of --sweep'),
    (['--sweep', '--n_seeds=3'], '--n_seeds=3 does not go with --sweep: expected, beside device, no more than kinds, '),
    (['--sweep', '--lr=0.1'], '--lr=0.1 does not go with --sweep'),
    (['--sweep', '--fixed'], '--fixed=on does not go with --sweep'),
    (['--dynamics', '--fixed'], '--dynamics=on does not go with --fixed'),
    (['--fixed', '--kinds=nc'], '--kinds=nc does not go with --fixed'),
    (['--fixed', '--n=4'], '--n=4 does not go with --fixed'),
    (['--dynamics', '--steps=10'], '--steps=10 does not go with --dynamics'),
    (['--dynamics', '--ffn=nc'], '--ffn=nc does not go with --dynamics'),
    (['--sweeps'], 'unknown key --sweeps: the nearest is --sweep'),
])
def test_a_mistake_is_one_line_and_status_2(main, words, message):
    status, _, error = main(*words)
    assert status == 2 and len(error.splitlines()) == 1 and error.startswith('error: ') and message in error
    assert list(Path().iterdir()) == []


def test_the_least_width_that_is_named_for_nc_works():
    for bool_frac, least in ((0.25, 5), (0.5, 3), (1.0, 2), (0.3, 4)):
        config = parity.DEFAULTS | dict(ffn='nc', bool_frac=bool_frac)
        parity.check(config | dict(width=least))
        with pytest.raises(SystemExit):
            parity.check(config | dict(width=least - 1))


def test_what_a_study_heeds_is_in_the_manual():
    manual = parity.__doc__.split('refuses any other:')[1].split('With --norm=off')[0]
    lines = [line.split() for line in manual.replace('seed\n   ', 'seed ').splitlines() if '--' in line]
    assert {line[0][2:]: tuple(word for word in line[1:] if '.' not in word) for line in lines} == parity.HEEDED


def test_a_key_given_at_its_default_is_none_that_a_study_ignores():
    for study in parity.HEEDED:
        assert parity.study_asked_for(parity.DEFAULTS | {study: True}) == study
        for key in parity.HEEDED[study]:
            assert parity.study_asked_for(parity.DEFAULTS | {study: True, key: 'another'}) == study
    assert parity.study_asked_for(parity.DEFAULTS | dict(n=3, lr=0.1, device='cpu')) == ''


def held_at_most(work):
    """Bytes that work() holds at its worst moment, by the reports of torch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize('settings', [
    dict(depth=8, n=10),                                                # a step
    dict(n=12, batch_size=16, depth=1),                                 # a check, of 4,096 inputs at a time
    dict(d_model=512, width=512, n=4),                                  # weights
    dict(ffn='sigbilinear', width=512, d_model=16, n=10),
])
def test_the_memory_foretold_is_about_what_training_takes(settings):
    config = parity.DEFAULTS | dict(steps=1, n_seeds=4) | settings
    taken = held_at_most(lambda: train(config, [{}], 5))
    assert 0.9 * taken < parity.memory(config) < 2.2 * taken


@pytest.mark.parametrize('settings', [dict(), dict(bool_frac=1.0, d_model=16), dict(d_model=256)])
def test_so_is_that_of_the_dynamics(settings):
    task = dict(modulus=17, held_out=0.2, depth=1, width=128, lr=0.01, weight_decay=0.3, steps=1)
    config = parity.DEFAULTS | dict(n_seeds=4) | task | settings
    taken = held_at_most(lambda: parity.dynamics_of(task, config, 'cpu'))
    assert 0.9 * taken < parity.memory(config, rows=17 ** 2, n_in=34, n_out=17) < 2.2 * taken


@pytest.mark.parametrize('study', parity.HEEDED)
def test_results_that_cannot_be_written_are_known_before_any_training(main, monkeypatch, study):
    monkeypatch.setattr(parity, 'train', None)
    monkeypatch.setattr(parity, 'dynamics_of', None)
    Path('results').write_text('a file')
    status, _, error = main(f'--{study}')
    assert status == 1 and len(error.splitlines()) == 1 and 'cannot save results' in error


def test_both_tasks_of_the_dynamics_are_checked_before_any_is_trained(main, monkeypatch):
    checked = []
    monkeypatch.setattr(parity, 'memory', lambda config, *task: checked.append(task) or 2 ** (50 * len(checked) - 50))
    monkeypatch.setattr(parity, 'dynamics_of', None)
    status, _, error = main('--dynamics')
    assert status == 2 and 'd_model=64, width=128, depth=1, n_seeds=8: would take about' in error
    assert checked == [(256, 8, 2), (31 ** 2, 62, 31)]                  # inputs, size of each, classes
