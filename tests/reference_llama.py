"""Llama against transformers, tokenizers against the library of that name. Not collected by default, since users need
neither library: pip install transformers, then python -m pytest tests/reference_llama.py."""
import itertools
import json
import random

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model import load_llama
from prepare import llama_tokenizer

SCALING = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)      # short, so that all three regimes are among the pairs
COMBINATIONS = list(itertools.product(['grouped', 'one each'], ['tied', 'untied'], ['plain', 'llama3'],
                                      ['classic', 'newer'], ['one file', 'shards']))


def reference(folder, seed, heads, tied, scaling, style, files, meta=False):
    """A transformers Llama of random shape and weights, saved in folder. meta: of a shape that Meta's files can say."""
    draw = random.Random(seed)
    n_kv_head, d_per_head = draw.choice([1, 2, 3]), draw.choice([8, 12, 16])
    n_head = n_kv_head * (draw.choice([2, 3]) if heads == 'grouped' else 1)
    theta = draw.choice([10000.0, 500000.0])
    config = LlamaConfig(
        vocab_size=draw.randint(50, 90), hidden_size=n_head * d_per_head, intermediate_size=draw.randint(20, 90),
        num_hidden_layers=draw.choice([1, 2, 3]), num_attention_heads=n_head, num_key_value_heads=n_kv_head,
        head_dim=d_per_head if meta else draw.choice([8, 16]), rms_norm_eps=draw.choice([1e-5, 1e-6]),
        tie_word_embeddings=tied == 'tied',
        rope_parameters={'rope_theta': theta, **(SCALING if scaling == 'llama3' else {'rope_type': 'default'})})
    torch.manual_seed(seed)
    llama = LlamaForCausalLM(config).eval()
    for weight in llama.parameters():         # larger than at the start of training: every part shows in the sums
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)
    llama.save_pretrained(folder, max_shard_size='4KB' if files == 'shards' else '1GB')
    assert (folder / 'model.safetensors.index.json').exists() == (files == 'shards')
    saved = json.loads((folder / 'config.json').read_text())
    assert 'rope_parameters' in saved
    if style == 'classic':
        saved.pop('rope_parameters')
        saved |= dict(rope_theta=theta, rope_scaling=SCALING if scaling == 'llama3' else None)
        (folder / 'config.json').write_text(json.dumps(saved))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compare(ours, theirs, seed):
    """Every layer's output and the logits of real tokens, for padding on either side and for none."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(theirs.config.vocab_size, (3, 50), generator=g)
    for padding in (None, 'left', 'right'):
        mask = torch.ones_like(ids)
        for row, n in enumerate([0, 9, 30] if padding else []):
            mask[row, :n] = 0
        if padding == 'right':
            mask = mask.flip(1)
        with torch.no_grad():
            expected = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                              output_hidden_states=True)
            h, context = ours.embed(ids, mask if padding else None)
            states = [h]
            for layer in ours.layers:
                states.append(layer(states[-1], *context))
            states[-1] = ours.norm(states[-1])           # transformers gives the last layer's output after the norm
            states.append(ours(ids, mask if padding else None))
        assert len(states) == len(expected.hidden_states) + 1
        for state, target in zip(states, [*expected.hidden_states, expected.logits]):
            real = mask.bool()
            assert target[real].std() > 0.1
            torch.testing.assert_close(state[real], target[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize('seed, combination', list(enumerate(COMBINATIONS)), ids=map(', '.join, COMBINATIONS))
def test_hidden_states_and_logits_equal_transformers(seed, combination, tmp_path):
    theirs = reference(tmp_path, seed, *combination)
    compare(load_llama(tmp_path, torch.float32, head=True), theirs, seed)


# Meta's names, by HF's
META = {'model.embed_tokens': 'tok_embeddings', 'model.norm': 'norm', 'lm_head': 'output', 'model.layers': 'layers',
        'self_attn.q_proj': 'attention.wq', 'self_attn.k_proj': 'attention.wk', 'self_attn.v_proj': 'attention.wv',
        'self_attn.o_proj': 'attention.wo', 'input_layernorm': 'attention_norm', 'mlp.gate_proj': 'feed_forward.w1',
        'mlp.down_proj': 'feed_forward.w2', 'mlp.up_proj': 'feed_forward.w3', 'post_attention_layernorm': 'ffn_norm'}


@pytest.mark.parametrize('seed, combination', list(enumerate(COMBINATIONS[::4])), ids=map(', '.join, COMBINATIONS[::4]))
def test_a_meta_checkpoint_of_the_same_weights_equals_transformers(seed, combination, tmp_path, monkeypatch):
    monkeypatch.setitem(SCALING, 'original_max_position_embeddings', 8192)         # Meta's files cannot say another
    theirs = reference(tmp_path / 'hf', seed, *combination, meta=True)
    config, tensors = theirs.config, {}
    for name, weight in theirs.state_dict().items():
        if name.endswith(('q_proj.weight', 'k_proj.weight')):          # of a head's rows, i + j half becomes 2 i + j
            weight = weight.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).flatten(0, 2)
        for part, metas in META.items():
            name = name.replace(part, metas)
        tensors[name] = weight.clone()
    if config.tie_word_embeddings:
        del tensors['output.weight']
    torch.save(tensors, tmp_path / 'consolidated.00.pth')
    scaled = config.rope_parameters['rope_type'] == 'llama3'
    (tmp_path / 'params.json').write_text(json.dumps(dict(
        dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size, multiple_of=1,
        norm_eps=config.rms_norm_eps, rope_theta=config.rope_parameters['rope_theta'], use_scaled_rope=scaled)))
    compare(load_llama(tmp_path, torch.float32, head=True), theirs, seed)
    if scaled:                           # the factor is what the file does not say: another one is another model
        with pytest.raises(AssertionError):
            compare(load_llama(tmp_path, torch.float32, head=True, rope_factor=2), theirs, seed)


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r'\s*[\r\n]+|\s+(?!\S)|\s+')
SPLITS = {
    'gpt2': [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    'digits': [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    'llama3': [pre_tokenizers.Split(tokenizers.Regex(LLAMA3), 'isolated'),
               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    'gaps': [pre_tokenizers.Split(tokenizers.Regex(r'\p{L}+|\d'), 'isolated'),
             pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
}
SPECIAL = ['<|begin_of_text|>', '<|end_of_text|>', '<|pad|>']
TEXTS = [
    "The cat isn't here; it's THEY'LL we'Ve 'round.", '  two  spaces\tand\n\n\nlines \r\n ', '', ' ', '\n',
    'x1y22z333 4444  55555   6',
    'na\u00efve caf\u00e9 \u2014 \u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f468\u200d\U0001f469',
    '\u0660\u0661 \u2163 \u00bd \u00a0\u3000 \x00\x7f\xad e\u0301 ...!?#$ --->', 'aaaaaaa aaa aaaa banana bananas',
    '<|begin_of_text|>not <|end_of_text|> special<|pad|>']


def trained(split, **options):
    """A byte-level tokenizer of the library, trained on a few texts; options go to its model."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text for text in TEXTS if '<|' not in text] * 3, trainer)
    return tokenizer


