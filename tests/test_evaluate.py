"""evaluate.py: windows cover a text once, the loss is a plain mean, the strictly likelier sentence wins a pair."""
import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

import evaluate
from evaluate import log_probs, mean_loss, pair_accuracy, windows
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


# ---- sentences

def sentence_score(model, ids):
    """log p(ids[1:] | ids[0]), one prefix after another."""
    with torch.no_grad():
        return sum(model(torch.tensor([ids[:t]]))[0, -1].log_softmax(-1)[ids[t]].item() for t in range(1, len(ids)))


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
    assert model.seen.tolist() == [[0, 2, 3]]
    model = model_of(vocab_size=4)
    good, bad = sentence_score(model, [0, 1, 2]), sentence_score(model, [0, 3, 1])
    assert pair_accuracy(model, pairs_of('f', ('a bb', 'ccccc a')), TOKENIZER, CPU)['f'] == (good > bad)
    assert pair_accuracy(model, pairs_of('f', ('ccccc a', 'a bb')), TOKENIZER, CPU)['f'] == (bad > good)
