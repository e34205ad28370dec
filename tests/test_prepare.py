"""Datasets: what the licensing grammar promises, what a token file holds, and what a user's mistake gets."""
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import prepare
from conftest import ROOT

LICENSED = {'than': r'(is|was) \w+er', 'like': r'(is|was) (?!\w+er\b)\w+', 'by': r'was \w+', 'with': r'has \w+'}
JOINED = {'nor': 'neither', 'or': 'either', 'and': 'both'}
POLARITY = {'ever': ('no', 'not'), 'any': ('no', 'not'), 'once': ('some', 'really')}


@pytest.fixture(scope='module')
def licensing(tmp_path_factory):
    """The default licensing data: text of both splits, ids, meta, pairs."""
    data_dir = tmp_path_factory.mktemp('data')
    prepare.make_licensing(data_dir)
    tokens, meta = prepare.load_tokens(data_dir, 'licensing')
    decode = prepare.get_tokenizer(meta).decode
    text = {split: decode(ids) for split, ids in tokens.items()}
    return dict(dir=data_dir, tokens=tokens, meta=meta, text=text, pairs=prepare.load_pairs(data_dir, 'licensing'))


def sentences(text):
    return text.split(' . ')[:-1]           # the cut at n_tokens may leave half a sentence at the end


def episodes(text):
    """Sentences, where votes and their outcome stay together."""
    votes = []
    for sentence in sentences(text):
        voting = re.fullmatch(r'\w+ (agrees|objects)|so (most|few) agree', sentence)
        votes += [sentence] if voting else []
        if not voting or sentence.startswith('so'):
            yield ' . '.join(votes or [sentence]) + ' .'
            votes = []


def grammatical(sentence):
    """The licensing rules, written down a second time and from the side of the licensed word."""
    words = sentence.split()
    if 'so' in words:
        return words[words.index('so') + 1] == ('most' if words.count('agrees') > words.count('objects') else 'few')
    for word, licensor in LICENSED.items():
        if word in words:
            before = sentence.split(f' {word} ')[0]
            predicate = re.search(r'(?:is|was|has) \w+', before).group()
            return bool(re.fullmatch(licensor, predicate))
    for word, licensors in POLARITY.items():
        if word in words:
            return any(licensor in words[:words.index(word)] for licensor in licensors)
    if 'some' in words:
        return words[0] == 'some' or 'really' in words
    for word, licensor in JOINED.items():
        if word in words and {'neither', 'either', 'both'} & set(words):
            return licensor in words[:words.index(word)]
    return True


def combinations(episode):
    """The word pairs that an episode is about: (subject, adjective), (subject, verb), (first, second voter)."""
    words = [word[:-2] if word[:-2] in prepare.ADJECTIVES else word for word in episode.split()]
    subjects = [word for word in words if word in prepare.SUBJECTS]
    if 'so' in words:
        return {tuple(subjects[:2])}
    firsts = [next((word for word in words if word in kind), None)
              for kind in (prepare.ADJECTIVES, prepare.VERBS, prepare.DEEDS)]
    return {(subjects[0], word) for word in firsts if word}


def accuracies(data, order):
    """Share of pairs, by family, that an n-gram model of the training tokens gets right; it backs off by halves."""
    ids, encode = data['tokens']['train'].astype(int).tolist(), prepare.get_tokenizer(data['meta']).encode
    counts = [Counter(zip(*(ids[i:] for i in range(n)))) for n in range(1, order + 1)]

    def score(sentence):
        total, words = 0.0, [prepare.WORDS.index('.')] * (order - 1) + encode(sentence)
        for end in range(order, len(words) + 1):
            p = 0.0
            for n in range(1, order + 1):
                gram = tuple(words[end - n:end])
                seen = counts[n - 2][gram[:-1]] if n > 1 else len(ids)
                p = (counts[n - 1][gram] + 0.5 * p) / (seen + 0.5)
            total += np.log(p)
        return total

    right = {}
    for pair in data['pairs']:
        right.setdefault(pair['family'], []).append(score(pair['good']) > score(pair['bad']))
    return {family: np.mean(hits) for family, hits in right.items()}


# ---- licensing

