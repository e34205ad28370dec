"""quantifier.py: the parallel scans against the formulas, token by token; what gradients, parts and rates must do."""
import math
import shutil

import pytest
import torch
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from quantifier import Quantifier, decayed_max, decayed_mean, decayed_sum

RATES = (0.0, 1e-4, 0.5, 0.999, 1.0)
LENGTHS = (1, 2, 3, 17, 1024, 4096)
FORMS = {
    'max': decayed_max,
    'sum': decayed_sum,
    'corrected': decayed_mean,
    'printed': lambda m_BTC, rate_C: decayed_mean(m_BTC, rate_C, corrected=False),
}


# ---- the reference: the recurrences as they are written, one token at a time, gradients by autograd

def sequential(form, m_BTC, rate_C):
    states, state, weight = [], torch.zeros_like(m_BTC[:, 0]), torch.zeros_like(rate_C)
    for m_BC in m_BTC.unbind(1):
        if form == 'max':
            state = torch.where(m_BC >= rate_C * state, m_BC, rate_C * state)      # at a tie the newer one takes it all
        elif form == 'printed':
            state = (1 - rate_C) * m_BC + rate_C * state
        else:
            state = m_BC + rate_C * state
        weight = 1 + rate_C * weight
        states.append(state / weight if form == 'corrected' else state)
    return torch.stack(states, dim=1)


def memberships(B, T, C, seed=0):
    """In [0,1], fp64, and exactly representable in fp32; about a tenth of them exactly 0 and a tenth exactly 1."""
    m_BTC = torch.rand(B, T, C, generator=torch.Generator().manual_seed(seed)) * 1.25 - 0.125
    return m_BTC.clamp(0, 1).double()


def value_and_gradients(function, m_BTC, rate_C, g_BTC):
    m_BTC, rate_C = m_BTC.clone().requires_grad_(), rate_C.clone().requires_grad_()
    y_BTC = function(m_BTC, rate_C)
    return y_BTC.detach(), *torch.autograd.grad(y_BTC, (m_BTC, rate_C), g_BTC.to(y_BTC.dtype))


@pytest.mark.parametrize('T', (1, 2, 3, 17))
@pytest.mark.parametrize('form', FORMS)
def test_reference_is_the_closed_form(form, T):
    """E_t = max_k gamma^k m_{t-k}, S_t = sum_k lam^k m_{t-k}; the proportions are (1-lam) * S_t and S_t over its
    weights."""
    m_BTC, rate_C = memberships(2, T, len(RATES)), torch.tensor(RATES, dtype=torch.float64)
    for t in range(T):
        power_TC = rate_C ** torch.arange(t, -1, -1)[:, None]
        terms = power_TC * m_BTC[:, :t + 1]
        expected = {'max': terms.amax(1), 'sum': terms.sum(1), 'printed': (1 - rate_C) * terms.sum(1),
                    'corrected': terms.sum(1) / power_TC.sum(0)}[form]
        torch.testing.assert_close(sequential(form, m_BTC, rate_C)[:, t], expected)


@pytest.mark.parametrize('T', LENGTHS)
@pytest.mark.parametrize('form', FORMS)
def test_parallel_is_sequential_forward_and_backward(form, T):
    """Channel c has rate RATES[c]: each rate by itself, and all of them side by side."""
    m_BTC, rate_C = memberships(3, T, len(RATES), seed=T), torch.tensor(RATES, dtype=torch.float64)
    g_BTC = torch.randn(m_BTC.shape, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
    expected = value_and_gradients(lambda m, rate: sequential(form, m, rate), m_BTC, rate_C, g_BTC)
    actual = value_and_gradients(FORMS[form], m_BTC, rate_C, g_BTC)
    for name, got, want in zip(('value', 'dm', 'drate'), actual, expected):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f'{name}: {text}')
    # in fp32, as trained; the reference has the same rates, rounded to fp32
    expected = value_and_gradients(lambda m, rate: sequential(form, m, rate), m_BTC, rate_C.float().double(), g_BTC)
    actual = value_and_gradients(FORMS[form], m_BTC.float(), rate_C.float(), g_BTC)
    for name, got, want in zip(('value', 'dm', 'drate'), actual, expected):
        assert got.dtype == torch.float32
        tolerance = 1e-4 if name == 'drate' else 1e-5          # a sum over all tokens, whose terms cancel
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * max(1, want.abs().max().item()),
                                   msg=lambda text: f'{name}: {text}')


