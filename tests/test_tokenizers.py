"""A Llama's tokenizer from Meta's file or HF's: ids, special tokens, and what a file beyond it gets. The comparison
with the tokenizers library is in reference_llama.py."""
import base64
import json
import re

import pytest

from prepare import get_tokenizer, llama_tokenizer

# how tokenizer.json writes the bytes 0 to 255, and merges in that writing: U+0120 is a space
LETTERS = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else '' for b in range(256)]
HIDDEN = iter(range(256, 512))
LETTERS = [letter or chr(next(HIDDEN)) for letter in LETTERS]
SPACE = LETTERS[32]
MERGES = [('t', 'h'), ('th', 'e'), (SPACE, 'the'), (SPACE, 'c'), ('a', 't'), (SPACE + 'c', 'at'), (SPACE, '1'),
          ('1', '2'), (SPACE, SPACE), ('\u00c3', '\u00a9')]        # the last is e with an acute accent, in UTF-8
TOKENS = LETTERS + [a + b for a, b in MERGES]
BYTE_LEVEL = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=True)
DIGITS = dict(type='Sequence', pretokenizers=[dict(type='Digits', individual_digits=True), BYTE_LEVEL])


def split_by(regex, **options):
    split = dict(type='Split', pattern=dict(Regex=regex), behavior='Isolated', invert=False) | options
    return dict(type='Sequence', pretokenizers=[split, dict(BYTE_LEVEL, use_regex=False)])


def as_bytes(token):
    return bytes(LETTERS.index(letter) for letter in token)


def meta_file(folder):
    lines = [base64.b64encode(as_bytes(token)).decode() + f' {rank}' for rank, token in enumerate(TOKENS)]
    (folder / 'tokenizer.model').write_text('\n'.join(lines) + '\n')
    return folder