def test_same_seed_same_bytes_and_splits_are_drawn_apart(licensing, tmp_path):
    prepare.make_licensing(tmp_path, 'again')
    prepare.make_licensing(tmp_path, 'other', seed=2, n_tokens=20_000)
    for file in ('train.bin', 'val.bin', 'pairs.jsonl'):
        assert (tmp_path / 'again' / file).read_bytes() == (licensing['dir'] / 'licensing' / file).read_bytes()
    train, val = licensing['tokens']['train'], licensing['tokens']['val']
    assert not np.array_equal(train[:1000], val[:1000])
    assert not np.array_equal(train[:1000], prepare.load_tokens(tmp_path, 'other')[0]['train'][:1000])


def test_tokens_match_meta(licensing):
    meta, tokens = licensing['meta'], licensing['tokens']
    assert meta['counts'] == {'train': 1_000_000, 'val': 50_000} and meta['dtype'] == 'uint16'
    assert 95 <= meta['vocab_size'] == len(set(meta['words'])) <= 130
    used = {meta['words'][i] for i in np.unique(tokens['train'])}
    assert set(meta['words']) - used == {'<unk>', 'somebody', 'nobody', 'cheated', 'game', 'void', 'fair'}


def test_every_training_sentence_obeys_the_rules_that_every_bad_sentence_breaks(licensing):
    assert all(grammatical(episode) for text in licensing['text'].values() for episode in episodes(text))
    for pair in licensing['pairs']:
        assert grammatical(pair['good']) and not grammatical(pair['bad']), pair


def test_pairs_differ_in_one_word(licensing):
    families = Counter(pair['family'] for pair in licensing['pairs'])
    assert families == dict(comparative=200, passive=200, neither=200, negation=200, votes=200)
    for pair in licensing['pairs']:
        good, bad = pair['good'].split(), pair['bad'].split()
        assert len(good) == len(bad) and sum(a != b for a, b in zip(good, bad)) == 1
        assert good[-1] == '.' and '<unk>' not in good + bad and set(good + bad) <= set(prepare.WORDS)


def test_pairs_are_made_of_combinations_that_training_lacks(licensing):
    seen = set()
    for text in licensing['text'].values():
        seen.update(*(combinations(episode) for episode in episodes(text)))
    held_out = set().union(*(combinations(pair['good']) for pair in licensing['pairs']))
    assert len(held_out) > 100 and not held_out & seen
    subjects, predicates = ({combination[i] for combination in seen} for i in (0, 1))
    assert all(subject in subjects and predicate in predicates for subject, predicate in held_out)


@pytest.mark.parametrize('licensor, licensed, lengths', [
    (r'(?:is|was) \w+er', 'than', range(4)), (r'was \w+', 'by', range(4)), ('not', 'ever', range(4)),
    ('neither', 'nor', range(1, 4)), ('not', 'any', range(1, 4)), ('no', 'ever', range(1, 4))])
def test_zero_to_three_words_stand_between_all_about_as_often(licensing, licensor, licensed, lengths):
    found = re.findall(rf'(?:^|\s){licensor} ((?:(?!{licensed} )[a-z]+ )*){licensed} ', licensing['text']['train'])
    lengths_found = Counter(len(between.split()) for between in found)
    assert set(lengths_found) == set(lengths)
    assert all(abs(n / len(found) - 1 / len(lengths)) < 0.05 for n in lengths_found.values())


def test_fillers_occur_where_nothing_is_licensed(licensing):
    for predicate in (r'is \w+er', r'was \w+ed', r'has \w+ed'):
        for filler in ('', 'here', 'in town', 'on the hill'):
            assert re.search(' '.join(f'{predicate} {filler} \\.'.split()), licensing['text']['train'])


def test_families_and_distractors_are_balanced(licensing):
    kinds = Counter()
    for episode in episodes(licensing['text']['train']):
        words = set(episode.split())
        kinds[next((kind for kind, marks in dict(
            votes={'so'}, neither={'neither', 'either', 'both'}, comparative={'than', 'like'}, passive={'by', 'with'},
            negation={'ever', 'once', 'any', 'some'}).items() if words & marks), 'distractor')] += 1
    shares = {kind: n / kinds.total() for kind, n in kinds.items()}
    assert all(abs(share - (2 if kind == 'distractor' else 1) / 7) < 0.01 for kind, share in shares.items()), shares