@pytest.mark.parametrize('form', FORMS)
def test_gradcheck(form):
    """Finite differences, which need no reference of ours; the spacing keeps the maximum away from ties."""
    order = torch.randperm(2 * 7 * 4, generator=torch.Generator().manual_seed(1)).double()
    m_BTC = ((order + 0.5) / len(order)).view(2, 7, 4).requires_grad_()
    rate_C = torch.tensor([0.111, 0.47, 0.93, 0.9971], dtype=torch.float64, requires_grad=True)
    assert gradcheck(FORMS[form], (m_BTC, rate_C))


# ---- ties

@pytest.mark.parametrize('T', (2, 3, 17, 64))
def test_at_a_tie_the_most_recent_maximiser_takes_the_gradient(T):
    def sources(m, gamma):
        """[T,T]: row t is dE_t/dm."""
        E_T = lambda m_T: decayed_max(m_T[None, :, None], torch.tensor([gamma]))[0, :, 0]
        return torch.autograd.functional.jacobian(E_T, m)

    # a constant under gamma = 1: every token ties with all before it
    assert torch.equal(sources(torch.full((T,), 0.7), 1.0), torch.eye(T))
    # powers of two under gamma = 0.5: each token equals what its predecessor has faded to, exactly
    halving = 0.5 ** torch.arange(T)
    assert torch.equal(sources(halving, 0.5), torch.eye(T))
    # zeros under gamma = 0
    assert torch.equal(sources(torch.zeros(T), 0.0), torch.eye(T))
    # one step further, gamma^2 = 1/4: token 2 ties with token 0, and keeps the gradient of those it leads to
    if T >= 3:
        m = torch.zeros(T)
        m[0], m[2] = 1, 0.25
        expected = torch.zeros(T, T)
        expected[:2, 0] = 0.5 ** torch.arange(2)
        expected[2:, 2] = 0.5 ** torch.arange(T - 2)
        assert torch.equal(sources(m, 0.5), expected)


def test_at_a_tie_the_rate_gets_no_gradient():
    """Where the newer membership takes it all, nothing was carried, and the rate did nothing."""
    gamma_C = torch.ones(1, requires_grad=True)
    decayed_max(torch.full((1, 17, 1), 0.7), gamma_C).sum().backward()
    assert gamma_C.grad.item() == 0


# ---- precision

@pytest.mark.parametrize('form', FORMS)
def test_state_is_fp32_under_bf16_autocast(form):
    """bf16 memberships and autocast, yet the fp64 answer to 1e-4; a state in bf16 misses that by more than 20 times."""
    m_BTC = memberships(2, 300, 3).bfloat16()
    rate_C = torch.tensor([0.5, 0.97, 0.999])
    exact = sequential(form, m_BTC.double(), rate_C.double())
    scale = exact.abs().max()
    with torch.autocast('cpu', torch.bfloat16):
        y_BTC = FORMS[form](m_BTC, rate_C)
        dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    assert dtype == torch.bfloat16 and y_BTC.dtype == torch.float32
    assert ((y_BTC.double() - exact) / scale).abs().max() < 1e-4
    in_bf16 = sequential(form, m_BTC, rate_C.bfloat16())
    assert ((in_bf16.double() - exact) / scale).abs().max() > 20e-4


def test_quantifier_is_fp32_under_bf16_autocast():
    quantifier, m_BTn = Quantifier(6), memberships(2, 65, 6).float()
    expected, _ = quantifier(m_BTn)
    with torch.autocast('cpu', torch.bfloat16):
        units_BTn, state = quantifier(m_BTn)
    assert {units_BTn.dtype, *(part.dtype for part in state)} == {torch.float32}
    assert torch.equal(units_BTn, expected)


# ---- in parts

