"""Llama: rotary positions, grouped-query attention, padding, and what loading a folder promises. The comparison with
transformers is in reference_llama.py."""
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT
from model import Llama, load_llama, rope_frequencies, rotate

LLAMA31 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# tensor names by ours, as HF and as Meta write them
HF = {'tokens': 'model.embed_tokens', 'layers.': 'model.layers.', 'attn.q': 'self_attn.q_proj',
      'attn.k': 'self_attn.k_proj', 'attn.v': 'self_attn.v_proj', 'attn.o': 'self_attn.o_proj',
      'ffn.gate': 'mlp.gate_proj', 'ffn.up': 'mlp.up_proj', 'ffn.down': 'mlp.down_proj',
      'norm_attn': 'input_layernorm', 'norm_ffn': 'post_attention_layernorm', 'head.': 'lm_head.'}
META = {'tokens': 'tok_embeddings', 'attn.q': 'attention.wq', 'attn.k': 'attention.wk', 'attn.v': 'attention.wv',
        'attn.o': 'attention.wo', 'ffn.gate': 'feed_forward.w1', 'ffn.down': 'feed_forward.w2',
        'ffn.up': 'feed_forward.w3', 'norm_attn': 'attention_norm', 'norm_ffn': 'ffn_norm', 'head.': 'output.'}
SHAPE = dict(vocab_size=50, d=24, d_ff=40, n_layer=2, n_head=4, n_kv_head=2, head_dim=6)
IDS = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))


def small(seed=0, **options):
    """A Llama with weights large enough that every part shows in the logits."""
    torch.manual_seed(seed)
    llama = Llama(**{**SHAPE, **options})
    for weight in llama.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    return llama.requires_grad_(False)


def renamed(llama, names, tied=False):
    tensors = {}
    for name, tensor in llama.state_dict().items():
        if not (tied and name == 'head.weight'):
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            tensors['model.norm.weight' if name == 'norm.weight' and names is HF else name] = tensor.clone()
    return tensors


def hf_folder(folder, llama, shards=1, tied=False, scaling=None, style='classic'):
    """llama as an HF folder."""
    rope = dict(rope_theta=llama.rope_theta, rope_scaling=scaling and dict(scaling, rope_type='llama3'))
    if style == 'newer':
        rope = dict(rope_parameters=dict(scaling or {}, rope_theta=llama.rope_theta,
                                         rope_type='llama3' if scaling else 'default'))
    layer = llama.layers[0]
    (folder / 'config.json').write_text(json.dumps(dict(
        model_type='llama', hidden_size=llama.tokens.embedding_dim, intermediate_size=layer.ffn.up.out_features,
        num_hidden_layers=len(llama.layers), num_attention_heads=layer.attn.q.out_features // llama.head_dim,
        num_key_value_heads=layer.attn.k.out_features // llama.head_dim, head_dim=llama.head_dim,
        vocab_size=llama.tokens.num_embeddings, rms_norm_eps=layer.norm_attn.eps, tie_word_embeddings=tied, **rope)))
    tensors = renamed(llama, HF, tied)
    if shards == 1:
        save_file(tensors, folder / 'model.safetensors')
        return folder
    where = {name: f'model-{i % shards}.safetensors' for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps(dict(weight_map=where)))
    return folder