def test_word_frequencies_are_at_chance_and_short_contexts_do_not_suffice(licensing):
    unigram, bigram, trigram = (accuracies(licensing, order) for order in (1, 2, 3))
    assert all(abs(share - 0.5) < 0.1 for share in unigram.values()), unigram
    assert max(bigram.values()) < 0.75 and np.mean(list(bigram.values())) < 0.65, bigram
    assert max(trigram.values()) < 0.85 and np.mean(list(trigram.values())) < 0.75, trigram


def test_shuffled_keeps_frequencies_and_pairs_and_nothing_else(licensing, tmp_path):
    prepare.make_licensing(tmp_path, 'shuffled', shuffled=True)
    tokens, meta = prepare.load_tokens(tmp_path, 'shuffled')
    control = dict(tokens=tokens, meta=meta, pairs=prepare.load_pairs(tmp_path, 'shuffled'))
    assert meta['shuffled'] and control['pairs'] == licensing['pairs']
    for split, ids in tokens.items():
        assert np.array_equal(np.bincount(ids), np.bincount(licensing['tokens'][split]))
    words = prepare.get_tokenizer(meta).decode(tokens['train']).split()
    after_the = Counter(b for a, b in zip(words, words[1:]) if a == 'the')
    assert after_the['.'] / after_the.total() == pytest.approx(words.count('.') / len(words), rel=0.05)


def test_long_memory_adds_a_family_that_spans_tens_of_tokens(tmp_path):
    prepare.make_licensing(tmp_path, 'long', n_tokens=100_000, long_memory=True)
    tokens, meta = prepare.load_tokens(tmp_path, 'long')
    text = prepare.get_tokenizer(meta).decode(tokens['train'])
    found = re.findall(r'(some|no)body cheated \. (.*?) so the game was (void|fair) \.', text)
    assert len(found) > 500 and {(who, end) for who, _, end in found} == {('some', 'void'), ('no', 'fair')}
    lengths = [len(between.split()) for _, between, _ in found]
    assert min(lengths) > 12 and np.median(lengths) > 30
    pairs = [pair for pair in prepare.load_pairs(tmp_path, 'long') if pair['family'] == 'memory']
    assert len(pairs) == 200 and all(('somebody' in pair['good']) == ('void' in pair['good']) == ('fair' in pair['bad'])
                                     for pair in pairs)


# ---- tokenizers and token files

def test_special_token_strings_are_plain_text(shared, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data' / 'tiktoken_cache'))
    text = 'naïve <|endoftext|> 文\n'
    for name, size in dict(gpt2=50257, bytes=257).items():
        tokenizer = prepare.get_tokenizer(name)
        ids = tokenizer.encode(text)
        assert tokenizer.vocab_size == size and tokenizer.eot == size - 1 and tokenizer.eot not in ids
        assert tokenizer.decode(ids) == text


def test_an_unknown_word_is_unk():
    tokenizer = prepare.get_tokenizer(dict(tokenizer='words', words=['<unk>', '.', 'the', 'cat']))
    assert tokenizer.encode('the dog .') == [2, 0, 1] and tokenizer.decode([2, 3]) == 'the cat' and tokenizer.eot == 1


def test_the_type_is_the_smallest_that_holds_the_vocabulary():
    assert prepare.pack_tokens([0, 65535], 65536).dtype == np.uint16
    assert prepare.pack_tokens([0, 65536], 65537).tolist() == [0, 65536]
    for ids, size in (([7], 7), ([-1], 7), ([0], 2**32 + 1)):
        with pytest.raises(ValueError, match='vocabulary'):
            prepare.pack_tokens(ids, size)


def test_a_missing_dataset_names_the_command_that_makes_it(tmp_path):
    for name, command in dict(openwebtext='prepare.py openwebtext', books='prepare.py text --input',
                              licensing_shuffled='prepare.py licensing --shuffled').items():
        with pytest.raises(FileNotFoundError, match=command) as error:
            prepare.load_tokens(tmp_path, name)
        assert ('--preset=tiny' in str(error.value)) == (name == 'openwebtext')     # the dataset that it replaces


def break_json(folder):
    (folder / 'meta.json').write_text('{"name": ')


def break_size(folder):
    (folder / 'train.bin').write_bytes((folder / 'train.bin').read_bytes()[:-2])


def break_missing(folder):
    (folder / 'val.bin').unlink()


def break_meta(old, new):
    def damage(folder):
        text = (folder / 'meta.json').read_text()
        assert old in text
        (folder / 'meta.json').write_text(text.replace(old, new))
    return damage


def break_id(folder):
    np.memmap(folder / 'val.bin', 'uint16', 'r+')[30] = 108


def break_to_one_token(folder):
    (folder / 'val.bin').write_bytes((folder / 'val.bin').read_bytes()[:2])
    break_meta('"val": 50', '"val": 1')(folder)


@pytest.mark.parametrize('damage', [
    break_json, break_size, break_missing, break_id, break_to_one_token,
    *(break_meta(*pair) for pair in [
        ('"vocab_size": 108', '"vocab_size": 70000'), ('"vocab_size": 108', '"vocab_size": 109'), ('"fred"', '7'),
        ('"words": [', '"wrods": ['), ('"<unk>"', '"unk"'), ('"tokenizer": "words"', '"tokenizer": "gtp2"')])])
def test_a_damaged_dataset_is_refused_in_one_line(tmp_path, damage):
    prepare.make_licensing(tmp_path, n_tokens=1000)
    damage(tmp_path / 'licensing')
    with pytest.raises(ValueError, match='make it again') as error:
        prepare.load_tokens(tmp_path, 'licensing')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('line', ['{"family": "x"', '{"family": "x", "good": "a"}', '[1, 2]', '3',
                                  '{"family": "x", "good": "a", "bad": 3}'])
def test_damaged_pairs_are_refused_in_one_line(tmp_path, line):
    prepare.make_licensing(tmp_path, n_tokens=1000)
    with open(tmp_path / 'licensing/pairs.jsonl', 'a') as file:
        file.write(line + '\n')
    with pytest.raises(ValueError, match='pairs.jsonl is damaged, make it again') as error:
        prepare.load_pairs(tmp_path, 'licensing')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['train.bin', 'val.bin', 'pairs.jsonl', 'meta.json', 'validation.jsonl'])