@pytest.mark.parametrize('sizes', ([1] * 17, [5, 12], [1, 15, 1], [8, 1, 8]))
@pytest.mark.parametrize('function', (decayed_max, decayed_sum))
def test_in_parts_is_all_at_once(function, sizes):
    """Values, and gradients through the state too: the state is differentiable."""
    m_BTC, rate_C = memberships(2, 17, 5), torch.tensor(RATES, dtype=torch.float64)
    g_BTC = torch.randn(m_BTC.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def in_parts(m_BTC, rate_C):
        states, before = [], None
        for part in m_BTC.split(sizes, dim=1):
            states.append(function(part, rate_C, before))
            before = states[-1][:, -1]
        return torch.cat(states, dim=1)

    together = value_and_gradients(function, m_BTC, rate_C, g_BTC)
    for got, want in zip(value_and_gradients(in_parts, m_BTC, rate_C, g_BTC), together):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize('corrected', (True, False))
@pytest.mark.parametrize('sizes', ([1] * 17, [5, 12], [16, 1]))
def test_quantifier_state_is_all_that_later_tokens_need(sizes, corrected):
    quantifier, m_BTn = Quantifier(7, corrected), memberships(2, 17, 7).float()
    with torch.no_grad():
        quantifier.decay.copy_(torch.linspace(-3, 7, 7).roll(2))
        together, last = quantifier(m_BTn)
        units, state = [], None
        for part in m_BTn.split(sizes, dim=1):
            part_BTn, state = quantifier(part, state)
            units.append(part_BTn)
    torch.testing.assert_close(torch.cat(units, dim=1), together)
    torch.testing.assert_close(state, last)


def test_quantifier_units_are_existential_then_proportion():
    quantifier, m_BTn = Quantifier(5), memberships(2, 17, 5).float()
    with torch.no_grad():
        quantifier.decay.copy_(torch.linspace(-2, 4, 5))
        rate = quantifier.decay.sigmoid()
        expected = {corrected: torch.cat([sequential('max', m_BTn[..., :3], rate[:3]),
                                          sequential(form, m_BTn[..., 3:], rate[3:])], dim=-1)
                    for corrected, form in ((True, 'corrected'), (False, 'printed'))}
        for quantifier.corrected in (True, False):
            torch.testing.assert_close(quantifier(m_BTn)[0], expected[quantifier.corrected])
    assert quantifier.n_exists == 3


# ---- what the numbers mean

@pytest.mark.parametrize('form', FORMS)
def test_causal(form):
    m_BTC, rate_C = memberships(2, 33, 5).float(), torch.tensor(RATES)
    y_BTC = FORMS[form](m_BTC, rate_C)
    for t in (0, 1, 16, 31, 32):
        changed = m_BTC.clone()
        changed[:, t] = 1 - changed[:, t] / 2
        other = FORMS[form](changed, rate_C)
        assert torch.equal(other[:, :t], y_BTC[:, :t])
        assert (other[:, t, 2] != y_BTC[:, t, 2]).all()        # it would notice: at rate 1/2 token t changes


@pytest.mark.parametrize('form', ('max', 'corrected', 'printed'))
@pytest.mark.parametrize('T', (1, 2, 1000))
def test_bounded(form, T):
    """Quantified memberships are memberships, to fp32 rounding."""
    rate_C = torch.tensor(RATES)
    for m_BTC in (memberships(3, T, 5).float(), torch.zeros(1, T, 5), torch.ones(1, T, 5)):
        y_BTC = FORMS[form](m_BTC, rate_C)
        assert y_BTC.min() >= 0 and y_BTC.max() <= 1 + 1e-6


def test_rates_zero_and_one():
    m_BTC, zero, one = memberships(2, 50, 3), torch.zeros(3), torch.ones(3)
    for form in ('max', 'corrected', 'printed'):
        torch.testing.assert_close(FORMS[form](m_BTC, zero.double()), m_BTC)
    assert torch.equal(decayed_max(m_BTC, one.double()), m_BTC.cummax(1).values)
    running_mean = m_BTC.cumsum(1) / torch.arange(1, 51)[:, None]
    torch.testing.assert_close(decayed_mean(m_BTC, one.double()), running_mean)
    assert not decayed_mean(m_BTC, one.double(), corrected=False).any()


def test_example_of_the_docstring():
    m, half = torch.tensor([0., 1, 0, 0, 1])[None, :, None], torch.tensor([0.5])
    assert decayed_max(m, half).flatten().tolist() == [0, 1, 0.5, 0.25, 1]
    assert decayed_mean(m, half, corrected=False).flatten().tolist() == [0, 0.5, 0.25, 0.125, 0.5625]
    assert decayed_mean(m, half).flatten().tolist() == pytest.approx([0, 2 / 3, 2 / 7, 2 / 15, 18 / 31])


def test_half_life():
    """ln 0.5 / ln rate: a rate of 1/2 halves in one token, 2^(-1/10) in ten; the start, 0.99, in 69."""
    quantifier = Quantifier(4)
    at_start = torch.full((4,), math.log(0.5) / math.log(0.99), dtype=torch.float64)
    torch.testing.assert_close(quantifier.half_life(), at_start, rtol=1e-6, atol=0)
    assert round(quantifier.half_life()[0].item()) == 69
    rates = torch.tensor([0.5, 0.5 ** 0.1, 0.5 ** 0.001, 0.25], dtype=torch.float64)
    with torch.no_grad():
        quantifier.decay.copy_(torch.logit(rates))
    assert quantifier.half_life().tolist() == pytest.approx([1, 10, 1000, 0.5], rel=1e-4)
    event = torch.zeros(1, 11, 4)                              # one event at the first token, read ten tokens later
    event[:, 0] = 1
    units_BTn, _ = quantifier(event)
    assert units_BTn[0, 10, 1].item() == pytest.approx(0.5, rel=1e-5)
    assert quantifier.half_life()[2] > 500 and not quantifier.half_life().requires_grad


# ---- proportion units learn too

def fit_short_memory(seed, corrected, n=16, steps=300):
    """n proportion units over one membership, all starting at 0.99 and read out by small random weights, learn how
    often the membership was true lately (rate 0.5). Adam, one learning rate. Returns their median half-life and the
    last loss.
    """
    generator = torch.Generator().manual_seed(seed)
    decay_n = torch.full((n,), math.log(99.0), requires_grad=True)
    readout_n = (0.1 * torch.randn(n, generator=generator)).requires_grad_()
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([decay_n, readout_n, bias], lr=0.01)
    for _ in range(steps):
        m_BT1 = (torch.rand(8, 32, 1, generator=generator) < 0.3).float()
        target_BT = decayed_mean(m_BT1, torch.tensor([0.5]))[..., 0]
        units_BTn = decayed_mean(m_BT1.expand(-1, -1, n), decay_n.sigmoid(), corrected)
        loss = (units_BTn @ readout_n + bias - target_BT).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (math.log(0.5) / decay_n.sigmoid().log()).median().item(), loss.item()


@pytest.mark.parametrize('seed', (1, 2, 3))
def test_corrected_units_learn_to_forget_where_printed_ones_stay_sticky(seed):
    """From a half-life of 69 to under 5 (the target's is 1), while the printed form's median stays above 25, its loss 5
    times higher."""
    corrected, corrected_loss = fit_short_memory(seed, corrected=True)
    printed, printed_loss = fit_short_memory(seed, corrected=False)
    assert corrected < 5 and printed > 25
    assert printed_loss > 5 * corrected_loss


def test_printed_form_is_scaled_down_by_its_rate():
    """Why: towards lam = 1 the printed output, and its gradient to the memberships, shrink in proportion to 1-lam. The
    corrected do not."""
    m_BTC = memberships(4, 20, 1)
    size = {}
    for corrected in (True, False):
        for distance in (1e-3, 1e-5):
            m, lam = m_BTC.clone().requires_grad_(), torch.tensor([1 - distance], dtype=torch.float64)
            P_BTC = decayed_mean(m, lam, corrected)
            P_BTC.sum().backward()
            size[corrected, distance] = torch.stack([P_BTC.detach().mean(), m.grad.mean()])
    assert (size[False, 1e-3] / size[False, 1e-5]).tolist() == pytest.approx([100, 100], rel=0.02)
    assert (size[True, 1e-3] / size[True, 1e-5]).tolist() == pytest.approx([1, 1], rel=0.02)


# ---- memory and compilation

@pytest.mark.parametrize('form', FORMS)
def test_what_backward_keeps_is_linear_in_the_length(form):
    """Input and output, each once, whatever the depth of the scan; the corrected form's weights add a few single batch
    rows."""
    kept = []
    for T in (64, 4096):
        m_BTC, rate_C = torch.rand(16, T, 2, requires_grad=True), torch.full((2,), 0.9, requires_grad=True)
        saved = {}
        with saved_tensors_hooks(lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
            FORMS[form](m_BTC, rate_C)
        kept.append(sum(x.untyped_storage().nbytes() for x in saved.values()) / m_BTC.untyped_storage().nbytes())
    assert max(kept) <= 2.5
    assert kept[1] <= kept[0]


@pytest.mark.skipif(not any(map(shutil.which, ('c++', 'g++', 'clang++', 'cl'))), reason='no C++ compiler')
def test_compiled_is_eager():
    """In one graph, fullgraph=True, forward and backward: both kinds of unit, over a length with three levels of the
    scan."""
    def units(m_BTC, decay_C):
        gamma, lam = decay_C.sigmoid().tensor_split([3])
        m_exists, m_often = m_BTC.tensor_split([3], dim=-1)
        return torch.cat([decayed_max(m_exists, gamma), decayed_mean(m_often, lam)], dim=-1)

    m_BTC, decay_C, g_BTC = memberships(2, 5, 6).float(), torch.linspace(-1, 4, 6), memberships(2, 5, 6, seed=1)
    eager = value_and_gradients(units, m_BTC, decay_C, g_BTC)
    compiled = value_and_gradients(torch.compile(units, fullgraph=True), m_BTC, decay_C, g_BTC)
    for got, want in zip(compiled, eager):
        torch.testing.assert_close(got, want)