def meta_folder(folder, llama, tied=False, scaled=False):
    """llama as Meta's folder, where rows 2i and 2i+1 of a head of q and k turn together."""
    tensors, half, layer = renamed(llama, META, tied), llama.head_dim // 2, llama.layers[0]
    for name, tensor in tensors.items():
        if name.endswith(('wq.weight', 'wk.weight')):
            heads = tensor.view(-1, 2 * half, tensor.size(1))
            tensors[name] = torch.stack([heads[:, i // 2 + half * (i % 2)] for i in range(2 * half)], 1).flatten(0, 1)
    torch.save(tensors, folder / 'consolidated.00.pth')
    (folder / 'params.json').write_text(json.dumps(dict(
        dim=llama.tokens.embedding_dim, n_layers=len(llama.layers), vocab_size=llama.tokens.num_embeddings,
        n_heads=layer.attn.q.out_features // llama.head_dim, n_kv_heads=layer.attn.k.out_features // llama.head_dim,
        norm_eps=layer.norm_attn.eps, rope_theta=llama.rope_theta, use_scaled_rope=scaled)))
    return folder


def edited(file, **changes):
    """Changes keys of a .json file; None deletes."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def with_tensors(folder, **changes):
    """Changes tensors of model.safetensors; None deletes."""
    content = load_file(folder / 'model.safetensors') | changes
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, folder / 'model.safetensors')


# ---- rotary positions

def test_llama3_scaling_keeps_fast_pairs_slows_slow_ones_and_mixes_six_between():
    plain, scaled = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, LLAMA31)
    assert plain.dtype == scaled.dtype == torch.float32 and plain.shape == (64,)
    torch.testing.assert_close(plain, torch.tensor([500000 ** (-i / 64) for i in range(64)]))
    assert torch.equal(scaled[:29], plain[:29]) and torch.equal(scaled[35:], plain[35:] / 8)
    assert (scaled[29:35] < plain[29:35]).all() and (scaled[29:35] > plain[29:35] / 8).all()
    assert plain[29].item() == pytest.approx(0.0026161, rel=1e-4)
    assert scaled[29].item() == pytest.approx(0.00216657, rel=1e-5)


def test_rotation_turns_channel_i_with_channel_i_plus_half_by_position_times_frequency():
    torch.manual_seed(0)
    llama = small(rope_theta=100.0)
    x = torch.randn(1, 3, 20, 6)
    _, (cos, sin, _) = llama.embed(IDS[:1])
    turned = rotate(x, cos, sin)
    for position in range(20):
        for i, f in enumerate(rope_frequencies(6, 100.0).tolist()):
            a, b, angle = x[0, :, position, i], x[0, :, position, i + 3], position * f
            torch.testing.assert_close(turned[0, :, position, i], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[0, :, position, i + 3], a * math.sin(angle) + b * math.cos(angle))


def test_angles_are_fp32_whatever_the_model_is_cast_to():
    llama = small(rope_theta=1e4)
    ids = torch.zeros(1, 3000, dtype=torch.long)
    exact = llama.embed(ids)[1]
    rounded = llama.to(torch.bfloat16).embed(ids)[1]
    assert rounded[0].dtype == rounded[1].dtype == torch.bfloat16
    assert torch.equal(rounded[0], exact[0].bfloat16()) and torch.equal(rounded[1], exact[1].bfloat16())


# ---- the model

def literal_layer(layer, x, frequencies, head_dim):
    """A layer on one sequence x [S,D], a query and a head at a time."""
    def norm(x, module):
        return torch.stack([row / math.sqrt(row.square().mean().item() + module.eps) * module.weight for row in x])

    def turned(row, position):
        half, out = head_dim // 2, row.clone()
        for i, f in enumerate(frequencies.tolist()):
            z = complex(row[i], row[i + half]) * complex(math.cos(position * f), math.sin(position * f))
            out[i], out[i + half] = z.real, z.imag
        return out

    attn, ffn, y = layer.attn, layer.ffn, norm(x, layer.norm_attn)
    n_head, n_kv_head = attn.q.out_features // head_dim, attn.k.out_features // head_dim
    heads = []
    for head in range(n_head):
        shared = head // (n_head // n_kv_head)
        q = y @ attn.q.weight[head * head_dim:][:head_dim].T
        k, v = (y @ w.weight[shared * head_dim:][:head_dim].T for w in (attn.k, attn.v))
        rows = []
        for i in range(len(x)):
            scores = torch.stack([turned(q[i], i) @ turned(k[j], j) for j in range(i + 1)]) / math.sqrt(head_dim)
            rows.append(scores.softmax(0) @ v[:i + 1])
        heads.append(torch.stack(rows))
    x = x + torch.cat(heads, dim=-1) @ attn.o.weight.T
    y = norm(x, layer.norm_ffn)
    gate = y @ ffn.gate.weight.T
    return x + (gate * gate.sigmoid() * (y @ ffn.up.weight.T)) @ ffn.down.weight.T


@pytest.mark.parametrize('n_kv_head', [1, 2, 4])
def test_the_model_equals_its_definition_written_with_loops(n_kv_head):
    scaling = dict(LLAMA31, original_max_position_embeddings=40)
    llama = small(n_kv_head=n_kv_head, rope_theta=100.0, rope_scaling=scaling, norm_eps=0.1)
    frequencies = rope_frequencies(6, 100.0, scaling)
    x, (h, context) = llama.tokens.weight[IDS[0]], llama.embed(IDS[:1])
    for layer in llama.layers:
        x, h = literal_layer(layer, x, frequencies, 6), layer(h, *context)
        torch.testing.assert_close(h[0], x, rtol=1e-4, atol=1e-4)
    x = torch.stack([row / math.sqrt(row.square().mean().item() + 0.1) for row in x]) * llama.norm.weight
    torch.testing.assert_close(llama(IDS[:1])[0], x @ llama.head.weight.T, rtol=1e-4, atol=1e-4)


def test_grouped_queries_are_full_attention_with_repeated_keys_and_values():
    grouped, full = small(n_kv_head=2), small(n_kv_head=4)
    weights = grouped.state_dict()
    for name in weights:
        if name.endswith(('k.weight', 'v.weight')):
            weights[name] = weights[name].view(2, 6, -1).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    mask = torch.ones_like(IDS)
    torch.testing.assert_close(grouped(IDS), full(IDS))
    torch.testing.assert_close(grouped(IDS, mask), full(IDS, mask))


@pytest.mark.parametrize('masked', [False, True])
def test_a_token_sees_itself_and_what_lies_before(masked):
    llama, mask = small(), torch.ones_like(IDS) if masked else None
    changed = IDS.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 50
    before, after = llama(IDS, mask), llama(changed, mask)
    assert torch.equal(before[:, :12], after[:, :12])
    assert ((before - after)[:, 12:].abs().amax(-1) > 1e-3).all()


def test_padding_anywhere_changes_no_logit_of_a_real_token():
    llama, n = small(rope_theta=100.0), IDS.size(1)
    expected = llama(IDS)
    mask = torch.tensor([[0, 0] + 10 * [1, 0] + 10 * [1], 10 * [1] + 12 * [0] + 10 * [1]])       # between real tokens
    ids = torch.full_like(mask, 49).masked_scatter(mask.bool(), IDS)
    torch.testing.assert_close(llama(ids, mask)[mask.bool()], expected.flatten(0, 1), rtol=1e-4, atol=1e-5)
    for left, right in ((0, 0), (7, 0), (0, 7), (3, 4)):
        ids = torch.nn.functional.pad(IDS, (left, right), value=49)
        mask = torch.zeros_like(ids)
        mask[:, left:left + n] = 1
        for kind in (mask, mask.bool()):
            torch.testing.assert_close(llama(ids, kind)[:, left:left + n], expected, rtol=1e-4, atol=1e-5)
        if not left:
            torch.testing.assert_close(llama(ids)[:, :n], expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_padding_alone_gives_numbers_and_gradients():
    llama = small().requires_grad_(True)
    mask = torch.ones_like(IDS)
    mask[0, :5], mask[1] = 0, 0
    logits = llama(IDS, mask)
    logits.square().mean().backward()
    assert logits.isfinite().all() and all(weight.grad.isfinite().all() for weight in llama.parameters())
    _, (cos, _, attend) = llama.embed(IDS, mask)
    assert cos.shape == (2, 1, 20, 3) and attend.shape == (2, 1, 20, 20)
    assert attend[0, 0, 6].tolist() == [5 <= key <= 6 for key in range(20)]
    assert attend[0, 0, 3].tolist() == [key == 3 for key in range(20)]                  # never a row without a key


def test_a_tied_head_is_the_embedding_and_without_head_there_is_none():
    tied, untied, headless = Llama(**SHAPE, tied=True), Llama(**SHAPE), Llama(**SHAPE, tied=True, head=False)
    assert tied.head.weight is tied.tokens.weight and untied.head.weight is not untied.tokens.weight
    assert headless.head is None and set(headless.state_dict()) == set(untied.state_dict()) - {'head.weight'}


def test_training_starts_from_the_seed_and_each_matrix_keeps_the_variance():
    one, two = ((torch.manual_seed(3), Llama(64, 128, 256, 8, 4, 2))[1] for _ in range(2))
    for (name, weight), again in zip(one.named_parameters(), two.parameters()):
        assert torch.equal(weight, again)
        if weight.dim() == 1:
            assert (weight == 1).all()
        else:
            expected = 128 ** -0.5 / (4 if name.endswith(('o.weight', 'down.weight')) else 1)     # 2 x 8 writes
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_heads_that_do_not_fit_are_named():
    for wrong in (dict(n_head=5, n_kv_head=5, head_dim=None), dict(n_kv_head=3), dict(head_dim=5)):
        with pytest.raises(ValueError, match='head'):
            Llama(**{**SHAPE, **wrong})
    assert Llama(**{**SHAPE, 'head_dim': None}).head_dim == 6


# ---- loading

@pytest.mark.parametrize('scaling', [None, LLAMA31], ids=['plain', 'llama3'])
@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
@pytest.mark.parametrize('kind', ['one file', 'shards', 'newer', 'meta'])
def test_what_was_saved_comes_back_to_the_bit(kind, tied, scaling, tmp_path):
    saved = small(tied=tied, rope_theta=1e4, rope_scaling=scaling, norm_eps=1e-3)
    if kind == 'meta':
        meta_folder(tmp_path, saved, tied, scaled=bool(scaling))
    else:
        style = 'newer' if kind == 'newer' else 'classic'
        hf_folder(tmp_path, saved, 3 if kind == 'shards' else 1, tied, scaling, style)
    loaded = load_llama(tmp_path, torch.float32, head=True)
    assert torch.equal(loaded(IDS), saved(IDS))
    assert (loaded.head.weight is loaded.tokens.weight) == tied
    assert (loaded.rope_theta, loaded.rope_scaling) == (1e4, scaling) and loaded.norm.eps == 1e-3
    assert all(weight.requires_grad for weight in loaded.parameters())
    headless = load_llama(tmp_path)
    assert headless.head is None and {weight.dtype for weight in headless.parameters()} == {torch.bfloat16}
    assert set(headless.state_dict()) == set(saved.state_dict()) - {'head.weight'}
    assert torch.equal(headless.tokens.weight, saved.tokens.weight.bfloat16())


def test_the_factor_of_metas_scaling_is_a_key(tmp_path):
    meta_folder(tmp_path, small(), scaled=True)
    assert load_llama(tmp_path).rope_scaling == LLAMA31
    assert load_llama(tmp_path, rope_factor=32.0).rope_scaling == dict(LLAMA31, factor=32.0)


def test_metas_order_of_rows_shows_from_the_second_position_on(tmp_path):
    saved = small(rope_theta=100.0)
    meta_folder(tmp_path, saved)
    torch.save(renamed(saved, META), tmp_path / 'consolidated.00.pth')                # HF's order under Meta's names
    wrong, right = load_llama(tmp_path, torch.float32, head=True)(IDS), saved(IDS)
    torch.testing.assert_close(wrong[:, 0], right[:, 0])
    assert ((wrong - right)[:, 1:].abs().amax(-1) > 1e-3).all()


def test_older_and_barer_folders_load(tmp_path):
    saved = small(n_head=4, n_kv_head=4)
    hf_folder(tmp_path, saved)
    config = json.loads((tmp_path / 'config.json').read_text())
    tensors = load_file(tmp_path / 'model.safetensors')
    del config['num_key_value_heads'], config['tie_word_embeddings']                  # default: as many heads, untied
    config |= dict(head_dim=None, hidden_act='silu', attention_bias=False)
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = torch.zeros(3)          # rebuilt, not read
    (tmp_path / 'config.json').write_text(json.dumps(config))
    save_file({name.removeprefix('model.'): tensor for name, tensor in tensors.items()}, tmp_path / 'model.safetensors')
    assert torch.equal(load_llama(tmp_path, torch.float32, head=True)(IDS), saved(IDS))


def test_a_tied_folder_may_hold_the_head_as_well(tmp_path):
    saved = small(tied=True)
    hf_folder(tmp_path, saved, tied=True)
    with_tensors(tmp_path, **{'lm_head.weight': torch.zeros_like(saved.head.weight)})
    loaded = load_llama(tmp_path, torch.float32, head=True)
    assert loaded.head.weight is loaded.tokens.weight and torch.equal(loaded(IDS), saved(IDS))


MEASURE = """
import os, sys, torch
from model import load_llama

def kilobytes(key):
    return int(next(line for line in open('/proc/self/status') if line.startswith(key)).split()[1])

load_llama(sys.argv[1])
for folder in sys.argv[2:]:
    if os.fork() == 0:                                  # the peak of a new process is its own
        load_llama(sys.argv[1])                         # the libraries that it uses do not count
        before = kilobytes('VmRSS')
        llama = load_llama(folder, head=True)
        assert sum(weight.nbytes for weight in llama.parameters()) > 5e7
        print(1024 * (kilobytes('VmHWM') - before), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_loading_holds_at_most_a_tenth_more_than_the_checkpoint(tmp_path):
    folders = [tmp_path / name for name in ('warm', 'one file', 'shards', 'meta')]
    for folder in folders:
        folder.mkdir()
    hf_folder(folders[0], small())
    large = Llama(12000, 384, 1536, 10, 8, 4).to(torch.bfloat16)
    hf_folder(folders[1], large)
    hf_folder(folders[2], large, shards=3)
    meta_folder(folders[3], large)
    peaks = subprocess.run([sys.executable, '-c', MEASURE, *folders], cwd=ROOT, check=True, capture_output=True,
                           env={**os.environ, 'OMP_NUM_THREADS': '1'}, text=True).stdout.split()
    assert len(peaks) == 3
    for peak, folder in zip(peaks, folders[1:]):
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert 0.9 * size < int(peak) < 1.1 * size, folder.name


# ---- what a folder that does not fit gets

CONFIG = {
    'another architecture': (dict(model_type='mistral'), 'model_type'),
    'no architecture': (dict(model_type=None), 'model_type'),
    'another activation': (dict(hidden_act='gelu'), 'hidden_act'),
    'biases in attention': (dict(attention_bias=True), 'attention_bias'),
    'biases in the ffn': (dict(mlp_bias=True), 'mlp_bias'),
    'no theta': (dict(rope_theta=None), 'rope_theta'),
    'no theta, newer': (dict(rope_theta=None, rope_parameters=dict(rope_type='default')), 'rope_theta'),
    'linear scaling': (dict(rope_scaling=dict(type='linear', factor=2.0)), 'linear'),
    'yarn': (dict(rope_scaling=dict(rope_type='yarn', factor=2.0)), 'yarn'),
    'dynamic, newer': (dict(rope_parameters=dict(rope_type='dynamic', rope_theta=1e4, factor=2.0)), 'dynamic'),
    'half a llama3 scaling': (dict(rope_scaling=dict(rope_type='llama3', factor=8.0)), 'low_freq_factor'),
    'no width': (dict(hidden_size=None), 'hidden_size'),
    'no eps': (dict(rms_norm_eps=None), 'rms_norm_eps'),
    'words for numbers': (dict(num_hidden_layers='two'), 'no Llama'),
    'no key-value heads': (dict(num_key_value_heads=0), 'no Llama'),
    'a negative vocabulary': (dict(vocab_size=-1), 'no Llama'),
    'heads that do not divide': (dict(num_key_value_heads=3), 'heads'),
    'another width': (dict(intermediate_size=41), r'gate_proj.*\(40, 24\).*\(41, 24\)'),
    'more layers': (dict(num_hidden_layers=3), 'layers.2.* absent'),
    'fewer layers': (dict(num_hidden_layers=1), 'layers.1.*expected absent'),
}
FILES = {
    'no folder': (lambda folder: (folder / 'config.json').unlink(), 'no Llama in'),
    'not JSON': (lambda folder: (folder / 'config.json').write_text('{"model_type"'), 'no JSON'),
    'a JSON list': (lambda folder: (folder / 'config.json').write_text('[]'), 'no JSON'),
    'no weights': (lambda folder: (folder / 'model.safetensors').unlink(), 'model.safetensors is missing'),
    'cut short': (lambda folder: (folder / 'model.safetensors').write_bytes(
        (folder / 'model.safetensors').read_bytes()[:-100]), 'model.safetensors is cut short'),
    'a pointer instead of the file': (lambda folder: (folder / 'model.safetensors').write_text('version https://'),
                                      'model.safetensors is cut short'),
    'a tensor less': (lambda folder: with_tensors(folder, **{'model.norm.weight': None}), 'norm.weight is absent'),
    'a tensor more': (lambda folder: with_tensors(folder, extra=torch.ones(1)), 'extra is'),
    'an index of nothing': (lambda folder: (folder / 'model.safetensors.index.json').write_text('{"weight_map": 3}'),
                            'weight_map'),
}


def assert_refused(folder, match, **options):
    with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
        load_llama(folder, head=True, **options)
    message = str(caught.value)
    assert str(folder) in message and '\n' not in message and re.search('expected|download|is no Llama', message)


@pytest.mark.parametrize('case', CONFIG)
def test_a_configuration_beyond_this_model_is_refused_in_one_line(case, tmp_path):
    changes, match = CONFIG[case]
    hf_folder(tmp_path, small())
    edited(tmp_path / 'config.json', **changes)
    assert_refused(tmp_path, match)


@pytest.mark.parametrize('case', FILES)
def test_files_that_are_damaged_or_missing_are_refused_in_one_line(case, tmp_path):
    damage, match = FILES[case]
    hf_folder(tmp_path, small())
    damage(tmp_path)
    assert_refused(tmp_path, match)


def test_a_shard_that_is_missing_or_repeats_another_is_named(tmp_path):
    hf_folder(tmp_path, small(), shards=3)
    second = tmp_path / 'model-1.safetensors'
    good = load_file(second)
    save_file({**good, **dict([next(iter(load_file(tmp_path / 'model-0.safetensors').items()))])}, second)
    assert_refused(tmp_path, 'model-1.safetensors holds .* and so does model-0.safetensors')
    second.unlink()
    assert_refused(tmp_path, 'model-1.safetensors is missing')


def test_metas_folder_is_refused_where_it_is_parallel_incomplete_or_damaged(tmp_path):
    meta_folder(tmp_path, small())
    weights, params = tmp_path / 'consolidated.00.pth', (tmp_path / 'params.json').read_text()
    whole = weights.read_bytes()
    for key in ('dim', 'n_layers', 'n_heads', 'norm_eps', 'rope_theta'):
        edited(tmp_path / 'params.json', **{key: None})
        assert_refused(tmp_path, f'does not say .{key}')
        (tmp_path / 'params.json').write_text(params)
    edited(tmp_path / 'params.json', n_kv_heads=4)
    assert_refused(tmp_path, 'wk.weight is')
    edited(tmp_path / 'params.json', n_kv_heads=2)
    (tmp_path / 'consolidated.01.pth').write_bytes(whole)
    assert_refused(tmp_path, 'in 2 for as many GPUs')
    (tmp_path / 'consolidated.01.pth').unlink()
    torch.save(dict(enumerate(torch.load(weights, weights_only=True).values())), weights)
    assert_refused(tmp_path, 'does not say')
    torch.save({**torch.load(io.BytesIO(whole), weights_only=True), 7: torch.ones(1)}, weights)
    assert_refused(tmp_path, 'does not fit its configuration: 7 is')
    weights.write_bytes(whole[:len(whole) // 2])
    assert_refused(tmp_path, 'consolidated.00.pth is cut short')
    weights.unlink()
    assert_refused(tmp_path, 'consolidated.00.pth is missing')
    assert_refused(tmp_path / 'params.json', 'no Llama in')


def test_metas_frequencies_and_absent_key_value_heads_do_no_harm(tmp_path):
    saved = small(n_kv_head=4)
    meta_folder(tmp_path, saved)
    edited(tmp_path / 'params.json', n_kv_heads=None)
    tensors = torch.load(tmp_path / 'consolidated.00.pth', weights_only=True)
    torch.save({**tensors, 'rope.freqs': torch.zeros(3)}, tmp_path / 'consolidated.00.pth')
    assert torch.equal(load_llama(tmp_path, torch.float32, head=True)(IDS), saved(IDS))