def test_a_folder_in_the_place_of_a_file_is_seen_before_anything_changes(tmp_path, name):
    prepare.make_licensing(tmp_path, 'mine', n_tokens=1000)
    (tmp_path / 'mine' / name).unlink(missing_ok=True)
    (tmp_path / 'mine' / name).mkdir()
    before = {path.name: path.is_dir() or path.read_bytes() for path in (tmp_path / 'mine').iterdir()}
    with pytest.raises(OSError, match=f'{name} is a folder.*as it was'):
        prepare.make_licensing(tmp_path, 'mine', seed=2, n_tokens=1000)
    assert before == {path.name: path.is_dir() or path.read_bytes() for path in (tmp_path / 'mine').iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ['mine']


def test_a_failed_run_leaves_the_old_data_and_a_new_one_leaves_no_old_pairs(tmp_path, monkeypatch):
    prepare.make_licensing(tmp_path, 'mine', n_tokens=1000)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'mine').iterdir()}
    (tmp_path / 'a.txt').write_text('a b c d ' * 99)

    def full(*_, **__):
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(prepare, 'write_meta', full)
        for name in ('mine', 'new'):
            with pytest.raises(OSError, match='No space'):
                prepare.make_text(tmp_path, name, tmp_path / 'a.txt', tokenizer='bytes')
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'mine').iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.txt', 'mine']
    prepare.make_text(tmp_path, 'mine', tmp_path / 'a.txt', tokenizer='bytes')
    assert prepare.load_tokens(tmp_path, 'mine')[1]['tokenizer'] == 'bytes' and not prepare.load_pairs(tmp_path, 'mine')


# ---- text

def split_at_eot(ids):
    return [bytes(part.tolist()).decode() for part in np.split(ids, np.flatnonzero(ids == 256) + 1)
            for part in [part[part < 256]] if len(part)]


