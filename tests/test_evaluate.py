"""evaluate.py: windows cover a text once, losses are plain means, the strictly likelier sentence wins a pair; what the
command prints, keeps and refuses."""
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
import prepare
import runtime
import train_lm
from conftest import ROOT
from evaluate import mean_loss, pair_accuracy, pair_rows, scored, segments, standard_error, summary, windows
from model import GPT

CPU = torch.device('cpu')
ALONE = SimpleNamespace(rank=0, world=1)
NO_CONTEXT = contextlib.nullcontext()


def model_of(vocab_size=11, block_size=8, seed=0):
    """A random GPT with quantifiers whose logits differ from token to token and from place to place."""
    torch.manual_seed(seed)
    model = GPT(vocab_size, block_size, n_layer=1, n_head=2, n_embd=8, ffn='nc', quant=True, bool_frac=0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model.eval()


def random_ids(*shape, vocab_size=11, seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---- windows

@pytest.mark.parametrize('n_tokens', [9, 10, 16, 17, 18, 24, 25, 100])
def test_windows_count_every_target_once(n_tokens, block_size=8):
    """Token 0 is nobody's target; only a remainder shorter than a window goes uncounted, at the end."""
    targets = [start + 1 + t for start in windows(range(n_tokens), block_size) for t in range(block_size)]
    assert targets == list(range(1, 1 + len(targets)))
    assert 0 <= n_tokens - 1 - len(targets) < block_size


@pytest.mark.parametrize('most', [1, 2, 7, 12, 13, 40, 99, 100])
def test_at_most_so_many_windows_are_spread_evenly(most, block_size=8):
    every = windows(range(801), block_size)
    starts = windows(range(801), block_size, most)
    assert len(every) == 100 and len(starts) == most and set(starts) <= set(every)
    gaps = [(b - a) // block_size for a, b in zip(starts, starts[1:] + [800])]
    assert starts[0] == 0 and min(gaps) >= 1 and max(gaps) - min(gaps) <= 1
    assert windows(range(801), block_size, 0) == windows(range(801), block_size, 101) == every


# ---- mean loss

@pytest.fixture
def text():
    """(model, batch_at, starts, the mean loss by a loop over single predictions) of a text of seven windows."""
    model, ids = model_of(), random_ids(60)
    starts = windows(ids, model.block_size)
    assert len(starts) == 7
    losses = []
    with torch.no_grad():
        for start in starts:
            logits_TV = model(ids[None, start:start + 8])[0]
            losses += [-logits_TV[t].log_softmax(-1)[ids[start + t + 1]].item() for t in range(8)]

    def batch_at(starts):
        rows = torch.stack([ids[start:start + 9] for start in starts])
        return rows[:, :-1], rows[:, 1:]
    return model, batch_at, starts, sum(losses) / len(losses)


@pytest.mark.parametrize('batch_size', [1, 2, 3, 7, 50])
def test_mean_loss_is_that_of_a_loop_in_batches_of_any_size(text, batch_size):
    model, batch_at, starts, expected = text
    loss = mean_loss(model, batch_at, starts, batch_size, ALONE, NO_CONTEXT)
    assert loss == pytest.approx(expected, abs=1e-5) and math.isfinite(loss)


@pytest.mark.parametrize('world', [2, 3, 9])
def test_mean_loss_is_the_same_in_every_process_of_any_number(text, monkeypatch, world):
    """Each process reads its windows, of which the ninth has none; the sums over all are exchanged."""
    model, batch_at, starts, expected = text
    parts = []
    monkeypatch.setattr(evaluate, 'all_sum', lambda *values: parts.append(values) or (0.0, 1.0))
    for rank in range(world):
        mean_loss(model, batch_at, starts, 2, SimpleNamespace(rank=rank, world=world), NO_CONTEXT)
    total = [sum(values) for values in zip(*parts)]
    assert len(parts) == world and total[1] == 7 * 8 and max(count for _, count in parts) < 7 * 8
    monkeypatch.setattr(evaluate, 'all_sum', lambda *values: total)
    for rank in range(world):
        loss = mean_loss(model, batch_at, starts, 2, SimpleNamespace(rank=rank, world=world), NO_CONTEXT)
        assert loss == pytest.approx(expected, abs=1e-5)


def test_the_forward_pass_has_the_precision_of_its_context(text):
    model, batch_at, starts, expected = text
    loss = mean_loss(model, batch_at, starts, 2, ALONE, torch.autocast('cpu', dtype=torch.bfloat16))
    assert loss != pytest.approx(expected, abs=1e-5) and loss == pytest.approx(expected, rel=0.05)


# ---- perplexity

@pytest.mark.parametrize('stride', [1, 3, 8])
@pytest.mark.parametrize('n_tokens', [2, 8, 9, 10, 17, 18, 60])
def test_segments_score_each_token_once_with_the_longest_context(n_tokens, stride, block_size=8):
    parts = segments(n_tokens, block_size, stride)
    targets = [t for _, end, count in parts for t in range(end - count, end)]
    assert targets == list(range(1, n_tokens))
    assert all(end - start == min(n_tokens, block_size + 1) for start, end, _ in parts), 'no context is left unused'
    assert all(count == stride for _, _, count in parts[1:-1])


def test_without_a_stride_segments_are_the_windows_of_training_and_the_rest():
    parts = segments(60, 8, 8)
    assert [start for start, _, _ in parts[:-1]] == windows(range(60), 8) and parts[-1] == (51, 60, 3)


@pytest.mark.parametrize('stride', [1, 3, 8])
def test_perplexity_is_that_of_a_loop_over_single_tokens(stride):
    """Token t of the first window is predicted from t tokens; a later one from at least block_size - stride + 1."""
    model, ids = model_of(), random_ids(60)
    losses = []
    with torch.no_grad():
        for t in range(1, 60):
            end = min(9 + -(-max(0, t - 8) // stride) * stride, 60)          # of the window in which t is scored
            logits_V = model(ids[None, max(0, end - 9):t])[0, -1]
            losses.append(-logits_V.log_softmax(-1)[ids[t]].item())
    rows = evaluate.window_rows(model, ids.numpy(), CPU, 4, stride)
    mean = sum(losses) / 59
    assert rows['loss'][0].mean() == pytest.approx(mean, abs=1e-5)
    assert rows['perplexity'][0].mean() == pytest.approx(math.exp(mean), rel=1e-5)
    # by window: the first eight tokens, then `stride` at a time; the standard error of a ratio of two sums
    parts = [losses[:8]] + [losses[i:i + stride] for i in range(8, 59, stride)]
    residuals = [sum(part) - mean * len(part) for part in parts]
    error = math.sqrt(len(parts) / (len(parts) - 1) * sum(r * r for r in residuals)) / 59
    assert len(rows['loss'][0]) == len(parts)
    assert standard_error(rows['loss'][0]) == pytest.approx(error, rel=1e-4)
    assert standard_error(rows['perplexity'][0]) == pytest.approx(error * math.exp(mean), rel=1e-4)


# ---- sentences

def sentence_score(model, ids):
    """log p(ids[1:] | ids[0]), one prefix after another."""
    with torch.no_grad():
        return sum(model(torch.tensor([ids[:t]]))[0, -1].log_softmax(-1)[ids[t]].item() for t in range(1, len(ids)))


def log_probs(model, sequences, device, batch_size=256):
    return scored(model, sequences, [len(ids) - 1 for ids in sequences], device, batch_size)[0]


@pytest.mark.parametrize('batch_size', [1, 2, 3, 100])
def test_log_probs_are_those_of_each_sentence_by_itself(batch_size):
    """In the order given, whatever lengths are batched together and however they are padded."""
    model = model_of()
    sentences = [random_ids(length, seed=seed).tolist() for seed, length in enumerate((5, 2, 9, 3, 9, 7, 2))]
    scores = log_probs(model, sentences, CPU, batch_size)
    expected = [sentence_score(model, ids) for ids in sentences]
    assert scores.tolist() == pytest.approx(expected, abs=1e-4) and len(set(scores.tolist())) == 7


def test_of_a_sentence_beyond_the_context_the_end_is_scored():
    model, ids = model_of(), random_ids(20).tolist()
    scores = log_probs(model, [ids, ids[-9:]], CPU)
    assert scores.tolist() == pytest.approx([sentence_score(model, ids[-9:])] * 2, abs=1e-4)


@pytest.mark.parametrize('batch_size', [1, 2, 100])
def test_the_last_tokens_are_scored_and_greedy_where_each_is_the_likeliest(batch_size):
    model = model_of()
    sequences = [random_ids(length, seed=seed).tolist() for seed, length in enumerate((5, 9, 3, 9, 7, 20))]
    sequences += [model.generate(torch.tensor([ids[:3]]), 4, temperature=0)[0].tolist() for ids in sequences]
    counts = [4, 2, 1, 3, 6, 3] + [4] * 6
    scores, greedy = scored(model, sequences, counts, CPU, batch_size)
    for ids, count, score, won in zip(sequences, counts, scores, greedy):
        ids = ids[-9:]
        with torch.no_grad():
            log_p_nV = torch.stack([model(torch.tensor([ids[:t]]))[0, -1].log_softmax(-1)
                                    for t in range(len(ids) - count, len(ids))])
        assert score == pytest.approx(sum(p[i].item() for p, i in zip(log_p_nV, ids[-count:])), abs=1e-4)
        assert won == (log_p_nV.argmax(-1).tolist() == ids[-count:])
    assert greedy[6:].all() and not greedy[:6].all()


def test_sentences_of_a_length_share_a_batch():
    model = Unigram()
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    log_probs(model, [[0] * length for length in (3, 9, 4, 9, 3, 4)], CPU, batch_size=2)
    assert shapes == [(2, 2), (2, 3), (2, 8)]


# ---- LAMBADA

@pytest.mark.parametrize('text, before, target', [
    ('he said no', 'he said', ' no'), ('he said  no', 'he said', '  no'), ('he said\n no', 'he said', '\n no'),
    ('said\nno', None, ' said\nno'), (' no', None, ' no')])
def test_the_last_word_takes_the_space_before_it(text, before, target):
    """A context without words is an end-of-text token."""
    bytes_ = prepare.get_tokenizer('bytes')
    ids, count = evaluate.last_word(bytes_, text)
    assert count == len(target) and bytes_.decode(ids[-count:]) == target
    assert ids[:-count] == (bytes_.encode(before) if before else [bytes_.eot])


def test_the_last_word_may_be_several_tokens(shared, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data' / 'tiktoken_cache'))
    gpt2 = prepare.get_tokenizer('gpt2')
    texts = prepare.load_lambada(shared / 'data' / 'lambada_sample.jsonl')
    counts = []
    for text in texts:
        ids, count = evaluate.last_word(gpt2, text)
        assert ids == gpt2.encode(text) and gpt2.decode(ids[-count:]) == ' ' + text.split(' ')[-1]
        counts.append(count)
    assert len(texts) == 500 and min(counts) == 1 and max(counts) > 1


def test_lambada_is_by_passage():
    """The Unigram model says 'ccccc' whatever comes; of two tokens both must be right, and their losses add."""
    encode = lambda text: [WORDS.index(word) for word in text.replace('-', ' ').split()]
    tokenizer = SimpleNamespace(eot=0, encode=encode)
    rows = evaluate.passage_rows(Unigram(), ['a ccccc', 'a bb', 'a a ccccc-ccccc', 'a ccccc-a'], tokenizer, CPU, 3)
    assert rows['accuracy'][0].tolist() == [True, False, True, False]
    loss = -math.log(5 / 8 * 2 / 8 * 25 / 64 * 5 / 64) / 4
    assert rows['perplexity'][0].mean() == pytest.approx(math.exp(loss))


# ---- minimal pairs

class Unigram(torch.nn.Module):
    """p(next word) by its number of letters, in eighths, whatever came before: a 1/8, bb 2/8, ccccc 5/8."""

    block_size = 10

    def forward(self, ids_BT):
        self.seen = ids_BT
        return torch.tensor([1e-9, 1 / 8, 2 / 8, 5 / 8]).log().expand(*ids_BT.shape, 4)


WORDS = ['.', 'a', 'bb', 'ccccc']
TOKENIZER = SimpleNamespace(eot=0, encode=lambda text: [WORDS.index(word) for word in text.split()])


def pairs_of(family, *pairs):
    return [dict(family=family, good=good, bad=bad) for good, bad in pairs]


def test_a_pair_is_won_by_the_strictly_likelier_sentence():
    won, lost, tie = ('bb', 'a'), ('bb', 'ccccc'), ('a', 'a')
    accuracy = lambda *pairs: pair_accuracy(Unigram(), pairs_of('f', *pairs), TOKENIZER, CPU)['f']
    assert [accuracy(won), accuracy(lost), accuracy(tie)] == [1, 0, 0]
    assert accuracy(won, lost, tie, won) == 0.5
    assert accuracy(('bb', 'a a'), ('ccccc ccccc', 'a')) == 1, '2/8 > 1/64, and 25/64 > 1/8'
    assert accuracy(('ccccc ccccc', 'ccccc')) == 0, 'by the sum over the sentence, not by the mean of its words'


def test_overall_is_the_mean_of_the_families_not_of_the_pairs():
    won, lost = ('bb', 'a'), ('a', 'bb')
    mixed = pairs_of('x', won) + pairs_of('y', won, lost, lost, lost) + pairs_of('x', won) + pairs_of('z', lost)
    assert pair_accuracy(Unigram(), mixed, TOKENIZER, CPU) == pytest.approx(dict(x=1, y=0.25, z=0, overall=1.25 / 3))


def test_a_sentence_follows_one_end_of_text_token():
    model = Unigram()
    pair_accuracy(model, pairs_of('f', ('a bb ccccc', 'bb ccccc a')), TOKENIZER, CPU)
    assert model.seen.tolist() == [[0, 1, 2], [0, 2, 3]]
    model = model_of(vocab_size=4)
    good, bad = sentence_score(model, [0, 1, 2]), sentence_score(model, [0, 3, 1])
    assert pair_accuracy(model, pairs_of('f', ('a bb', 'ccccc a')), TOKENIZER, CPU)['f'] == (good > bad)
    assert pair_accuracy(model, pairs_of('f', ('ccccc a', 'a bb')), TOKENIZER, CPU)['f'] == (bad > good)


def test_pairs_by_family_by_phenomenon_and_overall_with_ties_apart():
    won, lost, tie = ('bb', 'a'), ('a', 'bb'), ('a', 'a')
    pairs = pairs_of('x', won, won) + pairs_of('y', won, tie, tie, lost) + pairs_of('z', tie)
    phenomenon = dict(x='syntax', y='syntax', z='meaning')
    pairs = [pair | dict(phenomenon=phenomenon[pair['family']]) for pair in pairs]
    rows = pair_rows(Unigram(), pairs, TOKENIZER, CPU)
    assert {name: (values.mean(), len(values), ties) for name, (values, ties) in rows.items()} == {
        'x': (1, 2, 0), 'y': (0.25, 4, 2), 'z': (0, 1, 1), 'phenomenon syntax': (0.625, 2, 2),
        'phenomenon meaning': (0, 1, 1), 'overall': (pytest.approx(1.25 / 3), 3, 3)}
    assert all(rows[family][0].dtype == bool for family in 'xyz'), 'items are hits or misses'


def test_sentences_of_the_same_tokens_tie_however_they_are_rounded(monkeypatch):
    """Unknown words read alike. Batches may round one sequence in two ways."""
    noise = iter(range(100))
    monkeypatch.setattr(evaluate, 'scored', lambda model, sequences, *more: (
        np.array([-len(ids) - 1e-6 * next(noise) for ids in sequences]), None))
    rows = pair_rows(None, pairs_of('f', ('a a', 'a a'), ('a a', 'bb bb')), TOKENIZER, CPU)
    assert rows['f'][0].tolist() == [False, True] and rows['f'][1] == 1


def test_a_sentence_begins_with_a_space():
    """As it would in running text: GPT-2 has another token for the first word of a text."""
    bytes_ = prepare.get_tokenizer('bytes')
    assert evaluate.sentence(bytes_, 'No one sang.') == [256, *b' No one sang.']


# ---- standard errors and paired differences

def test_standard_error_of_hits_and_of_other_values():
    hits = np.array([True] * 30 + [False] * 10)
    assert standard_error(hits) == pytest.approx(math.sqrt(0.75 * 0.25 / 40), rel=1e-12)
    assert standard_error(np.array([1.0, 2.0, 4.0])) == pytest.approx(math.sqrt(7 / 3 / 3), rel=1e-12)
    assert math.isnan(standard_error(np.array([1.0])))


def test_student_t_is_that_of_the_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 10: 2.228, 66: 1.997, 1000: 1.962, 100_000: 1.960}
    assert {df: evaluate.student_t(df) for df in table} == pytest.approx(table, abs=2e-3)


def test_differences_are_paired():
    """What two models have in common, such as hard items, is not in the interval of their difference."""
    ours, theirs = np.array([1.0, 5.0, 9.0, 13.5]), np.array([0.0, 4.0, 8.0, 12.0])
    record = summary(ours, 2, theirs, 3)
    half = 3.182 * 0.25 / 2                                     # differences 1, 1, 1, 1.5: sd 0.25
    assert record == pytest.approx(dict(value=7.125, se=ours.std(ddof=1) / 2, n=4, ties=2, vs=6.0,
                                        vs_se=theirs.std(ddof=1) / 2, vs_ties=3, difference=1.125, low=1.125 - half,
                                        high=1.125 + half), rel=1e-3)
    hits = summary(np.array([True, True, False]), 0, np.array([True, False, True]), 0)
    assert hits['difference'] == 0 and hits['high'] == pytest.approx(4.303 / math.sqrt(3), rel=1e-3) == -hits['low']
    alone = summary(ours[:1], 0, theirs[:1], 0)
    assert alone['difference'] == 1 and math.isnan(alone['low']) and math.isnan(alone['high'])


# ---- the sets

LAMBADA = ['It was late and he went home', 'She asked him, and he said no', 'home']
BLIMP = [dict(UID=uid, linguistics_term=term, sentence_good=f'{uid} cats sleep.', sentence_bad=f'{uid} cats sleeps.',
              field='syntax', pair_id=str(i))
         for i, (uid, term) in enumerate([('one', 'binding'), ('two', 's-selection'), ('two', 's-selection')])]


def write_jsonl(path, rows):
    path.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows), encoding='utf-8')
    return path


def test_sets_from_files(tmp_path):
    texts = LAMBADA + ['a line\u2028break within']
    assert prepare.load_lambada(write_jsonl(tmp_path / 'l', [dict(text=text, id=1) for text in texts])) == texts
    pairs = prepare.load_blimp(write_jsonl(tmp_path / 'b', BLIMP))
    assert pairs[0] == dict(family='one', phenomenon='binding', good='one cats sleep.', bad='one cats sleeps.')
    assert [pair['phenomenon'] for pair in pairs] == ['binding', 'argument_structure', 'argument_structure']


def test_sets_from_the_hub(monkeypatch):
    datasets = pytest.importorskip('datasets')
    asked, names = [], {'nyu-mll/blimp': ['one', 'two']}
    monkeypatch.setattr(datasets, 'get_dataset_config_names', names.get)

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        rows = [row for row in BLIMP if row['UID'] == config] or [dict(text=text) for text in LAMBADA]
        return datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    assert prepare.load_lambada() == LAMBADA
    assert [pair['family'] for pair in prepare.load_blimp()] == ['one', 'two', 'two']
    assert asked == [('EleutherAI/lambada_openai', 'default', 'test'), ('nyu-mll/blimp', 'one', 'train'),
                     ('nyu-mll/blimp', 'two', 'train')]
    monkeypatch.setattr(datasets, 'load_dataset', lambda *a, **b: {}['no network'])
    with pytest.raises(ValueError, match='cannot read EleutherAI/lambada_openai: .* without network give'):
        prepare.load_lambada()


@pytest.mark.parametrize('content, message', [
    (None, 'FileNotFound'), ('', 'it is empty'), ('{"text": "a b"}\n{"txt": "a b"}', 'KeyError'), ('a b', 'JSONDecode'),
    ('{"text": 3}', 'a text is missing'), ('{"text": " "}', 'a text is missing'), ('[1]', 'TypeError')])
def test_a_file_that_is_no_such_set(tmp_path, content, message):
    if content is not None:
        (tmp_path / 'file').write_text(content)
    with pytest.raises(ValueError, match=f'cannot read .*file: expected rows with text, one JSON object a.*{message}'):
        prepare.load_lambada(tmp_path / 'file')


def test_samples_of_the_sets(shared):
    pairs = prepare.load_blimp(shared / 'data' / 'blimp_sample.jsonl')
    assert len({pair['family'] for pair in pairs}) == 67 and len({pair['phenomenon'] for pair in pairs}) == 12
    assert len(pairs) == 67 * 20 and all(pair['good'] != pair['bad'] for pair in pairs)


# ---- the command

def save_run(folder, meta, data_dir, seed=0, name='best.pt', step=7, **changes):
    """A run's folder with the checkpoint of a random GPT, as train_lm.py would leave it. Returns the model."""
    settings = dict(block_size=24, n_layer=1, n_head=2, n_embd=8, ffn='nc', quant=True, bool_frac=0.5, quant_frac=0.5,
                    quant_form='corrected', bound_write=False, highway=False, op_init='normal') | changes
    torch.manual_seed(seed)
    model = GPT(meta['vocab_size'], **settings)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    runtime.save_checkpoint(folder / name, dict(model=model.state_dict(), vocab_size=meta['vocab_size'], step=step,
                                                config=dict(settings, dataset=meta['name'], data_dir=str(data_dir))))
    return model.eval()


@pytest.fixture
def here(here):
    """A folder with datasets `books` (bytes) and `licensing`, LAMBADA and BLiMP files, and runs A and B on books, and W
    on licensing."""
    (here / 'books.txt').write_text('The cat sat on the mat and the dog did not. ' * 30)
    books = prepare.make_text('data', 'books', 'books.txt', val_frac=0.2, tokenizer='bytes', num_threads=1)
    licensing = prepare.make_licensing('data', n_tokens=2000)
    lines = (here / 'data/licensing/pairs.jsonl').read_text().splitlines(keepends=True)
    (here / 'data/licensing/pairs.jsonl').write_text(''.join(lines[::40]))
    write_jsonl(here / 'lambada.jsonl', [dict(text=text) for text in LAMBADA])
    write_jsonl(here / 'blimp.jsonl', BLIMP)
    for seed, name in enumerate('AB'):
        save_run(here / 'out/lm' / name, books, 'data', seed)
    save_run(here / 'out/lm/W', licensing, 'data')
    return here


@pytest.fixture
def command(here, monkeypatch, capsys):
    """command('--key=value', ...) -> (result, all of stdout)."""
    def call(*words):
        monkeypatch.setattr(sys, 'argv', ['evaluate.py', '--device=cpu', *words])
        capsys.readouterr()
        evaluate.main()
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1]), out
    return call


FILES = ['--lambada=lambada.jsonl', '--blimp=blimp.jsonl']


def test_one_model(here, command):
    result, out = command('--ckpt=out/lm/A', '--tasks=ppl,lambada,blimp,licensing', *FILES)
    model, config, meta = evaluate.load_model('out/lm/A', CPU)
    tokenizer = prepare.get_tokenizer(meta)
    ids = prepare.load_tokens('data', 'books')[0]['val'].astype(np.int64)
    expected = dict(
        ppl=evaluate.window_rows(model, ids, CPU, 16, 24)['perplexity'][0].mean(),
        lambada_acc=evaluate.passage_rows(model, LAMBADA, tokenizer, CPU, 16)['accuracy'][0].mean(),
        lambada_ppl=evaluate.passage_rows(model, LAMBADA, tokenizer, CPU, 16)['perplexity'][0].mean(),
        blimp=pair_accuracy(model, prepare.load_blimp('blimp.jsonl'), tokenizer, CPU)['overall'],
        licensing=pair_accuracy(model, prepare.load_pairs('data', 'licensing'), tokenizer, CPU)['overall'])
    assert result == pytest.approx(expected, rel=1e-5) and list(result) == list(expected)
    assert result['ppl'] > 1
    for row in ('perplexity', 'accuracy', 'two', 'phenomenon argument_structure', 'overall', 'comparative', 'votes'):
        assert f'\n{row} ' in out, 'the table has all rows'
    saved = json.loads((here / 'out/lm/A/eval.json').read_text())
    assert list(saved) == ['ppl', 'lambada', 'blimp', 'licensing']
    assert saved['ppl']['model'] == dict(ckpt='out/lm/A/best.pt', step=7)
    assert saved['lambada']['lambada'] == 'lambada.jsonl'
    number = lambda task, row: (saved[task]['rows'][row]['n'], saved[task]['rows'][row]['unit'])
    assert number('licensing', 'votes') == (5, 'pairs') and number('licensing', 'overall') == (5, 'families')
    assert number('lambada', 'accuracy') == (3, 'passages') and number('ppl', 'loss')[1] == 'windows'
    assert number('blimp', 'two') == (2, 'pairs') and number('blimp', 'phenomenon binding') == (1, 'families')
    assert '3 passages' in out and '2 pairs' in out and '5 families' in out
    assert saved['ppl']['rows']['perplexity']['value'] == pytest.approx(result['ppl'], rel=1e-5)


def test_two_models(here, command):
    """The difference is ckpt minus vs, by paradigm for BLiMP; the other way round it changes its sign."""
    words = ['--tasks=ppl,lambada,blimp,licensing', *FILES]
    ours, out = command('--ckpt=out/lm/A', '--vs=out/lm/B', *words)
    theirs, _ = command('--ckpt=out/lm/B', *words)
    back, _ = command('--ckpt=out/lm/B', '--vs=out/lm/A', *words)
    assert 'difference' in out and list(ours['vs']) == ['ppl', 'lambada_acc', 'lambada_ppl', 'blimp', 'licensing']
    for key, record in ours['vs'].items():
        assert record['difference'] == pytest.approx(ours[key] - theirs[key], rel=1e-3, abs=1e-5)
        assert record['low'] <= record['difference'] <= record['high']
        assert back['vs'][key]['low'] == pytest.approx(-record['high'], rel=1e-4)
    assert ours['vs']['ppl']['low'] < ours['vs']['ppl']['difference'] != 0
    saved = json.loads((here / 'out/lm/A/eval.json').read_text())
    assert saved['blimp vs out/lm/B']['rows']['overall']['n'] == 2, 'paradigms'
    assert saved['blimp vs out/lm/B']['vs']['ckpt'] == 'out/lm/B/best.pt'


def test_models_of_other_tokens_and_contexts_are_compared_on_the_same_sentences(here, command):
    save_run(here / 'out/lm/C', json.loads((here / 'data/books/meta.json').read_text()), 'data', seed=1, block_size=30)
    for ours, theirs in ('AW', 'WA', 'AC'):
        result, _ = command(f'--ckpt=out/lm/{ours}', f'--vs=out/lm/{theirs}', '--tasks=licensing')
        alone, _ = command(f'--ckpt=out/lm/{theirs}', '--tasks=licensing')
        difference = result['vs']['licensing']['difference']
        assert difference == pytest.approx(result['licensing'] - alone['licensing'], abs=1e-5)


def test_the_pairs_are_those_of_the_model_s_own_language(here, command):
    meta = prepare.make_licensing('data', 'mine', seed=3, n_tokens=2000, long_memory=True)
    save_run(here / 'out/lm/M', meta, 'data', block_size=90)
    command('--ckpt=out/lm/M', '--tasks=licensing')
    rows = json.loads((here / 'out/lm/M/eval.json').read_text())['licensing']['rows']
    assert rows['memory']['n'] == rows['votes']['n'] == 200 and rows['overall']['n'] == 6


def test_the_table_shows_ties_where_there_are_any():
    records = {'x': summary(np.array([True, False]), 3), 'y': summary(np.array([0.5, 1e6]), 0)}
    lines = evaluate.aligned('pairs', records).splitlines()
    assert lines[0].split() == ['pairs', 'n', 'value', 'se', 'ties']
    assert lines[1].split() == ['x', '2', 'pairs', '0.5000', '0.3536', '3'] and lines[2].split()[3] == '5e+05'
    header, line = evaluate.aligned('pairs', {'x': summary(np.array([1.0]), 0, np.array([3.0]), 0)}).splitlines()
    assert header.split() == ['pairs', 'n', 'value', 'se', 'vs', 'difference', 'low', 'high']
    assert line.split() == ['x', '1', 'pairs', '1.0000', '3.0000', '-2.0000'], 'what one item leaves unknown is blank'
    assert len(header) == len(line)


def test_a_study_is_over_seeds_and_its_differences_over_items(here, command):
    """Each cell is the mean of what the command says of each run; each interval that of the seeds' mean by item."""
    meta = json.loads((here / 'data/books/meta.json').read_text())
    alone = {}
    for i, (row, seed) in enumerate([(row, seed) for row in evaluate.STUDIED for seed in (1, 2)]):
        folder = here / f'out/trial/{row}-seed{seed}'
        save_run(folder, meta, 'data', seed=10 + i)
        alone.setdefault(row, []).append(command(f'--ckpt={folder}', '--tasks=ppl,lambada,blimp', *FILES)[0])
    result, out = command('--study=out/trial', '--seeds=1,2', '--tasks=ppl,lambada,blimp', *FILES)
    written = json.loads(Path('results/eval_trial.json').read_text())['records']
    names = dict(ppl='ppl perplexity', lambada_acc='lambada accuracy', blimp='blimp overall')
    for key, name in names.items():
        means = {row: np.mean([one[key] for one in alone[row]]) for row in alone}
        of_seeds = [np.mean(values) for values in written[name]['by_seed'].values()]
        assert of_seeds == pytest.approx(list(means.values()), rel=1e-5)
        for first, second in (('nc', 'gelu'), ('nc+quant', 'nc')):
            pair = written[name]['differences'][f'{first} - {second}']
            assert pair['difference'] == pytest.approx(means[first] - means[second], abs=1e-3)
            assert pair['low'] <= pair['difference'] <= pair['high']
            assert result[name][f'{first} - {second}'] == pytest.approx(pair, rel=1e-4)
    models = [[evaluate.load_model(f'out/trial/{row}-seed{seed}', CPU)[0] for seed in (1, 2)] for row in ('gelu', 'nc')]
    gelu_N, nc_N = (np.mean([evaluate.passage_rows(model, LAMBADA, prepare.get_tokenizer(meta), CPU, 16)['accuracy'][0]
                             for model in models], axis=0) for models in models)
    expected = summary(nc_N, 0, gelu_N)
    assert written['lambada accuracy']['differences']['nc - gelu']['low'] == pytest.approx(expected['low'])
    assert not any(word in ' '.join(written) for word in ('one', 'two')), 'no single paradigm'
    assert Path('results/eval_trial.md').read_text() in out and '| blimp, argument_structure | ' in out


def test_a_model_against_itself_differs_by_nothing(here, command):
    result, _ = command('--ckpt=out/lm/A', '--vs=out/lm/A', '--tasks=ppl,licensing')
    assert all(record == dict(difference=0, low=0, high=0) for record in result['vs'].values())


def test_eval_json_keeps_other_tasks_and_replaces_its_own(here, command):
    command('--ckpt=out/lm/A', '--tasks=licensing')
    command('--ckpt=out/lm/A', '--tasks=ppl')
    command('--ckpt=out/lm/A', '--vs=out/lm/B', '--tasks=ppl')
    first = json.loads((here / 'out/lm/A/eval.json').read_text())
    assert list(first) == ['licensing', 'ppl', 'ppl vs out/lm/B'] and first['ppl']['stride'] == 0
    command('--ckpt=out/lm/A', '--tasks=ppl', '--stride=5')
    second = json.loads((here / 'out/lm/A/eval.json').read_text())
    assert list(second) == list(first) and second['ppl']['stride'] == 5
    assert second['ppl']['rows'] != first['ppl']['rows'] and second['licensing'] == first['licensing']


def test_by_default_a_model_is_asked_what_its_tokens_can_spell(here, command):
    assert list(command('--ckpt=out/lm/W')[0]) == ['ppl', 'licensing']
    assert list(command('--ckpt=out/lm/A', *FILES)[0]) == ['ppl', 'lambada_acc', 'lambada_ppl', 'blimp']


def test_the_loss_is_the_one_that_training_measured(here, command, monkeypatch):
    """On 999 predictions in 27 windows, none left over."""
    prepare.make_licensing('data', 'licensing', n_tokens=20_000)
    config = runtime.configure(train_lm.__file__, train_lm.DEFAULTS, rows=dict(preset=train_lm.PRESETS), argv=(
        '--preset=tiny --ffn=nc --quant=on --n_layer=1 --n_embd=16 --n_head=2 --block_size=37 --batch_size=4 '
        '--micro_batch=4 --eval_windows=0 --max_steps=3 --eval_every=3 --device=cpu').split())
    run = SimpleNamespace(rank=0, world=1, local_rank=0, device=CPU, main=True)
    trained = train_lm.train(config, run, SimpleNamespace(agreed=lambda run: 0))
    result, _ = command('--data_dir=data', f'--ckpt={trained["out_dir"]}')
    assert math.log(result['ppl']) == pytest.approx(trained['val_loss'], abs=1e-5)
    assert result['licensing'] == pytest.approx(trained['licensing_accuracy'], abs=1e-6)
    newest, _ = command('--tasks=ppl')
    assert newest['ppl'] == result['ppl'], 'ckpt=latest'


def test_which_checkpoint(here, capsys):
    """The best, else the last; or the file that is named. Data may have moved."""
    load = lambda where, **options: evaluate.load_model(where, CPU, **options)
    _, config, meta = load('out/lm/A')
    ours = save_run(here / 'run', meta, 'data', seed=5, name='last.pt', step=9, n_layer=2, bool_frac=0.75,
                    quant_frac=0.25, quant_form='printed', bound_write=True, highway=True)
    model, config, _ = load(here / 'run')
    assert config['ckpt'] == str(here / 'run/last.pt') and config['step'] == 9 and not model.training
    ids_BT = random_ids(2, 24)
    assert torch.equal(model(ids_BT), ours(ids_BT))
    save_run(here / 'run', meta, 'data', seed=6, step=8)
    assert load(here / 'run')[1]['step'] == 8 and load(here / 'run/last.pt')[1]['step'] == 9
    (here / 'data').rename(here / 'elsewhere')
    assert load('run', data_dir='elsewhere')[2] == meta
    with pytest.raises(SystemExit):
        load('run')
    assert 'no dataset in data/books: make it' in capsys.readouterr().err


# ---- samples

def test_a_sample_is_that_of_reading_everything_anew(here, command):
    """At temperature 0, token for token, within the context of 24 and beyond."""
    result, out = command('--ckpt=out/lm/A', '--generate=The cat', '--tokens=60', '--temperature=0')
    model, _, meta = evaluate.load_model('out/lm/A', CPU)
    ids = [256, *b'The cat']
    with torch.no_grad():
        for _ in range(60):
            ids.append(model(torch.tensor([ids[-24:]]))[0, -1].argmax().item())
    assert result['text'] == prepare.get_tokenizer(meta).decode(ids[1:]) and out.startswith(result['text'])
    assert result['text'].startswith('The cat') and len(set(ids[8:])) > 3
    one, _ = command('--ckpt=out/lm/A', '--generate=The cat', '--tokens=60', '--top_k=1')
    assert one == result
    assert not (here / 'out/lm/A/eval.json').exists()


def test_samples_follow_the_seed(command):
    sample = lambda *words: command('--ckpt=out/lm/W', '--generate=fred is taller', '--tokens=20', *words)[0]['text']
    assert sample() == sample('--seed=1') != sample('--seed=2')
    assert len(sample().split()) == 23 and sample().startswith('fred is taller')
    assert sample('--temperature=100') != sample()


# ---- mistakes

@pytest.mark.parametrize('words, message', [
    (['--tasks=ppl,lamda'], "no task 'lamda', the nearest is lambada"),
    (['--ckpt=out/lm/W', '--tasks=lambada'], 'lambada is English, and out/lm/W/best.pt knows only the 108 words'),
    (['--vs=out/lm/W', '--tasks=blimp'], 'blimp is English, and out/lm/W/best.pt'),
    (['--vs=out/lm/W', '--tasks=ppl'], 'out/lm/A/best.pt has dataset=books, out/lm/W/best.pt dataset=licensing'),
    (['--vs=out/lm/C', '--tasks=ppl'], 'out/lm/A/best.pt has block_size=24, out/lm/C/best.pt block_size=16'),
    (['--tasks=blimp', '--blimp=none.jsonl'], 'cannot read none.jsonl: expected rows with UID, linguistics_term'),
    (['--tasks=lambada', '--lambada=blimp.jsonl'], 'cannot read blimp.jsonl: expected rows with text'),
    (['--stride=25'], 'stride=25: expected at most the block_size of 24'),
    (['--stride=-1'], 'stride=-1: expected no negative number'),
    (['--batch_size=0'], 'batch_size=0: expected at least 1'),
    (['--generate=a', '--tokens=0'], 'tokens=0: expected at least 1'),
    (['--generate=a', '--temperature=-1'], 'temperature=-1.0: expected no negative number'),
    (['--generate=a', '--temperature=1e-40'], 'temperature=1e-40: expected 0, for the likeliest token, or at least'),
    (['--generate=a', '--top_k=-1'], 'top_k=-1: expected no negative number'),
    (['--generate=a', '--seed=-1'], 'seed=-1: expected no negative number'),
    (['--ckpt='], 'no checkpoint in .: expected the folder of a run of train_lm.py'),
    (['--generate=a', '--vs=out/lm/B'], 'leave out --vs, --tasks and --study'),
    (['--generate=a', '--tasks=ppl'], 'leave out --vs, --tasks and --study'),
    (['--study=out/lm'], 'leave out --ckpt and --vs'),
    (['--ckpt=latest', '--study=out/lm'], 'out/lm holds no study: expected the runs of `train_lm.py --compare'),
    (['--ckpt=out/lm/none'], 'no checkpoint out/lm/none'),
    (['--ckpt=out/lm'], 'no checkpoint in out/lm: expected the folder of a run of train_lm.py'),
    (['--ckpt=foreign'], 'foreign/best.pt is no checkpoint of train_lm.py, or is damaged (KeyError)'),
    (['--ckpt=stranger'], 'stranger/best.pt is of another model: '),
    (['--ckpt=books.txt'], 'books.txt is no checkpoint of these scripts'),
    (['--data_dir=other'], 'has a vocabulary of 257, and other/books one of 108'),
    (['--data_dir=alone', '--tasks=licensing'], 'no minimal pairs in alone/licensing: make them with `python prepare'),
    (['--ckpt=damaged', '--tasks=ppl'], 'cannot read damaged/eval.json (Expecting value: line 1'),
])
def test_a_mistake_is_one_line_and_changes_nothing(here, command, capsys, words, message):
    meta = json.loads((here / 'data/books/meta.json').read_text())
    save_run(here / 'out/lm/C', meta, 'data', block_size=16)
    model = save_run(here / 'damaged', meta, 'data')
    (here / 'damaged/eval.json').write_text('{"ppl": ')
    for folder, saved in dict(foreign=dict(model={}, config={}), stranger=dict(
            torch.load(here / 'damaged/best.pt'), model={**model.state_dict(), 'norm.weight': torch.ones(3)})).items():
        (here / folder).mkdir()
        runtime.save_checkpoint(here / folder / 'best.pt', saved)
    prepare.make_licensing('other', 'books', n_tokens=2000)
    prepare.make_text('alone', 'books', 'books.txt', val_frac=0.2, tokenizer='bytes', num_threads=1)
    before = {path: path.read_bytes() for path in here.rglob('*') if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(*['--ckpt=out/lm/A'] * (not any(word.startswith('--ckpt') for word in words)), *words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.startswith('error: ') and error.count('\n') == 1
    assert {path: path.read_bytes() for path in here.rglob('*') if path.is_file()} == before


@pytest.mark.parametrize('changes', [
    dict(n_layer='1'), dict(n_head=0), dict(n_head=2.0), dict(n_embd=-8), dict(block_size=None),
    dict(block_size=24.0), dict(ffn=['nc']), dict(bool_frac='half'), dict(bool_frac=math.nan)], ids=str)
def test_a_checkpoint_with_settings_of_another_type_is_one_line(here, command, capsys, changes):
    saved = torch.load('out/lm/A/best.pt', weights_only=True)
    torch.save({**saved, 'config': {**saved['config'], **changes}}, 'edited.pt')
    torch.save({**saved, 'config': list(saved['config'])}, 'list.pt')
    for path in ('edited.pt', 'list.pt'):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command(f'--ckpt={path}', '--tasks=ppl')
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count('\n') == 1
        assert f'{path} is no checkpoint of train_lm.py, or is damaged (' in error


def test_a_run_of_the_classifier_is_called_one(here, command, capsys):
    runtime.save_checkpoint('last.pt', dict(model={}, step=3, config=dict(variant='inter8', data_dir='data')))
    with pytest.raises(SystemExit):
        command('--ckpt=last.pt')
    assert capsys.readouterr().err == 'error: last.pt is of a run of train_cls.py: expected one of train_lm.py\n'


def test_a_signal_in_a_sample_is_one_line(here, command, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, 'generate', lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        command('--ckpt=out/lm/A', '--generate=The cat')
    assert stop.value.code == 143 and capsys.readouterr().err == 'error: interrupted: nothing is kept\n'


def test_interrupted_it_keeps_what_is_measured(here, command, monkeypatch, capsys):
    def passage_rows(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(evaluate, 'passage_rows', passage_rows)
    with pytest.raises(SystemExit) as stop:
        command('--ckpt=out/lm/A', *FILES)
    assert stop.value.code == 130 and capsys.readouterr().err.endswith('measured before is in eval.json\n')
    assert list(json.loads((here / 'out/lm/A/eval.json').read_text())) == ['ppl']


def test_torchrun_is_refused(here, command, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, 'launch', lambda device: SimpleNamespace(world=2, device=CPU))
    with pytest.raises(SystemExit):
        command('--ckpt=out/lm/A')
    assert 'run it without torchrun' in capsys.readouterr().err


def test_the_script_ends_with_its_result_and_helps(here):
    run = lambda *words: subprocess.run([sys.executable, ROOT / 'evaluate.py', *words], text=True, capture_output=True)
    done = run('--ckpt=out/lm/A', '--tasks=ppl', '--device=cpu')
    assert done.returncode == 0 and list(json.loads(done.stdout.splitlines()[-1])) == ['ppl']
    assert '100%' in done.stderr, 'a progress bar'
    shown = run('--help').stdout
    assert '--stride=0' in shown and 'what a trained language model' in shown.lower()
