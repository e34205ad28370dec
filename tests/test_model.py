"""model.py: what every kind of FFN must keep (causality, parameters, loss at start), what nc computes, and
generation."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import FFN, FFN_KINDS, GATED, GPT, param_groups

# every kind, and nc with each of its options
SETTINGS = {kind: dict(ffn=kind) for kind in FFN_KINDS} | {
    'nc quant': dict(ffn='nc', quant=True),
    'nc quant printed': dict(ffn='nc', quant=True, quant_form='printed'),
    'nc all Boolean, bounded': dict(ffn='nc', quant=True, bool_frac=1.0, bound_write=True),
    'nc all quantifiers, highway': dict(ffn='nc', quant=True, bool_frac=1.0, quant_frac=1.0, highway=True),
    'nc zero': dict(ffn='nc', quant=True, op_init='zero'),
}
every_setting = pytest.mark.parametrize('setting', SETTINGS.values(), ids=SETTINGS.keys())


def tiny(vocab_size=13, block_size=16, n_layer=2, n_head=2, n_embd=16, seed=0, **options):
    torch.manual_seed(seed)
    return GPT(vocab_size, block_size, n_layer, n_head, n_embd, **options)


def lively(model, seed=0):
    """The same model with large random weights, so that every token, position and quantifier changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('quantifier.decay'):
                p.uniform_(-1, 5, generator=generator)
            elif name.endswith('weight'):                      # of norms too: a tied head would else repeat its input
                p.normal_(std=0.7 if p.dim() > 1 else 1, generator=generator)
    return model


def random_ids(*shape, vocab_size=13, seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def on_meta(**options):
    """GPT-2 small's shape without its memory."""
    with torch.device('meta'):
        return GPT(50257, **options)


# ---- every kind

@every_setting
def test_causal(setting):
    """A later token changes no earlier logit, and does change its own."""
    model, ids_BT = lively(tiny(**setting)), random_ids(2, 16)
    with torch.no_grad():
        logits_BTV = model(ids_BT)
        for t in (1, 7, 15):
            changed = ids_BT.clone()
            changed[:, t] = (changed[:, t] + 1) % 13
            other_BTV = model(changed)
            torch.testing.assert_close(other_BTV[:, :t], logits_BTV[:, :t])
            assert (other_BTV[:, t:] - logits_BTV[:, t:]).abs().amax(-1).min() > 1e-3


@every_setting
def test_loss_at_start_is_that_of_a_uniform_guess(setting):
    model = tiny(vocab_size=500, block_size=64, n_embd=64, **setting)
    ids_BT = random_ids(8, 65, vocab_size=500)
    assert model(ids_BT[:, :-1], ids_BT[:, 1:]).item() == pytest.approx(math.log(500), rel=0.02)


@every_setting
def test_loss_is_the_mean_cross_entropy_of_the_next_token(setting):
    model, ids_BT = lively(tiny(**setting)), random_ids(3, 17)
    logits_BTV = model(ids_BT[:, :-1])
    assert logits_BTV.shape == (3, 16, 13)                     # the embedding's padding is cut off
    picked = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])
    torch.testing.assert_close(model(ids_BT[:, :-1], ids_BT[:, 1:]), -picked.mean())