def test_documents_are_files_and_what_two_blank_lines_part(tmp_path):
    folder = tmp_path / 'in'
    folder.mkdir()
    (folder / 'b.txt').write_text('third\r\n\r\n\r\nfourth, one\r\n\r\nparagraph more\r\n', newline='')
    (folder / 'a.txt').write_bytes('\ufefffirst <|endoftext|>\n\n\n\n\nsecond é'.encode())
    (folder / 'c.md').write_text('not this')
    prepare.make_text(tmp_path, 'x', folder, val_frac=0.25, tokenizer='bytes')
    tokens, meta = prepare.load_tokens(tmp_path, 'x')
    assert split_at_eot(tokens['train']) == ['first <|endoftext|>', 'second é', 'third']
    assert split_at_eot(tokens['val']) == ['fourth, one\n\nparagraph more']
    assert all(ids[-1] == 256 for ids in tokens.values()) and meta['documents'] == {'train': 3, 'val': 1}
    prepare.make_text(tmp_path, 'y', folder, val=folder / 'a.txt', tokenizer='bytes')
    tokens, _ = prepare.load_tokens(tmp_path, 'y')
    assert len(split_at_eot(tokens['train'])) == 4 and split_at_eot(tokens['val'])[1] == 'second é'


def test_one_document_is_split_at_its_end(tmp_path):
    (tmp_path / 'a.txt').write_text('0123456789' * 100)
    prepare.make_text(tmp_path, 'x', tmp_path / 'a.txt', val_frac=0.1, tokenizer='bytes')
    tokens, meta = prepare.load_tokens(tmp_path, 'x')
    assert meta['counts'] == {'train': 901, 'val': 101}
    assert split_at_eot(tokens['train']) + split_at_eot(tokens['val']) == ['0123456789' * 90, '0123456789' * 10]


@pytest.mark.parametrize('content, options, message', [
    (None, {}, 'does not exist'), ('', {}, 'holds no text'), (' \n\n\n\n ', {}, 'holds no text'),
    ('x', {}, 'without text'), ('x\n\n\ny', dict(val_frac=0.9), 'without text'), (b'\xff\xfe\x00', {}, 'as UTF-8'),
    ('fine', dict(val='missing.txt'), 'does not exist'), ('fine', dict(source=''), '--input')])
def test_unusable_text_is_one_line_and_writes_nothing(tmp_path, monkeypatch, content, options, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / 'a.txt').write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        prepare.make_text('data', 'x', **(dict(source='a.txt', tokenizer='bytes') | options))
    assert '\n' not in str(error.value) and not (tmp_path / 'data').exists()


