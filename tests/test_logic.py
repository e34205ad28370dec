"""logic.py: Boolean logic at the corners of the unit cube, smooth, bounded and monotone inside it; paper B's routed
layer against a literal version written with loops."""
import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck

import logic
from logic import (LogicLayer, RMSNorm, and_not, causal_window, fuzzy_and, fuzzy_not, fuzzy_or, normalized_entropy,
                   quantify, route, straight_through)

WIDTHS = (1, 2, 3, 5)


def corners(width):
    """All 2^width rows of zeros and ones, and the same as Python booleans."""
    rows = list(itertools.product((False, True), repeat=width))
    return torch.tensor(rows, dtype=torch.float64), rows


def inside(*shape, seed=0):
    """Points of (0,1), away from the ends by 0.05."""
    return 0.05 + 0.9 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('width', WIDTHS)
def test_truth_tables_of_and_and_or(width):
    x, rows = corners(width)
    assert fuzzy_and(x).tolist() == [all(row) for row in rows]
    assert fuzzy_or(x).tolist() == [any(row) for row in rows]


def test_truth_tables_of_not_and_and_not():
    assert fuzzy_not(torch.tensor([0., 1.])).tolist() == [1, 0]
    x, rows = corners(2)
    assert and_not(x[:, 0], x[:, 1]).tolist() == [a and not b for a, b in rows]


def test_inside_they_are_the_product_and_its_dual():
    a, b, c = inside(3, 200)
    x = torch.stack([a, b, c], dim=-1)
    torch.testing.assert_close(fuzzy_and(x), a * b * c)
    torch.testing.assert_close(fuzzy_or(x[..., :2]), a + b - a * b)
    torch.testing.assert_close(fuzzy_or(x), a + b + c - a * b - a * c - b * c + a * b * c)
    torch.testing.assert_close(and_not(a, b), a - a * b)
    torch.testing.assert_close(fuzzy_not(a) + a, torch.ones_like(a))


@pytest.mark.parametrize('dim', (0, 1, -1))
def test_dim_is_reduced_and_removed(dim):
    x = inside(2, 3, 4)
    for op in (fuzzy_and, fuzzy_or):
        assert op(x, dim).shape == x.select(dim, 0).shape
        torch.testing.assert_close(op(x, dim), op(x.movedim(dim, -1)))


@pytest.mark.parametrize('width', WIDTHS)
def test_de_morgan(width):
    x = inside(200, width)
    torch.testing.assert_close(fuzzy_not(fuzzy_and(x)), fuzzy_or(fuzzy_not(x)))
    torch.testing.assert_close(fuzzy_not(fuzzy_or(x)), fuzzy_and(fuzzy_not(x)))
    torch.testing.assert_close(fuzzy_not(fuzzy_not(x)), x)


@pytest.mark.parametrize('width', WIDTHS)
def test_bounds(width):
    x = inside(500, width)
    smallest, largest = x.amin(-1), x.amax(-1)
    assert (0 < fuzzy_and(x)).all() and (fuzzy_and(x) <= smallest).all()
    rounding = 1e-15                                           # 1 - (1 - a) is a up to rounding
    assert (fuzzy_or(x) < 1).all() and (largest - rounding <= fuzzy_or(x)).all()
    a, b = inside(2, 500)
    assert (0 < and_not(a, b)).all() and (and_not(a, b) <= torch.minimum(a, 1 - b)).all()


def test_monotone_in_each_argument():
    """Raising one operand raises and, or and the first of and_not; it lowers not and the second of and_not."""
    x = inside(500, 3)
    for i in range(3):
        more = x.clone()
        more[:, i] += 0.01
        assert (fuzzy_and(more) > fuzzy_and(x)).all() and (fuzzy_or(more) > fuzzy_or(x)).all()
    a, b, _ = x.unbind(-1)
    assert (fuzzy_not(a + 0.01) < fuzzy_not(a)).all()
    assert (and_not(a + 0.01, b) > and_not(a, b)).all() and (and_not(a, b + 0.01) < and_not(a, b)).all()