@every_setting
def test_every_parameter_gets_a_finite_gradient(setting):
    model = lively(tiny(**setting))
    model(random_ids(4, 16), random_ids(4, 16, seed=1)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


@every_setting
def test_it_learns(setting):
    """A fixed batch, learned by heart in a few steps of Adam."""
    model, ids_BT = tiny(**setting), random_ids(2, 17)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        losses.append(model(ids_BT[:, :-1], ids_BT[:, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@every_setting
def test_every_parameter_is_in_exactly_one_group(setting):
    model = tiny(**setting)
    groups = param_groups(model, weight_decay=0.1, decay_lr_mult=50.0)
    grouped = [id(p) for group in groups for p in group['params']]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    for group in groups:
        for p in group['params']:
            assert group['weight_decay'] == (0.1 if p.dim() >= 2 else 0)
    faster = {id(p) for group in groups if group['lr_mult'] == 50 for p in group['params']}
    assert faster == {id(p) for name, p in model.named_parameters() if name.endswith('quantifier.decay')}
    assert bool(faster) == setting.get('quant', False)
    assert {group['lr_mult'] for group in groups} == {1, 50}
    torch.optim.AdamW(groups, lr=1e-3)                         # an empty group is no obstacle


def test_head_is_tied():
    model = tiny()
    assert model.head.weight is model.tokens.weight
    assert not any(name.startswith('head') for name, _ in model.named_parameters())
    model(random_ids(1, 16), random_ids(1, 16)).backward()
    unread = sorted(set(range(13)) - set(random_ids(1, 16).flatten().tolist()))
    assert unread and (model.tokens.weight.grad[unread] != 0).any()            # a token never read: through the head


# ---- parameter counts

def test_gpt2_small_has_the_parameters_of_gpt2_small():
    assert on_meta().num_params() == 124_439_808


def test_a_layer_of_nc_has_the_parameters_of_gelu():
    for kind in ('gelu', 'relu', 'nc'):
        assert sum(p.numel() for p in FFN(kind, 768, 3072).parameters()) == 4_722_432, kind
    for bool_frac in (0.0, 0.3, 0.5, 1.0):
        assert sum(p.numel() for p in FFN('nc', 768, 3072, bool_frac=bool_frac).parameters()) == 4_722_432, bool_frac


def test_quantifiers_add_their_decays_and_nothing_else():
    plain, quantified = on_meta(ffn='nc'), on_meta(ffn='nc', quant=True)
    assert plain.num_params() == on_meta().num_params()
    decays = sum(p.numel() for name, p in quantified.named_parameters() if name.endswith('quantifier.decay'))
    assert decays == 12 * 384                                  # 3072 * 0.25 * 0.5 in each layer
    assert quantified.num_params() - plain.num_params() == decays < 1e-4 * plain.num_params()


@pytest.mark.parametrize('kind', GATED)
def test_gated_kinds_are_matched_within_a_fifth_of_a_percent(kind):
    assert on_meta(ffn=kind).num_params() == pytest.approx(on_meta().num_params(), rel=0.002)
    layer = sum(p.numel() for p in FFN(kind, 768, 3072).parameters())
    assert layer == pytest.approx(4_722_432, rel=0.002)


def test_highway_is_outside_the_match():
    assert on_meta(ffn='nc', highway=True).num_params() - on_meta(ffn='nc').num_params() == 12 * 768 ** 2


def test_num_params_leaves_out_the_padding():
    """13 tokens in 64 rows: padded or not, the count is that of 13."""
    assert tiny(vocab_size=64).num_params() - tiny(vocab_size=13).num_params() == (64 - 13) * 16
    assert tiny(vocab_size=64).num_params() == sum(p.numel() for p in tiny(vocab_size=64).parameters())


def test_flops_per_token():
    """6 a multiplying weight, 12 L D T for attention; for GPT-2 small about 0.86 GFLOP."""
    model = on_meta()
    assert model.flops_per_token() == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


# ---- what the FFN computes

@every_setting
def test_units_partition_the_hidden_units(setting):
    options = {key: value for key, value in setting.items() if key != 'ffn'}
    ffn = FFN(setting['ffn'], 16, 64, **options)
    covered = [i for unit in ffn.units.values() for i in range(unit.start, unit.stop)]
    assert covered == list(range(ffn.down.in_features))
    assert ffn.hidden(ffn.up(torch.randn(2, 5, 16))).shape == (2, 5, len(covered))


def test_shares_of_the_units():
    size = {name: unit.stop - unit.start for name, unit in FFN('nc', 768, 3072, quant=True).units.items()}
    assert size == {'gelu': 2304, 'and': 192, 'and_not': 192, 'exists': 192, 'proportion': 192}
    size = {name: unit.stop - unit.start for name, unit in FFN('nc', 768, 3072).units.items()}
    assert size == {'gelu': 2304, 'and': 384, 'and_not': 384}


@pytest.mark.parametrize('quant_form', ('corrected', 'printed'))
def test_nc_hidden_units_one_by_one(quant_form):
    """Each unit from its own pre-activations, by the formulas of paper A, in plain Python numbers."""
    torch.manual_seed(0)
    ffn = FFN('nc', 8, 32, bool_frac=0.75, quant_frac=0.4, quant=True, quant_form=quant_form).double()
    with torch.no_grad():
        ffn.quantifier.decay.uniform_(-2, 4)
        pre_TF = ffn.up(torch.randn(1, 9, 8, dtype=torch.float64))
        hidden_TF = ffn.hidden(pre_TF)[0].tolist()
    pre_TF, rate_n = pre_TF[0].tolist(), ffn.quantifier.decay.sigmoid().tolist()
    n_pairs, n_quant = 7, 10                                   # round(0.4 * 24) quantifiers, half of the other 14 pairs
    n_gelu = 32 - 2 * n_pairs - n_quant

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    E, S, N = [0.0] * n_quant, [0.0] * n_quant, [0.0] * n_quant
    for pre_F, hidden_F in zip(pre_TF, hidden_TF):
        expected = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in pre_F[:n_gelu]]
        A = [sigmoid(x) for x in pre_F[n_gelu:n_gelu + n_pairs]]
        B = [sigmoid(x) for x in pre_F[n_gelu + n_pairs:n_gelu + 2 * n_pairs]]
        expected += [a * b for a, b in zip(A, B)] + [a * (1 - b) for a, b in zip(A, B)]
        for i, x in enumerate(pre_F[n_gelu + 2 * n_pairs:]):
            Q, rate = sigmoid(x), rate_n[i]
            E[i], S[i], N[i] = max(Q, rate * E[i]), Q + rate * S[i], 1 + rate * N[i]
            often = S[i] / N[i] if quant_form == 'corrected' else (1 - rate) * S[i]
            expected.append(E[i] if i < n_quant // 2 else often)
        assert hidden_F == pytest.approx(expected, abs=1e-6)


def test_gated_hidden_units():
    pre_BTF = torch.randn(2, 3, 10)
    a, b = pre_BTF[..., :5], pre_BTF[..., 5:]
    expected = dict(glu=a.sigmoid() * b, swiglu=a * a.sigmoid() * b, bilinear=a * b,
                    sigbilinear=a.sigmoid() * b.sigmoid())
    for kind in GATED:
        torch.testing.assert_close(FFN(kind, 8, 8).hidden(pre_BTF), expected[kind])


def test_memberships_are_what_the_units_are_made_of():
    ffn, x_BTD = FFN('nc', 16, 64, bool_frac=0.5, quant=True), torch.randn(2, 7, 16)
    members, hidden_BTF = ffn.memberships(x_BTD), ffn.hidden(ffn.up(x_BTD))
    torch.testing.assert_close(hidden_BTF[..., ffn.units['and']], members['a'] * members['b'])
    torch.testing.assert_close(hidden_BTF[..., ffn.units['and_not']], members['a'] * (1 - members['b']))
    quantified_BTn = hidden_BTF[..., ffn.units['exists'].start:ffn.units['proportion'].stop]
    torch.testing.assert_close(ffn.quantifier(members['q'])[0], quantified_BTn)
    assert FFN('gelu', 16, 64).memberships(x_BTD) == {}


def with_pre_activations(pre_TF, **options):
    """An nc layer and inputs at which its pre-activations are the rows of pre_TF."""
    ffn = FFN('nc', pre_TF.size(1), pre_TF.size(1), **options)
    with torch.no_grad():
        ffn.up.weight.copy_(torch.eye(pre_TF.size(1)))
        ffn.up.bias.zero_()
    return ffn, pre_TF


def test_saturation_is_the_share_of_memberships_near_0_or_1():
    """The sigmoid passes 0.95 at 2.944, ln 19; b is at rest at 0.5; GELU units do not count."""
    a_T = torch.tensor([-9, -2.95, -2.94, 0, 2.94, 2.95, 9, 1])                # four of eight
    pre_TF = torch.stack([torch.full((8,), 9.0), torch.full((8,), 9.0), a_T, torch.zeros(8)], dim=1)
    ffn, x = with_pre_activations(pre_TF, bool_frac=0.5)
    assert ffn.saturation(x).item() == (4 / 8 + 0) / 2
    pre_TF = torch.cat([a_T[:, None], torch.zeros(8, 1), torch.full((8, 2), 9.0)], dim=1)
    ffn, x = with_pre_activations(pre_TF, bool_frac=1.0, quant=True)
    assert ffn.saturation(x).item() == pytest.approx((4 / 8 + 0 + 1) / 3)      # a, b and q weigh the same
    ffn, x = with_pre_activations(pre_TF, bool_frac=1.0, quant=True, quant_frac=1.0)
    assert ffn.saturation(x).item() == pytest.approx((4 / 8 + 0 + 1 + 1) / 4)  # q alone
    assert FFN('gelu', 4, 4).saturation(x) is None and FFN('nc', 4, 4, bool_frac=0.0).saturation(x) is None


def test_single_operand_r2_is_the_larger_squared_correlation():
    torch.manual_seed(0)
    ffn, x_BTD = FFN('nc', 16, 40, bool_frac=0.5), 3 * torch.randn(4, 50, 16)
    with torch.no_grad():
        ffn.up.weight[ffn.units['and']] *= torch.linspace(0.1, 5, 10)[:, None] # units led by A, and units led by B
        r2 = ffn.single_operand_r2(x_BTD)
        members, hidden_BTF = ffn.memberships(x_BTD), ffn.hidden(ffn.up(x_BTD))
    expected = []
    for name in ('and', 'and_not'):
        for i, unit in enumerate(hidden_BTF[..., ffn.units[name]].flatten(0, 1).T.double().numpy()):
            A, B = (members[operand].flatten(0, 1)[:, i].double().numpy() for operand in 'ab')
            expected.append([np.corrcoef(unit, operand)[0, 1] ** 2 for operand in (A, B)])
    assert r2.tolist() == pytest.approx([max(pair) for pair in expected], abs=1e-5)
    for of_operand, column in zip(ffn.operand_r2(x_BTD), zip(*expected)):
        assert of_operand.tolist() == pytest.approx(column, abs=1e-5)
    assert {a > b for a, b in expected} == {True, False}
    assert ffn.two_operand_share(x_BTD) == pytest.approx(sum(max(pair) < 0.9 for pair in expected) / 20)
    assert 0 < ffn.two_operand_share(x_BTD) < 1


def test_two_fair_independent_bits_explain_a_third_each():
    """var(A) = 1/4, var(A*B) = 3/16, their covariance 1/8: the square is (1/8)^2 / (3/64) = 1/3; so for A*(1-B)."""
    pre_TF = torch.cartesian_prod(torch.tensor([-40.0, 40]), torch.tensor([-40.0, 40]))
    ffn, x = with_pre_activations(pre_TF, bool_frac=1.0)
    assert ffn.single_operand_r2(x).tolist() == pytest.approx([1 / 3, 1 / 3])
    assert ffn.two_operand_share(x) == 1


def test_one_operand_explains_a_unit_whose_other_operand_stands_still():
    for still in (0, 1):
        pre_TF = torch.randn(20, 2)
        pre_TF[:, still] = 0.7
        ffn, x = with_pre_activations(pre_TF, bool_frac=1.0)
        assert ffn.single_operand_r2(x).tolist() == pytest.approx([1, 1]) and ffn.two_operand_share(x) == 0


def test_a_unit_that_stands_still_uses_no_operand():
    """A is 0, so both units are; B moves."""
    ffn, x = with_pre_activations(torch.stack([torch.full((20,), -40.0), torch.randn(20)], dim=1), bool_frac=1.0)
    assert ffn.single_operand_r2(x).tolist() == [1, 1] and ffn.two_operand_share(x) == 0


def test_quantifiers_see_fp32_under_bf16_autocast():
    ffn, seen = FFN('nc', 16, 64, quant=True), []
    ffn.quantifier.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out[0].dtype)))
    with torch.autocast('cpu', torch.bfloat16):
        assert ffn(torch.randn(2, 5, 16)).dtype == torch.bfloat16
    assert seen == [torch.float32, torch.float32]


def test_op_init_zero_starts_as_the_gelu_part():
    model = tiny(ffn='nc', quant=True, bool_frac=0.5, op_init='zero')
    x_BTD = torch.randn(2, 7, 16)
    for block in model.blocks:
        ffn, gelu = block.ffn, block.ffn.units['gelu']
        part = F.linear(F.gelu(ffn.up(x_BTD)[..., gelu]), ffn.down.weight[:, gelu], ffn.down.bias)
        torch.testing.assert_close(ffn(x_BTD), part)
        assert part.abs().max() > 0
    normal = tiny(ffn='nc', quant=True, bool_frac=0.5).blocks[0].ffn
    assert normal.down.weight[:, normal.units['gelu'].stop:].abs().min() > 0


def test_bound_write_bounds_what_the_layer_writes():
    x_BTD = 100 * torch.randn(2, 7, 16)
    free, bounded = FFN('nc', 16, 64), FFN('nc', 16, 64, bound_write=True)
    bounded.load_state_dict(free.state_dict())
    assert free(x_BTD).abs().max() > 1 and bounded(x_BTD).abs().max() <= 1
    torch.testing.assert_close(bounded(x_BTD), free(x_BTD).tanh())


def test_highway_is_a_linear_path_beside_the_layer():
    """Beside bound_write too: it is not bounded."""
    x_BTD, ffn = 100 * torch.randn(2, 7, 16), FFN('nc', 16, 64, bound_write=True, highway=True)
    beside = ffn(x_BTD) - ffn.down(ffn.hidden(ffn.up(x_BTD))).tanh()
    torch.testing.assert_close(beside, x_BTD @ ffn.highway.weight.T, rtol=1e-4, atol=1e-4)
    assert beside.abs().max() > 1


def test_quantifier_units_report():
    model = lively(tiny(ffn='nc', quant=True))
    report, ffns = model.quantifier_units(), [block.ffn for block in model.blocks]
    n = len(ffns[0].quantifier.decay)
    assert report['layer'].tolist() == [0] * n + [1] * n
    assert report['exists'].tolist() == ([True] * (n // 2) + [False] * (n // 2)) * 2
    torch.testing.assert_close(report['half_life'], torch.cat([ffn.quantifier.half_life() for ffn in ffns]))
    norms = [ffn.down.weight[:, i].norm().item() for ffn in ffns
             for i in range(ffn.units['exists'].start, ffn.units['proportion'].stop)]
    assert report['write_norm'].tolist() == pytest.approx(norms)
    assert tiny(ffn='nc').quantifier_units() is None


# ---- generation

def greedy_without_cache(model, ids_BT, n):
    for _ in range(n):
        logits_BV = model(ids_BT[:, -model.block_size:])[:, -1]
        ids_BT = torch.cat([ids_BT, logits_BV.argmax(-1, keepdim=True)], dim=1)
    return ids_BT


@every_setting
@torch.no_grad()
def test_generation_with_the_cache_is_generation_without(setting):
    """A batch, token for token, inside the context and past it, from prompts of one token, of some, and longer than the
    context."""
    model = lively(tiny(**setting))
    for prompt in (1, 5, 16, 20):
        ids_BT = random_ids(3, prompt, seed=prompt)
        expected = greedy_without_cache(model, ids_BT, 25)
        assert torch.equal(model.generate(ids_BT, 25, temperature=0), expected)
        assert len(expected[:, prompt:].unique()) > 3          # a model that repeats itself would test little
    assert torch.equal(model.generate(ids_BT, 0), ids_BT)


def test_inside_the_context_each_step_reads_one_token():
    """The cache is used: the prompt once, then token by token; past the context of 16 the last 16 are read anew."""
    model, lengths = lively(tiny(ffn='nc', quant=True)), []
    model.blocks[0].register_forward_hook(lambda block, args, out: lengths.append(args[0].size(1)))
    model.generate(random_ids(1, 5), 14)
    assert lengths == [5] + [1] * 11 + [16] * 2


@every_setting
@torch.no_grad()
def test_logits_token_by_token_are_those_of_the_whole(setting):
    model, ids_BT = lively(tiny(**setting)), random_ids(2, 16)
    states = [{} for _ in model.blocks]
    parts = [model(part, states=states) for part in ids_BT.split([4] + [1] * 12, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids_BT), rtol=1e-4, atol=1e-4)


def test_generate_samples():
    model, ids_BT = lively(tiny(ffn='nc', quant=True)), random_ids(2, 4)
    greedy = model.generate(ids_BT, 20, temperature=0)
    assert torch.equal(model.generate(ids_BT, 20, top_k=1), greedy)
    draws = [model.generate(ids_BT, 20, temperature=3.0, generator=torch.Generator().manual_seed(seed))
             for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0][:, :4], ids_BT) and draws[0].max() < 13


@torch.no_grad()
def test_top_k_keeps_the_k_likeliest_and_temperature_sharpens():
    model, ids_BT = lively(tiny()), random_ids(1, 4).expand(2000, 4)
    p_V = model(ids_BT[:1])[0, -1].softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def share_V(**options):
        return model.generate(ids_BT, 1, generator=generator, **options)[:, -1].bincount(minlength=13) / 2000

    top = p_V.topk(3)
    assert set(share_V(top_k=3, temperature=2.0).nonzero().flatten().tolist()) <= set(top.indices.tolist())
    expected = (p_V.log() / 2).softmax(-1)
    torch.testing.assert_close(share_V(temperature=2.0), expected, atol=0.05, rtol=0)
    assert share_V(temperature=2.0, top_k=1000).count_nonzero() > 3            # more than there are: all


# ---- mistakes

@pytest.mark.parametrize('options, words', [
    (dict(n_embd=10, n_head=3), 'n_embd must be divisible by n_head, got 10 and 3'),
    (dict(ffn='gelu', quant=True), 'quant=on needs ffn=nc'),
    (dict(ffn='swiglu', quant=True), 'got ffn=swiglu'),
    (dict(ffn='gleu'), "unknown ffn 'gleu': expected one of gelu, relu"),
    (dict(ffn='nc', bool_frac=1.5), 'shares from 0 to 1, got 1.5 and 0.5'),
    (dict(ffn='nc', bool_frac=-0.1), 'shares from 0 to 1'),
    (dict(ffn='nc', quant=True, quant_frac=2.0), 'shares from 0 to 1'),
])
def test_a_wrong_shape_is_one_clear_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        tiny(**options)
    assert '\n' not in str(error.value)


def test_all_boolean_needs_an_even_width():
    assert 'gelu' in FFN('nc', 8, 6, bool_frac=1.0).units
    with pytest.raises(ValueError, match='even number of paired units, got d_ff=7'):
        FFN('nc', 8, 7, bool_frac=1.0)