def random_texts(n=300):
    draw = random.Random(0)
    parts = [*'abcinTHE  \n\t1234567.,!?-\u00e9\u4f60\U0001f600', "'s", "'LL", 'banana', 'the ', ' cat', '  ',
             '<|pad|>', '\r\n']
    return [''.join(draw.choices(parts, k=draw.randint(1, 40))) for _ in range(n)]


@pytest.mark.parametrize('merges', ['pairs', 'strings'])
@pytest.mark.parametrize('split', SPLITS)
@pytest.mark.parametrize('ids', ['ranks', 'shuffled'])
@pytest.mark.parametrize('whole', ['merges', 'ignore_merges'])
def test_a_byte_level_tokenizer_equals_the_library(merges, split, ids, whole, tmp_path):
    content = json.loads(trained(split).to_str())
    vocab = content['model']['vocab']
    if whole == 'ignore_merges':                           # a word that no merge makes
        content['model']['ignore_merges'] = True
        vocab['zebra'] = len(vocab)
    if ids == 'shuffled':                                  # all but the special ones
        others = list(vocab.values())[len(SPECIAL):]
        random.Random(1).shuffle(others)
        vocab |= dict(zip(list(vocab)[len(SPECIAL):], others))
    pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in content['model']['merges']]
    content['model']['merges'] = [' '.join(pair) for pair in pairs] if merges == 'strings' else pairs
    content['post_processor'] = json.loads(processors.TemplateProcessing(
        single='<|begin_of_text|> $A', special_tokens=[('<|begin_of_text|>', 0)]).__getstate__())
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    theirs, ours = tokenizers.Tokenizer.from_str(json.dumps(content)), llama_tokenizer(tmp_path)
    theirs.encode_special_tokens = True                    # special strings are text
    assert ours.begin == 0 and ours.eot == 1 and ours.vocab_size == len(vocab)
    for text in [*TEXTS, *random_texts(), 'zebra', 'zebras']:
        expected = theirs.encode(text).ids
        assert [ours.begin] + ours.encode(text) == expected, text
        assert ours.decode(expected[1:]) == text
    assert (len(ours.encode('zebra')) == 1) == (whole == 'ignore_merges')