def hf_file(folder, config=None, model=None, **changes):
    """A tokenizer.json as HF writes it: special tokens first, one of them also in the vocabulary, and a post-processor
    that adds begin. config becomes tokenizer_config.json."""
    special = ['<|endoftext|>', '<|user|>', '<|pad|>']
    content = dict(
        version='1.0', normalizer=None, pre_tokenizer=BYTE_LEVEL, decoder=BYTE_LEVEL,
        added_tokens=[dict(id=i, content=text, special=True, normalized=False) for i, text in enumerate(special)],
        post_processor=dict(type='TemplateProcessing', single=[dict(SpecialToken=dict(id='<|endoftext|>', type_id=0))]),
        model=dict(type='BPE', vocab={token: i for i, token in enumerate(special[:1] + ['@1', '@2'] + TOKENS)},
                   merges=[list(pair) for pair in MERGES], ignore_merges=False) | (model or {}))
    for unused in ('@1', '@2'):
        content['model']['vocab'].pop(unused, None)
    (folder / 'tokenizer.json').write_text(json.dumps(content | changes))
    if config is not None:
        (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return folder


def pieces(tokenizer, text):
    """The text cut into its tokens."""
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_metas_file_has_its_ranks_as_ids_and_256_special_ids_after_them(tmp_path):
    tokenizer, n = llama_tokenizer(meta_file(tmp_path)), len(TOKENS)
    assert tokenizer.encode('the cat') == [TOKENS.index('the'), TOKENS.index(SPACE + 'cat')]
    assert (tokenizer.begin, tokenizer.eot, tokenizer.pad, tokenizer.vocab_size) == (n, n + 1, n + 4, n + 256)
    assert tokenizer.decode([n, *tokenizer.encode(' the')]) == '<|begin_of_text|> the'
    assert pieces(tokenizer, 'x123412') == ['x', '12', '3', '4', '12']       # three digits and three, not all or one
    assert pieces(tokenizer, '12121') == ['12', '1', '2', '1']


def test_hfs_file_gives_the_same_from_merges_as_strings_and_as_pairs(tmp_path):
    texts = ['the cat', ' the  the', 'na\u00efve caf\u00e9 \U0001f600\n', '<|endoftext|>', '121 12']
    pairs = llama_tokenizer(hf_file(tmp_path))
    expected = [pairs.encode(text) for text in texts]
    strings = llama_tokenizer(hf_file(tmp_path, model=dict(merges=[' '.join(pair) for pair in MERGES])))
    assert [strings.encode(text) for text in texts] == expected
    assert expected[0] == [3 + TOKENS.index('the'), 3 + TOKENS.index(SPACE + 'cat')]
    assert pieces(pairs, 'caf\u00e9') == ['c', 'a', 'f', '\u00e9']
    assert pairs.vocab_size == 3 + len(TOKENS)


@pytest.mark.parametrize('write', [meta_file, hf_file])
def test_every_byte_comes_back_and_special_strings_are_text(write, tmp_path):
    tokenizer = llama_tokenizer(write(tmp_path))
    text = ''.join(map(chr, range(0x250)))
    text += ' \u4f60\u597d \U0001f600\r\n\t  <|begin_of_text|><|endoftext|>\u2028<|pad|> '
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    special = {tokenizer.begin, tokenizer.eot, tokenizer.pad}
    assert not special & set(ids) and tokenizer.encode('') == []
    assert pieces(tokenizer, '<|endoftext|>') == list('<|endoftext|>')


def test_a_special_string_is_text_even_where_it_is_a_whole_piece(tmp_path):
    vocab = {'<|endoftext|>': 0} | {token: 3 + i for i, token in enumerate(TOKENS)}
    tokenizer = llama_tokenizer(hf_file(tmp_path, model=dict(vocab=vocab, ignore_merges=True),
                                        pre_tokenizer=split_by('.+')))
    assert pieces(tokenizer, '<|endoftext|>') == list('<|endoftext|>')


def test_an_id_need_not_be_a_rank(tmp_path):
    """'the' is th e by the first merges; the vocabulary's order, backwards here, would begin with he."""
    merges = [('t', 'h'), ('h', 'e'), ('th', 'e')]
    tokens = LETTERS + ['the', 'he', 'th']
    vocab = {token: 3 + i for i, token in enumerate(tokens)}
    tokenizer = llama_tokenizer(hf_file(tmp_path, model=dict(vocab=vocab, merges=merges)))
    assert tokenizer.encode('the') == [vocab['the']]
    assert tokenizer.encode('athe') == [vocab['a'], vocab['the']]
    assert tokenizer.encode('het') == [vocab['he'], vocab['t']]


def test_a_token_without_a_merge_is_a_whole_piece_where_the_file_says_so_and_nothing_else(tmp_path):
    vocab = {token: 3 + i for i, token in enumerate(TOKENS + ['zoo', 'oz'])}
    with_it = llama_tokenizer(hf_file(tmp_path, model=dict(vocab=vocab, ignore_merges=True)))
    assert pieces(with_it, 'zoo') == ['zoo'] and with_it.vocab_size == 3 + len(TOKENS) + 2
    without = llama_tokenizer(hf_file(tmp_path, model=dict(vocab=vocab)))
    assert pieces(without, 'zoo') == ['z', 'o', 'o']


def test_text_is_cut_before_it_is_merged(tmp_path):
    def cut(pre_tokenizer, text):
        return pieces(llama_tokenizer(hf_file(tmp_path, pre_tokenizer=pre_tokenizer)), text)

    assert cut(BYTE_LEVEL, 'a 12') == ['a', ' 1', '2'] and cut(BYTE_LEVEL, 'a12') == ['a', '12']
    assert cut(BYTE_LEVEL, 'a  12') == ['a', ' ', ' 1', '2']
    assert cut(DIGITS, 'a 12') == ['a', ' ', '1', '2'] and cut(DIGITS, 'a12') == ['a', '1', '2']
    assert cut(DIGITS, 'a  12  the') == ['a', '  ', '1', '2', ' ', ' the']      # white space before a digit is whole
    assert cut(dict(type='Sequence', pretokenizers=[BYTE_LEVEL]), 'a 12') == ['a', ' 1', '2']
    assert cut(split_by(r't|h|\d'), 'the 12the') == ['t', 'h', 'e', ' ', '1', '2', 't', 'h', 'e']
    assert cut(split_by('c'), 'the cat  the') == ['the', ' ', 'c', 'at', ' ', ' the']          # nothing between is lost


@pytest.mark.parametrize('config, names', [
    (None, ('<|endoftext|>', '<|endoftext|>', '<|endoftext|>')),
    (dict(bos_token=None, eos_token='<|user|>'), ('<|endoftext|>', '<|user|>', '<|user|>')),
    (dict(bos_token='<|user|>', eos_token=dict(content='<|endoftext|>'), pad_token=dict(content='<|pad|>')),
     ('<|user|>', '<|endoftext|>', '<|pad|>'))])
def test_begin_end_and_padding_are_what_the_folder_names(config, names, tmp_path):
    ids = {'<|endoftext|>': 0, '<|user|>': 1, '<|pad|>': 2}
    tokenizer = llama_tokenizer(hf_file(tmp_path, config))
    assert (tokenizer.begin, tokenizer.eot, tokenizer.pad) == tuple(ids[name] for name in names)


def test_llama3s_names_are_known(tmp_path):
    names = ['<|begin_of_text|>', '<|end_of_text|>', '<|finetune_right_pad_id|>']
    added = [dict(id=1000 + i, content=name, special=True) for i, name in enumerate(names)]
    tokenizer = llama_tokenizer(hf_file(tmp_path, added_tokens=added))
    assert (tokenizer.begin, tokenizer.eot, tokenizer.pad, tokenizer.vocab_size) == (1000, 1001, 1002, 1003)


def test_a_byte_that_the_vocabulary_lacks_is_an_error_that_names_it(tmp_path):
    vocab = {token: 3 + i for i, token in enumerate(TOKENS) if token not in ('#', LETTERS[0xf0])}
    tokenizer = llama_tokenizer(hf_file(tmp_path, model=dict(vocab=vocab)))
    assert pieces(tokenizer, 'the \u00e9') == ['the', ' ', '\u00e9']
    for text, byte in (('the cat # 1', '0x23'), ('smile \U0001f600', '0xf0')):
        with pytest.raises(ValueError, match=byte) as caught:
            tokenizer.encode(text)
        assert str(tmp_path) in str(caught.value)


def test_hfs_file_is_read_where_there_are_both(tmp_path):
    assert llama_tokenizer(hf_file(meta_file(tmp_path))).vocab_size == 3 + len(TOKENS)


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


REFUSED = {
    'nothing there': (lambda folder: None, 'no tokenizer in'),
    'SentencePiece, Meta': (write('tokenizer.model', b'\n\x0e\n\x05<unk>\x15\x00\x00\x18\x02'), 'SentencePiece'),
    'cut short': (write('tokenizer.model', 'IQ== 0\nIg='), "tiktoken's format"),
    'ranks with a hole': (write('tokenizer.model', 'IQ== 0\nIg== 2\n'), 'ranks'),
    'a token twice': (write('tokenizer.model', 'IQ== 0\nIQ== 1\n'), 'ranks'),
    'an empty file': (write('tokenizer.model', ''), 'ranks'),
    'SentencePiece, HF': (lambda folder: hf_file(folder, pre_tokenizer=None), 'SentencePiece'),
    'unigram': (lambda folder: hf_file(folder, model=dict(type='Unigram')), 'SentencePiece'),
    'metaspace': (lambda folder: hf_file(folder, pre_tokenizer=dict(type='Metaspace')), 'SentencePiece'),
    'not JSON': (write('tokenizer.json', '{"model":'), 'tokenizer.json is no JSON'),
    'no model': (write('tokenizer.json', '{}'), 'damaged'),
    'a list': (write('tokenizer.json', '[]'), 'damaged'),
    'a merge of strangers': (lambda folder: hf_file(folder, model=dict(merges=[['z', 'z']])), "damaged .*'zz'"),
    'a normalizer': (lambda folder: hf_file(folder, normalizer=dict(type='NFC')), 'normalizer'),
    'a space in front': (lambda folder: hf_file(folder, pre_tokenizer=dict(BYTE_LEVEL, add_prefix_space=True)),
                         'add_prefix_space'),
    'a suffix': (lambda folder: hf_file(folder, model=dict(end_of_word_suffix='</w>')), 'suffix'),
    'no cutting': (lambda folder: hf_file(folder, pre_tokenizer=dict(BYTE_LEVEL, use_regex=False)), 'cuts text'),
    'digits in runs': (lambda folder: hf_file(folder, pre_tokenizer=dict(type='Sequence', pretokenizers=[
        dict(type='Digits', individual_digits=False), BYTE_LEVEL])), 'cuts text .*Digits then ByteLevel'),
    'pieces removed': (lambda folder: hf_file(folder, pre_tokenizer=split_by('c', behavior='Removed')), 'cuts text'),
    'an inverted split': (lambda folder: hf_file(folder, pre_tokenizer=split_by('c', invert=True)), 'cuts text'),
    'a broken regex': (lambda folder: hf_file(folder, pre_tokenizer=split_by('(')), 'tokenizer.json: Parsing'),
    'no begin': (lambda folder: hf_file(folder, added_tokens=[]), 'bos_token is None'),
    'no end': (lambda folder: hf_file(folder, dict(bos_token='<|user|>'), added_tokens=[
        dict(id=1, content='<|user|>', special=True)]), 'eos_token is None'),
    'an unknown pad': (lambda folder: hf_file(folder, dict(pad_token='<|what|>')), "pad_token is '<.what.>'"),
    'an id as text': (lambda folder: hf_file(folder, model=dict(vocab=dict(a='1', b=2), merges=[])), "id is '1'"),
    'a negative id': (lambda folder: hf_file(folder, model=dict(vocab=dict(a=1, b=-2), merges=[])), 'id is -2'),
    'a special id of null': (lambda folder: hf_file(folder, added_tokens=[
        dict(id=i, content=name) for i, name in ((1, '<|begin_of_text|>'), (2, '<|end_of_text|>'), (None, 'x'))]),
        'id is None'),
    'damaged names': (lambda folder: write('tokenizer_config.json', '{')(hf_file(folder)), 'config.json is no JSON'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(case, tmp_path):
    damage, match = REFUSED[case]
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=match) as caught:
        llama_tokenizer(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message and '\n' not in message
    assert re.search('expected|download|not supported|Parsing error at position', message)


def test_gpt2s_vocabulary_written_as_tokenizer_json_equals_gpt2(shared, tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data/tiktoken_cache'))
    import tiktoken
    ranks = tiktoken.get_encoding('gpt2')._mergeable_ranks
    written = {piece: ''.join(LETTERS[byte] for byte in piece) for piece in ranks}
    merges = [(written[piece[:i]], written[piece[i:]]) for piece in ranks for i in range(1, len(piece))
              if piece[:i] in ranks and piece[i:] in ranks]
    model = dict(vocab={written[piece]: rank for piece, rank in ranks.items()}, merges=merges)
    added = [dict(id=50256, content='<|endoftext|>', special=True)]
    ours, theirs = llama_tokenizer(hf_file(tmp_path, model=model, added_tokens=added)), get_tokenizer('gpt2')
    text = (shared / 'data/english_val.txt').read_text(encoding='utf-8')[:200_000] + '<|endoftext|>'
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.vocab_size, ours.eot, ours.begin) == (50257, 50256, 50256)