def test_real_books_through_gpt2(shared, tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data' / 'tiktoken_cache'))
    prepare.make_text(tmp_path, 'books', shared / 'data' / 'english_val.txt', val_frac=0.25)
    tokens, meta = prepare.load_tokens(tmp_path, 'books')
    assert meta['documents'] == {'train': 6, 'val': 2} and 870_000 < sum(meta['counts'].values()) < 910_000
    assert (tokens['train'] == 50256).sum() == 6 and meta['dtype'] == 'uint16'
    text = (shared / 'data' / 'english_val.txt').read_text(encoding='utf-8')
    assert text.startswith(prepare.get_tokenizer(meta).decode(tokens['train'][:5000].tolist()))


# ---- openwebtext, from local files

@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    return datasets


@pytest.mark.parametrize('kind', ['parquet', 'jsonl', 'txt'])
def test_openwebtext_from_local_files(tmp_path, datasets, kind):
    texts = [f'document {i}\n\n\nof <|endoftext|> three' for i in range(300)]
    folder = tmp_path / 'in'
    folder.mkdir()
    for part in range(2) if kind != 'txt' else []:
        rows = datasets.Dataset.from_dict(dict(url=['u'] * 150, text=texts[150 * part:150 * (part + 1)]))
        getattr(rows, dict(parquet='to_parquet', jsonl='to_json')[kind])(folder / f'{part}.{kind}')
    for i, text in enumerate(texts if kind == 'txt' else []):
        (folder / f'{i:03}.txt').write_text(text)
    for name, seed, threads in (('a', 1, 1), ('b', 1, 3), ('c', 2, 1)):
        prepare.make_openwebtext(tmp_path, name, folder, val_frac=0.02, tokenizer='bytes', seed=seed,
                                 num_threads=threads)
    (a, meta), (b, _), (c, _) = (prepare.load_tokens(tmp_path, name) for name in 'abc')
    train, val = split_at_eot(a['train']), split_at_eot(a['val'])
    assert len(val) == 6 and sorted(train + val) == sorted(texts) and train == [t for t in texts if t not in val]
    assert np.array_equal(a['train'], b['train']) and split_at_eot(c['val']) != val
    assert meta['documents'] == {'train': 294, 'val': 6}


@pytest.mark.parametrize('name, content, message', [
    ('a.parquet', b'no parquet', 'cannot read'), ('a.jsonl', b'{"other": "x"}\n', 'column `text`'),
    ('a.txt', b'only one', 'too few'), ('a.csv', b'text\nx', 'expected a file or a folder'),
    (None, b'', 'expected a file or a folder')])
def test_unusable_files_for_openwebtext(tmp_path, datasets, name, content, message):
    folder = tmp_path / 'in'
    folder.mkdir()
    if name:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare.make_openwebtext(tmp_path, 'x', folder, tokenizer='bytes')
    assert not (tmp_path / 'x').exists()


# ---- the command

def command(tmp_path, *words, **env):
    return subprocess.run([sys.executable, ROOT / 'prepare.py', *words, f'--data_dir={tmp_path}'], text=True,
                          capture_output=True, env={**os.environ, **env}, cwd=tmp_path)


def test_the_command_ends_with_one_json_line(tmp_path):
    done = command(tmp_path, 'licensing', '--n_tokens=2000', '--shuffled')
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result['name'] == 'licensing_shuffled' and result['counts'] == {'train': 2000, 'val': 100}
    assert len(prepare.load_tokens(tmp_path, 'licensing_shuffled')[0]['val']) == 100


@pytest.mark.parametrize('words, message', [
    ([], 'prepare what'), (['licencing'], 'licensing, text'), (['licensing', '--n_tokens=10'], 'at least 1000'),
    (['text', '--input=a.txt', '--tokenizer=words'], 'gpt2, bytes'),
    (['text', '--input=a.txt', '--val_frac=2'], '0 to 1'),
    (['text', '--input=gone.txt', '--tokenizer=bytes'], 'does not exist'), (['licensing', '--seed=-1'], 'negative'),
    (['text', '--inptu=a.txt'], 'input'), (['rulebase', '--seed=4294967296'], 'seed=4294967296: expected'),
    (['text', '--num_threads=-1'], 'num_threads=-1: expected no negative'),
    (['text', '--input=a.txt', '--tokenizer=bytes', '--data_dir=a.txt'], 'cannot write')])
def test_a_mistake_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.txt').write_text('some text ' * 100)
    with pytest.raises(SystemExit) as stopped:
        prepare.main(words)
    line, = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and message in line and list(tmp_path.iterdir()) == [tmp_path / 'a.txt']


@pytest.mark.parametrize('name, status', [('SIGTERM', 143), ('SIGINT', 130)])
def test_a_signal_is_one_line_and_changes_nothing(tmp_path, monkeypatch, capsys, name, status):
    monkeypatch.setattr(prepare, 'write_meta', lambda *_, **__: os.kill(os.getpid(), getattr(signal, name)))
    with pytest.raises(SystemExit) as stopped:
        prepare.main(['licensing', '--n_tokens=1000', f'--data_dir={tmp_path}/data'])
    assert stopped.value.code == status and capsys.readouterr().err == 'error: interrupted: nothing was changed\n'
    assert not list((tmp_path / 'data').iterdir())


def test_help_has_a_heading_for_each_task(capsys):
    with pytest.raises(SystemExit):
        prepare.main(['--help'])
    headings = [line.strip() for line in capsys.readouterr().out.split('settings')[1].splitlines()
                if line and not line.startswith(('  --', ','))]
    assert headings == ['text, openwebtext, proofwriter, mnli', 'openwebtext', 'licensing', 'rulebase']


@pytest.mark.parametrize('words, env, message', [
    (['text', '--input=a.txt'], dict(TIKTOKEN_CACHE_DIR='none', HTTPS_PROXY='http://127.0.0.1:9'),
     'TIKTOKEN_CACHE_DIR.*--tokenizer=bytes'),
    (['openwebtext', '--tokenizer=bytes'], dict(HF_HUB_OFFLINE='1', HF_HOME='none'), '--input')])
def test_without_network_one_line_names_the_ways_out(tmp_path, words, env, message):
    if 'openwebtext' in words:
        pytest.importorskip('datasets')
    (tmp_path / 'a.txt').write_text('some text ' * 100)
    done = command(tmp_path, *words, **env)
    line, = done.stderr.splitlines()
    assert done.returncode == 2 and re.search(message, line) and not list(tmp_path.glob('*/meta.json'))