@pytest.mark.parametrize('where', ('inside', 'corners'))
def test_gradients_are_finite_differences(where):
    """At the corners too, where a product of three can have two zero factors."""
    x = (inside(6, 3) if where == 'inside' else corners(3)[0]).requires_grad_()
    for op in (fuzzy_and, fuzzy_or, fuzzy_not):
        assert gradcheck(op, (x,))
    assert gradcheck(lambda x: and_not(x[:, 0], x[:, 1]), (x,))


# ---- the routed layer of paper B

# which of six tokens are real, in two rows of a batch
PADDING = dict(
    none=[[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    left=[[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    right=[[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]],
)
every_padding = pytest.mark.parametrize('padding', PADDING)


def mask_of(padding):
    return torch.tensor(PADDING[padding], dtype=torch.bool)


def lively(module, seed=0, std=1.0):
    """The same module with random weights, biases and norms, so that a part left out shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=std, generator=generator)
    return module


def states(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def literal_rms_norm(x, weight, eps=1e-5):
    rms = math.sqrt(sum(value ** 2 for value in x) / len(x) + eps)
    return [w * value / rms for w, value in zip(weight, x)]


def literal_linear(linear, x):
    return [sum(w * value for w, value in zip(row, x)) + b
            for row, b in zip(linear.weight.tolist(), linear.bias.tolist())]


def literal_layer(layer, attended, state, mask):
    """Equations 6 to 17, one token, gate and operand at a time: (states by (b, s), stats) over real tokens."""
    B, S, _ = attended.shape
    G = layer.router.out_features // 3
    attended, state, real = attended.tolist(), state.tolist(), mask.tolist()
    pi, u, out = {}, {}, {}
    for b, s in itertools.product(range(B), range(S)):
        x = literal_rms_norm(attended[b][s], layer.norm_in.weight.tolist())
        logits = literal_linear(layer.router, x)                                                    # eq 6
        total = sum(math.exp(logit / layer.tau) for logit in logits)
        pi[b, s] = [math.exp(logit / layer.tau) / total for logit in logits]                        # eq 7
        gates = [1 / (1 + math.exp(-logit)) for logit in literal_linear(layer.gate, x)]             # eq 8
        scale = [min(3 * G * p, 1) for p in pi[b, s]] if layer.route_scale else pi[b, s]
        u[b, s] = [p * gate for p, gate in zip(scale, gates)]                                       # eq 9
        if layer.gate_mode == 'ste':
            u[b, s] = [float(value >= 0.5) for value in u[b, s]]                                    # eq 10

    def before(b, s, j):
        """What gate j reads of the real tokens before s, None where there are none: quantifiers, by their sums."""
        rate = 1 / (1 + math.exp(-layer.quantifier.decay[j].item()))
        earlier = [(rate ** (s - 1 - r), u[b, r][j]) for r in range(s) if real[b][r]]
        if not earlier:
            return None
        if j % G < (G + 1) // 2:
            return max(weight * value for weight, value in earlier)
        return sum(weight * value for weight, value in earlier) / sum(weight for weight, _ in earlier)

    for b, s in itertools.product(range(B), range(S)):
        if not real[b][s]:
            continue
        a, o, n = [], [], []
        for g in range(G):

            def window(family):                         # eqs 11, 12, oldest first; None for what is not there
                if layer.axis == 'quant':
                    yield before(b, s, family * G + g)
                    yield u[b, s][family * G + g]
                    return
                for back in reversed(range(layer.window)):
                    at, gate = (s - back, g) if layer.axis == 'inter' else (s, g - back)
                    yield u[b, at][family * G + gate] if at >= 0 and gate >= 0 and real[b][at] else None

            product = dual = 1
            for value in window(0):
                product *= 1 if value is None else value
            for value in window(1):
                dual *= 1 if value is None else 1 - value
            a.append(product)                                                                       # eqs 13, 14
            o.append(1 - dual)
            n += [0 if value is None else 1 - value for value in window(2)]
        assert len(a + o + n) == G * (layer.window + 2)                                             # eq 15
        delta = literal_linear(layer.update, a + o + n)                                             # eq 16
        base = attended[b][s] if layer.residual == 'attended' else state[b][s]
        summed = [value + change for value, change in zip(base, delta)]
        out[b, s] = literal_rms_norm(summed, layer.norm_out.weight.tolist())                        # eq 17
    entropies = [-sum(p * math.log(p) for p in pi[at]) / math.log(3 * G) for at in out]
    return out, dict(entropy=sum(entropies) / len(out),
                     routing=[sum(pi[at][j] for at in out) / len(out) for j in range(3 * G)],
                     fired=sum(value >= 0.5 for at in out for value in u[at]) / len(out) / (3 * G))


@every_padding
@pytest.mark.parametrize('axis, window', [*itertools.product(('inter', 'intra'), (1, 2, 3)), ('quant', 2)])
@pytest.mark.parametrize('gate_mode', ('soft', 'ste'))
def test_equations_6_to_17(axis, gate_mode, window, padding):
    """With an odd number of gates, whose middle one is existential."""
    mask, attended, state = mask_of(padding), states(2, 6, 5), states(2, 6, 5, seed=1)
    for residual, route_scale in itertools.product(('state', 'attended'), (False, True)):
        layer = lively(LogicLayer(5, 5, window, axis, 0.7, gate_mode, residual, route_scale))
        new, stats = layer(attended, state, mask)
        expected, expected_stats = literal_layer(layer, attended, state, mask)
        for (b, s), row in expected.items():
            torch.testing.assert_close(new[b, s], torch.tensor(row), rtol=1e-4, atol=1e-5)
        for key, value in expected_stats.items():
            torch.testing.assert_close(stats[key], torch.tensor(value), rtol=1e-4, atol=1e-5)
        assert 0 < stats['fired'] < 1                    # or 'ste' would have nothing to show


def test_windows_hold_the_element_last_and_never_wrap():
    """Two tokens of three gates: rows of windows of three."""
    v = torch.tensor([[[1., 2, 3], [4, 5, 6]]])
    assert causal_window(v, 3, 'inter', -1).tolist() == [[[[-1, -1, 1], [-1, -1, 2], [-1, -1, 3]],
                                                          [[-1, 1, 4], [-1, 2, 5], [-1, 3, 6]]]]
    assert causal_window(v, 3, 'intra', -1).tolist() == [[[[-1, -1, 1], [-1, 1, 2], [1, 2, 3]],
                                                          [[-1, -1, 4], [-1, 4, 5], [4, 5, 6]]]]


@pytest.mark.parametrize('axis', ('inter', 'intra'))
def test_a_window_longer_than_what_it_runs_along_is_filled(axis):
    assert causal_window(torch.ones(1, 2, 3), 9, axis, 0.0).sum(-1).amax() == (2 if axis == 'inter' else 3)


def test_a_padded_predecessor_counts_as_before_the_start():
    v, mask = inside(1, 4, 2), torch.tensor([[False, False, True, True]])
    padded = causal_window(v, 3, 'inter', 0.25, mask)
    assert torch.equal(padded[:, 2:], causal_window(v[:, 2:], 3, 'inter', 0.25))


# ---- gates that read quantifiers

def with_rate(layer, decay):
    """The layer with one rate, sigmoid(decay), for all gates."""
    with torch.no_grad():
        layer.quantifier.decay.fill_(decay)
    return layer


@every_padding
@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
@pytest.mark.parametrize('gate_mode', ('soft', 'ste'))
def test_at_rate_0_a_quantifier_is_the_token_before(gate_mode, dtype, padding):
    """Then quant is inter with a window of two, to the last digit, on all real tokens."""
    mask, x, state = mask_of(padding), states(2, 6, 5).to(dtype), states(2, 6, 5, seed=1).to(dtype)
    quant, inter = (lively(LogicLayer(5, 3, 2, axis, 0.7, gate_mode, route_scale=True).to(dtype))
                    for axis in ('quant', 'inter'))
    quant.load_state_dict(inter.state_dict(), strict=False)
    at_0, expected = (layer(x, state, mask)[0][mask] for layer in (with_rate(quant, -200), inter))
    assert torch.equal(at_0, expected) and at_0.dtype == dtype
    assert not torch.equal(with_rate(quant, 1)(x, state, mask)[0][mask], expected)


def test_at_rate_1_a_quantifier_is_the_running_maximum_or_the_running_mean():
    """Of the real tokens: four gates, the first two of them existential, in each family."""
    u, real = inside(1, 5, 12).float(), torch.tensor([[False, True, True, True, False]])
    said = quantify(u, torch.full((12,), 200.), real)[0].unflatten(-1, (3, 4))
    u = u[0].unflatten(-1, (3, 4))
    for t in (1, 2, 3):
        torch.testing.assert_close(said[t, :, :2], u[1:t + 1, :, :2].amax(0))
        torch.testing.assert_close(said[t, :, 2:], u[1:t + 1, :, 2:].mean(0))


def test_a_gate_starts_sticky_and_its_rate_learns():
    """Every rate has a gradient, by finite differences, and a step of descent on it lowers the loss."""
    layer, mask = LogicLayer(5, 3, axis='quant', route_scale=True).double(), mask_of('left')
    assert layer.quantifier.decay.sigmoid().tolist() == pytest.approx([0.99] * 9)
    assert layer.quantifier.half_life().tolist() == pytest.approx([math.log(0.5) / math.log(0.99)] * 9, rel=1e-5)
    for key, p in lively(layer, seed=2).named_parameters():
        p.requires_grad_(key == 'quantifier.decay')
    x, state, target = (states(2, 6, 5, seed=seed, dtype=torch.float64) for seed in range(3))
    loss_of = lambda: (layer(x, state, mask)[0] - target)[mask].square().mean()
    gradient, = torch.autograd.grad(loss_of(), layer.quantifier.decay)
    for j in range(9):
        with torch.no_grad():
            layer.quantifier.decay[j] += 0.01
            above = loss_of()
            layer.quantifier.decay[j] -= 0.02
            below = loss_of()
            layer.quantifier.decay[j] += 0.01
        assert gradient[j].abs() > 1e-7 and gradient[j].item() == pytest.approx(((above - below) / 0.02).item(),
                                                                               rel=0.05, abs=1e-6)


def test_quantifiers_are_computed_in_fp32():
    """Two hundred tokens of 1/512 after one of 1: in bf16 the sum would stay at 1."""
    u = torch.cat([torch.ones(1, 1, 6), torch.full((1, 200, 6), 1 / 512)], dim=1).bfloat16()
    said = quantify(u, torch.full((6,), 200.).bfloat16(), torch.ones(1, 201, dtype=torch.bool))[0, -1]
    expected = torch.tensor([1, (1 + 200 / 512) / 201] * 3).bfloat16()
    assert said.dtype == torch.bfloat16 and torch.equal(said, expected)


@pytest.mark.parametrize('window', (1, 3))
def test_a_quantifier_pairs_a_token_with_what_was_before(window):
    with pytest.raises(ValueError, match=f'expected window=2, got {window}'):
        LogicLayer(5, 3, window, 'quant')


# ---- routing

@pytest.mark.parametrize('route_scale', (False, True))
@pytest.mark.parametrize('gate_mode', ('soft', 'ste'))
def test_routed_gates_stay_in_the_unit_interval(monkeypatch, gate_mode, route_scale):
    """However peaked the routing is; and with it peaked some of them are near 1."""
    seen = []
    monkeypatch.setattr(logic, 'causal_window', lambda v, *rest: seen.append(v) or causal_window(v, *rest))
    layer = lively(LogicLayer(16, 8, gate_mode=gate_mode, route_scale=route_scale), std=5)
    layer(states(2, 6, 16), states(2, 6, 16), mask_of('left'))
    u = torch.cat(seen)
    assert len(seen) == 3 and (0 <= u).all() and (u <= 1).all() and u.max() > 0.9


def test_route_scale_leaves_the_gates_as_they_are_under_uniform_routing(monkeypatch):
    seen = []
    monkeypatch.setattr(logic, 'causal_window', lambda v, *rest: seen.append(v) or causal_window(v, *rest))
    layer = lively(LogicLayer(16, 8, route_scale=True))
    torch.nn.init.zeros_(layer.router.weight)
    torch.nn.init.zeros_(layer.router.bias)
    x = states(2, 6, 16)
    layer(x, x, mask_of('none'))
    torch.testing.assert_close(torch.cat(seen, dim=-1), layer.gate(layer.norm_in(x)).sigmoid())


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
def test_straight_through_is_binary_forward_and_the_identity_backward(dtype):
    soft = torch.linspace(0, 1, 101).to(dtype).requires_grad_()
    hard = straight_through(soft)
    assert hard.tolist() == [float(value >= 0.5) for value in soft.tolist()] and 0.5 in soft.tolist()
    weight = torch.arange(101.).to(dtype)
    assert torch.equal(torch.autograd.grad((hard * weight).sum(), soft)[0], weight)


def test_near_uniform_routing_never_fires():
    """Fresh weights route nearly uniformly over 24 channels, so pi * s is far from 0.5; scaled, some gates do fire."""
    x, mask, fired = states(4, 50, 256), torch.ones(4, 50, dtype=torch.bool), {}
    for route_scale in (False, True):
        torch.manual_seed(0)
        stats = LogicLayer(gate_mode='ste', route_scale=route_scale)(x, x, mask)[1]
        assert stats['entropy'] > 0.9
        fired[route_scale] = stats['fired'].item()
    assert fired[False] == 0 and 0.1 < fired[True] < 0.6


def test_temperature_sharpens_routing_over_all_channels():
    logits = torch.tensor([0., 1, 3])
    weights = torch.tensor([1, math.e ** 2, math.e ** 6])
    torch.testing.assert_close(route(logits, 0.5), weights / weights.sum())
    assert route(logits, 0.01).tolist() == [0, 0, 1]


def test_entropy_is_1_for_uniform_routing_0_for_certain_routing_and_a_mean_over_real_tokens():
    J = 24
    uniform, certain = torch.full((J,), 1 / J), torch.eye(J)[3]
    pi = torch.stack([uniform, certain, uniform])[None]
    for mask, expected in (([1, 0, 0], 1), ([0, 1, 0], 0), ([1, 1, 0], 1 / 2), ([1, 1, 1], 2 / 3)):
        entropy = normalized_entropy(pi, torch.tensor([mask], dtype=torch.bool)).item()
        assert entropy == pytest.approx(expected, abs=1e-6)


def test_statistics_are_returned_detached_and_nothing_is_kept():
    layer, x = LogicLayer(16, 4), states(2, 6, 16)
    before = set(vars(layer))
    stats = layer(x, x, mask_of('none'))[1]
    assert not any(value.requires_grad for value in stats.values()) and set(vars(layer)) == before


@pytest.mark.parametrize('gates, axis, params', ((8, 'inter', 21_296), (16, 'inter', 41_824), (8, 'quant', 21_320)))
def test_parameters_of_the_routed_layer(gates, axis, params):
    assert sum(p.numel() for p in LogicLayer(n_gates=gates, axis=axis).parameters()) == params


def test_rms_norm_computes_in_fp32_and_returns_the_dtype_it_was_given():
    norm, x = RMSNorm(8).bfloat16(), 300 * states(4, 8)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    expected = torch.tensor([literal_rms_norm(row, [1] * 8) for row in x.bfloat16().tolist()])
    assert torch.equal(norm(x.bfloat16()), expected.bfloat16())
