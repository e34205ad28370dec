"""evaluate.py against lm-evaluation-harness: one GPT, scored by both on the same samples, gets the same figures.

Not collected by default, since users need no lm_eval: pip install lm_eval, python -m pytest tests/reference_eval.py.
The harness brings its own task files, tokenisation of (context, continuation), metrics and aggregation; ours is only
the model's answer to one request at a time.
"""
import functools
import json
from pathlib import Path

import lm_eval
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

import prepare
from evaluate import passage_rows, pair_rows
from model import GPT

CPU = torch.device('cpu')
TASK_FILES = Path(lm_eval.__file__).parent / 'tasks'


class OneAtATime(TemplateLM):
    """A GPT for the harness: no batches, no padding, the log-softmax of each request's own logits."""

    tokenizer_name = 'ours'

    def __init__(self, model, tokenizer):
        super().__init__()
        self.model, self.ours = model, tokenizer

    @property
    def eot_token_id(self):
        return self.ours.eot

    def tok_encode(self, string, add_special_tokens=None, **options):
        return self.ours.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **options):
        answers = []
        for _, context, continuation in requests:
            ids = torch.tensor((context + continuation)[-self.model.block_size - 1:])
            n = len(continuation)
            log_p_nV = self.model(ids[None, :-1])[0, -n:].log_softmax(-1)
            score = log_p_nV.gather(1, ids[-n:, None]).sum().item()
            answers.append((score, bool((log_p_nV.argmax(-1) == ids[-n:]).all())))
        return answers

    def loglikelihood_rolling(self, requests, **options):
        raise NotImplementedError

    generate_until = loglikelihood_rolling


def harness(lm, file, split, rows):
    """{task: results} of one of the harness's own task files, on our rows (task -> rows)."""
    config = yaml.safe_load((TASK_FILES / file).read_text())
    config.pop('tag', None)

    def task(name):                                             # that file, but for where the rows come from
        return ConfigurableTask(config=dict(config, task=name, dataset_path='local', dataset_name=None, custom_dataset=(
            lambda **options: DatasetDict({split: Dataset.from_list(rows[name])}))))

    return lm_eval.simple_evaluate(lm, tasks=[task(name) for name in rows], bootstrap_iters=0,
                                   task_manager=TaskManager(include_defaults=False))['results']


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding='utf-8').split('\n') if line]


@functools.cache
def trained(tokenizer_name, block_size, passages):
    """(model, tokenizer): trained on the ends of half of the longer passages, so as to get some words right."""
    tokenizer = prepare.get_tokenizer(tokenizer_name)
    torch.manual_seed(0)
    model = GPT(tokenizer.vocab_size, block_size, n_layer=2, n_head=2, n_embd=32, ffn='nc', quant=True)
    encoded = [tokenizer.encode(text) for text in passages[::2]]
    ids_BT = torch.tensor([ids[-block_size - 1:] for ids in encoded if len(ids) > block_size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(40 if tokenizer_name == 'gpt2' else 200):
        logits_BTV = model(ids_BT[:, :-1])[:, -6:]
        torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, -6:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@pytest.fixture(params=['gpt2, 64', 'bytes, 128'])
def setting(request, shared, monkeypatch):
    """(model, tokenizer, passages, pairs): contexts are shorter than many passages and longer than any pair."""
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data' / 'tiktoken_cache'))
    passages = rows_of(shared / 'data' / 'lambada_sample.jsonl')[:30]
    name, block_size = request.param.split(', ')
    model, tokenizer = trained(name, int(block_size), tuple(row['text'] for row in passages))
    return model, tokenizer, passages, rows_of(shared / 'data' / 'blimp_sample.jsonl')


def test_lambada_is_the_harness_s(setting, shared, tmp_path):
    model, tokenizer, passages, _ = setting
    theirs = harness(OneAtATime(model, tokenizer), 'lambada/lambada_openai.yaml', 'test', {'ours': passages})['ours']
    path = tmp_path / 'lambada.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in passages))
    ours = passage_rows(model, prepare.load_lambada(path), tokenizer, CPU, batch_size=7)
    accuracy, perplexity = (ours[row][0].mean() for row in ('accuracy', 'perplexity'))
    assert 0.1 < accuracy < 0.9 and accuracy == pytest.approx(theirs['acc,none'], abs=1e-12)
    assert perplexity == pytest.approx(theirs['perplexity,none'], rel=1e-4)


def test_blimp_is_the_harness_s(setting, shared):
    """By paradigm and over all; without ties, which the harness would give to the good sentence."""
    model, tokenizer, _, pairs = setting
    ours = pair_rows(model, prepare.load_blimp(shared / 'data' / 'blimp_sample.jsonl'), tokenizer, CPU, batch_size=50)
    assert ours['overall'][1] == 0
    rows = {paradigm: [row for row in pairs if row['UID'] == paradigm] for paradigm in {row['UID'] for row in pairs}}
    results = harness(OneAtATime(model, tokenizer), 'blimp/_template_yaml', 'train', rows)
    theirs = {paradigm: result['acc,none'] for paradigm, result in results.items()}
    assert {paradigm: ours[paradigm][0].mean() for paradigm in theirs} == pytest.approx(theirs, abs=1e-12)
    assert len(theirs) == 67 and len(set(theirs.values())) > 5
    assert ours['overall'][0].mean() == pytest.approx(sum(theirs.values()) / 67, abs=1e-12)
