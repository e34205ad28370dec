"""train_cls.py on classifiers of a few thousand parameters: what a step, a measurement, a stop, a resume, a divergence,
a mistake and a table of variants do; and the paper's tables from its own runs."""
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import prepare
import runtime
import train_cls
from conftest import ROOT
from model import VARIANTS, load_llama
from test_llama import hf_folder
from test_llama import small as small_llama
from test_tokenizers import TOKENS, hf_file
from test_train_lm import (ALONE, NEVER, PROCESS, TORCHRUN, contents, one_thread, records, saved,  # noqa: F401
                           stop_after, without_speed)

# three epochs of 8 + 8 + 8 + 4 examples
SMALL = ('--preset=tiny --n_layer=2 --n_embd=32 --n_head=2 --n_kv_head=1 --d_ff=48 --d_logic=16 --n_head_logic=2 '
         '--n_train=28 --n_val=20 --batch_size=8 --micro_batch=8 --eval_batch=7 --epochs=3 --warmup=2 --lr=0.003 '
         '--log_every=1 --variant=inter8_learned --device=cpu').split()
pytestmark = pytest.mark.usefixtures('here')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A data_dir with a small dataset of each kind, all of them from generated rules."""
    where = tmp_path_factory.mktemp('data')
    prepare.make_rulebase(where, n_train=40, n_val=24)
    examples, _ = prepare.load_examples(where, 'rulebase')
    for task in ('proofwriter', 'mnli'):
        source, keys = tmp_path_factory.mktemp(task), prepare.SOURCES[task]['columns']
        for split, rows in examples.items():
            rows = rows if task == 'proofwriter' else rows[:len(rows) - 10]
            (source / f'{split}.jsonl').write_text(''.join(json.dumps({
                keys[0]: f'{task} {row["context"]}', keys[1]: row['question'],
                keys[2]: prepare.LABELS[task][row['label']], 'id': row['id'],
                **(dict(QDep=row['depth']) if task == 'proofwriter' else {})}) + '\n' for row in rows))
        prepare.make_examples(task, where, task, str(source))
    return where


@pytest.fixture(scope='module')
def backbone(tmp_path_factory):
    """A folder of HF with a small Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp('llama')
    hf_file(folder)
    return hf_folder(folder, small_llama(vocab_size=len(TOKENS) + 3))


def configure(*words):
    return runtime.configure(train_cls.__file__, train_cls.DEFAULTS, choices=train_cls.CHOICES, rows=train_cls.ROWS,
                             argv=words)


@pytest.fixture(scope='module')
def train(data):
    """train('--key=value', ..., stop=NEVER) -> the result of a run of the small model, in this process."""
    def call(*words, stop=NEVER):
        words = words if '--resume' in words else (*SMALL, f'--data_dir={data}', *words)
        return train_cls.train(configure(*words), ALONE, stop)
    return call


@pytest.fixture(scope='module')
def whole(train, tmp_path_factory):
    """The folder of a run that nothing interrupted, to compare others with; its result is in done.json."""
    folder = tmp_path_factory.mktemp('whole')
    (folder / 'done.json').write_text(json.dumps(train(f'--out_dir={folder}')))
    return folder


@pytest.fixture(scope='module')
def untrained(train):
    return train('--variant=inter8', '--epochs=0')


@pytest.fixture
def main(run_main):
    """main('--key=value', ...) -> (status, stdout, stderr) of the script, in this process."""
    return functools.partial(run_main, train_cls)


@pytest.fixture
def small(main, data):
    """The same for the small model, unless it resumes."""
    return lambda *words: main(*(words if '--resume' in words else (*SMALL, f'--data_dir={data}', *words)))


def assert_same_run(folder, other, done=None):
    """Bit by bit: the log, the last weights, the optimizer's and the loop's state, and the result."""
    assert records(folder) == records(other)
    ours, theirs = saved(folder), saved(other)
    keys = ('step', 'measured', 'last_loss', 'norms', 'record')
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    for key, value in theirs['model'].items():
        assert torch.equal(ours['model'][key], value), key
    assert ours['optimizer']['state'].keys() == theirs['optimizer']['state'].keys()
    for i, state in theirs['optimizer']['state'].items():
        assert all(torch.equal(ours['optimizer']['state'][i][key], value) for key, value in state.items())
    if done:
        assert without_speed(done) == without_speed(json.loads((other / 'done.json').read_text()))


def setup(data, *words):
    """(config, examples by split, tokenizer, model) of the small setting, each weight large enough to show."""
    config = configure(*SMALL, f'--data_dir={data}', *words)
    examples, tokenizer, _ = train_cls.open_data(config, ALONE)
    model = train_cls.build(config, tokenizer.vocab_size, ALONE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(mean=float(p.dim() == 1), std=0.3, generator=generator)
    return config, examples, tokenizer, model


# ---- settings

def test_rows_of_task_preset_table_and_variant_over_each_other():
    """defaults < task < preset < the table's row < variant < given."""
    def of(words, *keys):
        config = configure(*words.split())
        return tuple(config[key] for key in keys)
    assert of('', 'task', 'n_train', 'batch_size', 'alpha', 'branch') == ('proofwriter', 10_000, 30, 0.01, 'routed')
    assert of('--task=mnli', 'n_train', 'n_val', 'batch_size', 'eval_batch', 'epochs', 'alpha', 'learn_alpha',
              'checkpointing') == (5_000, 500, 20, 10, 2, 0.1, True, False)
    assert of('--task=multi', 'n_train', 'n_val', 'batch_size', 'eval_batch', 'epochs', 'alpha', 'learn_alpha',
              'checkpointing') == (10_000, 1_000, 20, 100, 6, 0.1, True, True)
    assert of('--preset=tiny', 'task', 'n_train', 'learn_alpha') == ('rulebase', 0, False)
    assert of('--preset=tiny --task=mnli', 'task', 'n_train', 'learn_alpha') == ('mnli', 0, True)
    assert of('--preset=fair', 'task', 'logic_dtype', 'residual', 'control') == (
        'proofwriter', 'float32', 'state', 'matched')
    assert of('--task=mnli --variant=inter8_alpha01', 'alpha', 'learn_alpha') == (0.1, True)
    assert of('--preset=fair --variant=nogate', 'branch', 'cross_attn', 'control') == ('nogate', False, 'matched')
    assert of('--gates=4 --variant=inter16', 'gates') == (4,) and of('--variant=inter16', 'gates') == (16,)
    assert of('--task=mnli --n_train=7 --alpha=0.5', 'n_train', 'alpha', 'n_val') == (7, 0.5, 500)


@pytest.mark.parametrize('table, task', [('table1', 'rulebase'), ('table3', 'mnli'), ('table4', 'multi')])
def test_a_table_has_its_task_even_with_a_preset(table, task):
    config = configure('--preset=tiny', f'--variants={table}')
    assert (config['task'], config['n_embd'], config['n_train']) == (task, 128, 0)
    assert config['learn_alpha'] == (task != 'rulebase')
    assert configure('--preset=tiny', f'--variants={table}', '--task=proofwriter')['task'] == 'proofwriter'


def test_a_table_brings_what_it_compares():
    """bf16 for precision, although tiny is in fp32, and shallow training for depth; what is given counts."""
    precision, depth = (configure('--preset=tiny', f'--variants={table}') for table in ('precision', 'depth'))
    assert (precision['dtype'], precision['logic_dtype'], precision['train_depth']) == ('bfloat16', 'same', -1)
    assert configure('--preset=fair', '--variants=precision')['logic_dtype'] == 'same'
    assert (depth['dtype'], depth['train_depth']) == ('float32', 1)
    assert configure('--preset=tiny', '--variants=precision', '--dtype=float32')['dtype'] == 'float32'
    assert configure('--variants=depth', '--train_depth=2')['train_depth'] == 2
    assert set(VARIANTS) - set(train_cls.TABLES['all']) == {'inter8_fp32'}


@pytest.mark.parametrize('name', VARIANTS)
def test_a_variant_is_its_keys_given_one_by_one(name):
    named = configure(f'--variant={name}')
    given = configure(*(f'--{key}={runtime.shown(value)}' for key, value in VARIANTS[name].items()))
    assert {**named, 'variant': ''} == {**given, 'variant': ''}


@pytest.mark.parametrize('key', ['branch=none', 'branch=nogate', 'axis=intra', 'gates=4', 'window=3', 'tau=0.5',
                                 'cross_attn=off', 'alpha=0.5', 'gate_mode=ste', 'residual=state', 'route_scale=on',
                                 'd_logic=12', 'n_head_logic=4'])
def test_every_key_of_a_row_reaches_the_model(train, untrained, key):
    other = train('--variant=inter8', '--epochs=0', '--' + key)
    assert other['val_loss'] != untrained['val_loss'] and math.isfinite(other['val_loss'])


def test_the_keys_of_control_alpha_and_precision_reach_the_model(train):
    done = {words: train('--epochs=0', *words.split()) for words in (
        '--variant=nogate', '--variant=nogate --control=matched', '--variant=inter8', '--variant=inter8 --learn_alpha',
        '--variant=inter8 --dtype=bfloat16', '--variant=inter8 --dtype=bfloat16 --logic_dtype=float32')}
    used = [row['params_used'] for row in done.values()]
    assert used[0] != used[1] and used[3] == used[2] + 1
    assert len({row['val_loss'] for row in list(done.values())[2:]}) == 3 and used[4] == used[5] == used[2]


# ---- training

@pytest.mark.parametrize('name', VARIANTS)
def test_every_variant_learns_a_handful_by_heart(train, name):
    done = train(f'--variant={name}', '--n_train=6', '--n_val=1', '--epochs=20', '--warmup=0', '--lr=0.01',
                 '--out_dir=x')
    losses = records('x', 'loss')
    assert list(losses) == list(range(1, 21)) and all(map(math.isfinite, losses.values()))
    assert losses[1] == pytest.approx(math.log(3), abs=0.6) and losses[20] < 0.4 * losses[1]
    branch = VARIANTS[name].get('branch', 'routed')
    assert ('half_life_median' in done) == (name == 'quant')
    assert ('alpha' in done) == (branch != 'none') and ('entropy' in done) == ('fired' in done) == (branch == 'routed')
    assert done['variant'] == name and done['steps'] == 20


def test_what_others_rely_on_is_in_the_result_and_the_log(small, data):
    status, out, _ = small('--out_dir=x')
    done = json.loads(out.splitlines()[-1])
    assert status == 0 and done['steps'] == 12 and done['out_dir'] == 'x' and done['examples_per_second'] > 0
    assert {'params_trainable', 'params_used', 'val_loss', 'val_accuracy', 'majority', 'entropy', 'alpha',
            'grad_norm', 'fired', 'accuracy_by_depth', 'variant'} <= done.keys() and 'routing' not in done
    assert done['params_trainable'] == done['params_used'] == sum(
        value.numel() for key, value in saved('x')['model'].items())
    norms = records('x', 'grad_norm')
    assert list(norms) == list(range(1, 13)) and list(records('x', 'val_loss')) == [4, 8, 12]
    assert done['grad_norm'] == pytest.approx(np.mean([norms[step] for step in (9, 10, 11, 12)]), rel=1e-5)
    assert records('x', 'epoch') == {4: 1, 8: 2, 12: 3}
    rows = [json.loads(line) for line in (data / 'rulebase/validation.jsonl').read_text().splitlines()]
    held = Counter(row['label'] for row in prepare.subset(rows, 20, 42))
    assert done['majority'] == max(held.values()) / 20 and records('x', 'majority')[12] == done['majority']
    config = json.loads(Path('x/config.json').read_text())
    assert config['world'] == 1 and config['learn_alpha'] is True and config['torch'] == torch.__version__


def test_without_training_the_model_is_measured_and_nothing_is_left(small, data, tmp_path):
    before = contents(data)
    status, out, _ = small('--epochs=0', '--out_dir=x')
    done = json.loads(out.splitlines()[-1])
    assert status == 0 and done['steps'] == 0 and done['val_loss'] == pytest.approx(math.log(3), abs=0.6)
    assert done['grad_norm'] is None and not list(tmp_path.iterdir()) and contents(data) == before


def test_rulebase_is_made_where_it_is_missing_and_then_kept(main, monkeypatch, tmp_path):
    made, make = [], prepare.make_rulebase
    monkeypatch.setattr(prepare, 'make_rulebase', lambda where: made.append(where) or make(where, n_train=9, n_val=9))
    for _ in range(2):
        assert main(*SMALL, '--epochs=1')[0] == 0
    assert made == ['data'] and len(list(tmp_path.glob('out/cls/*/last.pt'))) == 2


def test_rulebase_is_made_by_the_first_process_and_its_failure_ends_all(small, monkeypatch):
    """runtime.main_first tells the others of it."""
    def broken(where):
        raise OSError(f'no room in {where}')
    monkeypatch.setattr(prepare, 'make_rulebase', broken)
    one_line(small('--data_dir=x'), 'no room in x')
    told = []
    monkeypatch.setattr(train_cls, 'main_first', lambda run, make: told.append(run.rank) or runtime.main_first(
        run, make))
    second = SimpleNamespace(**vars(ALONE) | dict(rank=1, main=False))
    with pytest.raises(FileNotFoundError, match='no dataset in x'):
        train_cls.open_data(configure(*SMALL, '--data_dir=x'), second)
    assert told == [1]


def test_every_so_many_steps_and_the_last_are_logged(train, whole):
    train('--log_every=5', '--out_dir=x')
    assert records('x', 'loss') == {step: records(whole, 'loss')[step] for step in (5, 10, 12)}
    assert records('x', 'val_loss') == records(whole, 'val_loss')


def test_micro_batches_change_nothing(train, whole):
    for micro_batch in (1, 3):
        train(f'--micro_batch={micro_batch}', f'--out_dir=by{micro_batch}')
        for key in ('loss', 'val_loss', 'grad_norm', 'alpha'):
            assert records(f'by{micro_batch}', key) == pytest.approx(records(whole, key), abs=1e-4)


def test_checkpointing_changes_nothing(train, whole, monkeypatch):
    layers = []
    monkeypatch.setattr('model.checkpoint', lambda step, t, *more, **how: layers.append(t) or checkpoint(
        step, t, *more, **how))
    train('--epochs=1', '--out_dir=x')
    assert not layers
    train('--checkpointing', '--out_dir=y')
    assert records('y') == records(whole) and len(layers) == 4 * (12 + 3 * 3), 'two layers and as many logic steps'


def test_each_epoch_takes_each_example_once_in_an_order_of_its_own(train, monkeypatch):
    batches, gradients = [], train_cls.gradients
    monkeypatch.setattr(train_cls, 'gradients', lambda net, model, batch, *more: batches.append(
        [tuple(example['ids']) for example in batch]) or gradients(net, model, batch, *more))
    seen = {}
    for seed in (1, 1, 2):
        batches.clear()
        train(f'--seed={seed}', '--n_train=0', '--out_dir=x', '--overwrite', '--epochs=2')
        seen.setdefault(seed, []).append(list(batches))
    assert [len(batch) for batch in seen[1][0]] == [8] * 10 and seen[1][0] == seen[1][1]
    epochs = [sum(part, []) for part in (seen[1][0][:5], seen[1][0][5:], seen[2][0][:5])]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert len(set(epochs[0])) > 35 and epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_step_clips_its_gradient_and_logs_the_norm_before(train):
    words = ['--epochs=1', '--n_train=8', '--warmup=0', '--weight_decay=0']
    for name, clip in (('free', 0), ('small', 1e-12), ('large', 1e6)):
        train(*words, f'--grad_clip={clip}', f'--out_dir={name}')
    config = json.loads(Path('free/config.json').read_text())
    _, tokenizer, _ = train_cls.open_data(config, ALONE)
    first = train_cls.build(config, tokenizer.vocab_size, ALONE).head.weight.detach()
    moved = {name: (saved(name)['model']['head.weight'] - first).abs().mean() for name in ('free', 'small', 'large')}
    assert records('free', 'grad_norm') == records('small', 'grad_norm') == records('large', 'grad_norm')
    assert moved['large'] == moved['free'] == pytest.approx(0.003, rel=0.01) and moved['small'] < 0.1 * moved['free']


# ---- the optimizer

@pytest.mark.parametrize('name', VARIANTS)
def test_every_parameter_is_in_the_optimizer_once_and_alpha_and_rates_by_themselves(data, name):
    config, _, _, model = setup(data, f'--variant={name}', '--alpha_lr=0.7', '--weight_decay=0.3', '--beta2=0.9')
    rest, alpha = train_cls.optimizer_of(model, config).param_groups
    assert Counter(map(id, rest['params'] + alpha['params'])) == Counter(map(id, model.parameters()))
    own = dict(inter8_learned=[getattr(model.fusion, 'alpha', None)],
               quant=[layer.quantifier.decay for layer in model.stream.layers] if name == 'quant' else [])
    assert list(map(id, alpha['params'])) == list(map(id, own.get(name, [])))
    assert (rest['rate'], rest['weight_decay'], alpha['rate'], alpha['weight_decay']) == (0.003, 0.3, 0.7, 0)
    assert rest['betas'] == alpha['betas'] == (0.9, 0.9)


def test_the_median_half_life_of_the_rates_is_in_the_result(train):
    """69 tokens at the start, and less or more at a rate of their own."""
    words = ['--variant=quant', '--lr=0', '--epochs=1']
    rest, moved = train(*words, '--alpha_lr=0', '--out_dir=x'), train(*words, '--alpha_lr=0.5', '--out_dir=y')
    half_life = lambda folder: torch.cat([
        math.log(0.5) / F.logsigmoid(saved(folder)['model'][f'stream.layers.{t}.quantifier.decay'].double())
        for t in (0, 1)])
    assert rest['half_life_median'] == pytest.approx(68.97, abs=0.01)
    assert (half_life('x') - 68.97).abs().max() < 0.01 < (half_life('y') - 68.97).abs().min()
    assert moved['half_life_median'] == pytest.approx(half_life('y').median().item())
    assert moved['half_life_median'] == records('y', 'half_life_median')[4]


def test_rates_move_however_small_their_gradients_are(train):
    """A first step of AdamW is the learning rate, also of gradients far below the 1e-8 that it usually adds."""
    train('--variant=quant', '--alpha=1e-3', '--lr=0', '--alpha_lr=0.25', '--warmup=0', '--n_train=8', '--epochs=1',
          '--out_dir=x')
    moved = torch.cat([saved('x')['model'][f'stream.layers.{t}.quantifier.decay'] for t in (0, 1)]) - math.log(99)
    assert moved.abs().median() == pytest.approx(0.25, rel=0.05)


def test_alpha_moves_at_its_own_rate_which_climbs_in_the_warmup(train):
    """A first step of Adam is the rate itself, here a quarter of it; the others rest at lr=0."""
    train('--lr=0', '--alpha_lr=0.1', '--warmup=4', '--epochs=1', '--out_dir=x')
    alphas = [0.01, *records('x', 'alpha').values()]
    steps = np.abs(np.diff(alphas))
    assert len(steps) == 4 and steps[0] == pytest.approx(0.025, rel=1e-3) and 0 < steps[1] < 0.0501
    first = train('--epochs=0')['val_loss']
    assert saved('x')['model']['fusion.alpha'].item() == pytest.approx(alphas[-1])
    train('--lr=0', '--alpha_lr=0', '--epochs=1', '--out_dir=y')
    assert set(records('y', 'alpha').values()) == {torch.tensor(0.01).item()}
    assert records('y', 'val_loss') == {4: first}
    train('--lr=0', '--alpha_lr=9', '--variant=inter8', '--epochs=1', '--out_dir=z')
    assert set(records('z', 'alpha').values()) == {torch.tensor(0.01).item()}, 'a fixed one rests'


# ---- the data of a run

def ids_of(examples):
    return [tuple(example['ids']) for example in examples]


def test_the_seed_draws_the_subsets(data):
    def drawn(seed, n_train=10, n_val=6):
        config = configure(*SMALL, f'--data_dir={data}', f'--seed={seed}', f'--n_train={n_train}', f'--n_val={n_val}')
        examples, _, parts = train_cls.open_data(config, ALONE)
        assert parts == ('rulebase',)
        return {split: ids_of(rows) for split, rows in examples.items()}
    assert drawn(1) == drawn(1) and {split: len(rows) for split, rows in drawn(1).items()} == dict(
        train=10, validation=6)
    every = drawn(1, 0, 0)
    for split in ('train', 'validation'):
        assert drawn(1)[split] != drawn(2)[split] and set(drawn(1)[split]) < set(every[split])
    assert {split: len(rows) for split, rows in every.items()} == dict(train=40, validation=24)


def test_an_example_is_its_text_behind_begin_its_label_and_its_depth(data):
    config = configure(*SMALL, f'--data_dir={data}', '--n_train=0', '--max_tokens=20')
    examples, tokenizer, _ = train_cls.open_data(config, ALONE)
    for example, row in zip(examples['train'], prepare.load_examples(data, 'rulebase')[0]['train']):
        words = tokenizer.encode(f'{row["context"]}\nQuestion: {row["question"]}')
        assert example == dict(ids=[tokenizer.begin, *words[-19:]], label=row['label'], depth=row['depth'],
                               task='rulebase')
    ids_BS, mask_BS, labels_B = train_cls.batch_of(examples['train'][:3], tokenizer.pad, ALONE.device)
    assert [row[mask].tolist() for row, mask in zip(ids_BS, mask_BS)] == [e['ids'] for e in examples['train'][:3]]
    assert labels_B.tolist() == [e['label'] for e in examples['train'][:3]] and labels_B.dtype == torch.long


def test_every_batch_of_the_mixture_is_half_and_half(train, monkeypatch):
    """The larger part is cut to the smaller (30 and 40, 14 and 24); an epoch has each example once."""
    batches, gradients = [], train_cls.gradients
    monkeypatch.setattr(train_cls, 'gradients', lambda net, model, batch, *more: batches.append(batch) or gradients(
        net, model, batch, *more))
    done = train('--task=multi', '--n_train=0', '--n_val=0', '--batch_size=8', '--epochs=2', '--out_dir=x')
    assert [len(batch) for batch in batches] == 2 * [*7 * [8], 4]
    for batch in batches:
        tasks = Counter(example['task'] for example in batch)
        assert tasks['proofwriter'] == tasks['mnli'] == len(batch) / 2
    epochs = [ids_of(sum(part, [])) for part in (batches[:8], batches[8:])]
    assert Counter(epochs[0]) == Counter(epochs[1]) and epochs[0] != epochs[1] and len(epochs[0]) == 60
    assert done['accuracy_by_task'].keys() == {'proofwriter', 'mnli'}
    assert np.mean(list(done['accuracy_by_task'].values())) == pytest.approx(done['val_accuracy'])


@pytest.mark.parametrize('n, parts', [(7, 1), (12, 2), (30, 3)])
def test_an_order_alternates_the_parts_and_is_a_function_of_seed_and_epoch(n, parts):
    def order(seed, epoch):
        return train_cls.order_of(n, parts, dict(seed=seed), epoch).tolist()
    for seed, epoch in itertools.product((0, 1), (0, 1)):
        assert sorted(order(seed, epoch)) == list(range(n)) and order(seed, epoch) == order(seed, epoch)
        assert [i % parts for i in order(seed, epoch)] == [i % parts for i in range(n)]
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_the_mixture_takes_half_of_the_examples_from_each(data):
    config = configure(*SMALL, f'--data_dir={data}', '--task=multi', '--n_train=10', '--n_val=7')
    examples, _, parts = train_cls.open_data(config, ALONE)
    assert parts == ('proofwriter', 'mnli')
    assert [e['task'] for e in examples['train']] == 5 * ['proofwriter', 'mnli'] and len(examples['validation']) == 8
    alone = configure(*SMALL, f'--data_dir={data}', '--task=mnli', '--n_train=5')
    assert [e['label'] for e in train_cls.open_data(alone, ALONE)[0]['train']] == [
        e['label'] for e in examples['train'][1::2]]


def example(context, depth, label=0):
    return dict(context=context, question='q', depth=depth, label=2 if depth is None else label)


def test_shallow_theories_train_and_deeper_proofs_validate():
    """A theory counts by its deepest question; what is Unknown validates nothing."""
    rows = [example('A.', 0), example('A.', 1), example('B.', 1), example('B.', 2), example('B.', None),
            example('C.', None), example('A.', None), example('D.', 0)]
    config = dict(task='proofwriter', train_depth=1)
    kept = train_cls.shallow_or_deep(rows, 'train', config)
    assert kept == [rows[i] for i in (0, 1, 6, 7)], 'C has no question of known depth, B one of depth 2'
    assert train_cls.shallow_or_deep(rows, 'validation', config) == [rows[3]]
    assert train_cls.shallow_or_deep(rows, 'train', config | dict(train_depth=0)) == [rows[7]]
    for split in ('train', 'validation'):
        assert train_cls.shallow_or_deep(rows, split, config | dict(train_depth=-1)) == rows


def test_a_theory_of_rulebase_is_no_deeper_than_it_has_rules(data):
    """So its Unknown questions, which have no depth, stay where no proof could be deep; no proof in the data is deeper
    than that."""
    rule = 'If something is big then it is kind.'
    rows = [example(f'Anne is big. {rule}', None), example(f'Bob is big. {rule} {rule}', None),
            example('Bob is big.', 0)]
    assert train_cls.shallow_or_deep(rows, 'train', dict(task='rulebase', train_depth=1)) == [rows[0], rows[2]]
    for row in prepare.load_examples(data, 'rulebase')[0]['train']:
        assert row['context'].count('If ') >= (row['depth'] or 0)


def test_a_run_on_shallow_theories_is_measured_on_deeper_proofs(train, data):
    done = train('--train_depth=1', '--n_train=0', '--n_val=0', '--epochs=1', '--out_dir=x')
    examples = prepare.load_examples(data, 'rulebase')[0]
    held = [row for row in examples['validation'] if row['depth'] in (2, 3)]
    assert done['accuracy_by_depth'].keys() == {'depth 2', 'depth 3'}
    labels = Counter(row['label'] for row in held)
    assert done['majority'] == max(labels.values()) / len(held) and set(labels) == {0, 1}
    config = json.loads(Path('x/config.json').read_text())
    shown = train_cls.open_data(config, ALONE)[0]['train']
    assert {e['depth'] for e in shown} == {0, 1, None} and len(shown) < len(examples['train'])
    assert done['steps'] == -(-len(shown) // 8)


# ---- a backbone of its own

def test_a_backbone_in_bf16_with_checkpointing_trains_on_its_own_tokens(main, data, backbone):
    """The paper's setting, but for its size and rate: all weights are bf16, and it starts from those in the folder."""
    words = [f'--backbone={backbone}', f'--data_dir={data}', '--device=cpu', '--n_train=6', '--n_val=6',
             '--batch_size=6', '--epochs=12', '--max_tokens=300', '--d_logic=16', '--log_every=1', '--lr=0.003']
    status, out, err = main(*words, '--out_dir=x')
    assert status == 0, err
    losses = records('x', 'loss')
    assert losses[12] < 0.6 * losses[1]
    config = json.loads(Path('x/config.json').read_text())
    assert config['checkpointing'] and config['task'] == 'proofwriter'
    tokenizer, text = prepare.llama_tokenizer(backbone), '{context}\nQuestion: {question}'
    row = prepare.subset(prepare.load_examples(data, 'proofwriter')[0]['train'], 6, 42)[0]
    assert train_cls.open_data(config, ALONE)[0]['train'][0]['ids'] == [
        tokenizer.begin, *tokenizer.encode(text.format(**row))][-300:]
    assert {value.dtype for value in saved('x')['model'].values() if value.is_floating_point()} == {torch.bfloat16}

    main(*words, '--out_dir=y', '--lr=0', '--epochs=1', '--learn_alpha', '--alpha_lr=0')
    stored = load_llama(backbone, torch.bfloat16).state_dict()
    assert stored and all(torch.equal(saved('y')['model'][f'llama.{key}'], value) for key, value in stored.items())
    assert json.loads(out.splitlines()[-1])['params_used'] > sum(value.numel() for value in stored.values())
    assert main('--resume', '--out_dir=x')[0] == 0 and records('x', 'loss') == losses


def test_the_factor_that_metas_files_leave_out_reaches_the_loader(backbone, monkeypatch):
    seen = []
    monkeypatch.setattr(train_cls, 'load_llama', lambda *args, **options: seen.append(options) or load_llama(*args))
    for words in ([], ['--rope_factor=32']):
        train_cls.build(configure(f'--backbone={backbone}', '--d_logic=16', *words), 9, ALONE)
    assert seen == [dict(rope_factor=8.0), dict(rope_factor=32.0)]


# ---- what is measured

@torch.no_grad()
def literal(model, examples):
    """Loss, whether right and the statistics of each example by itself, without padding."""
    rows = []
    for example in examples:
        logits, stats = model(torch.tensor([example['ids']]), torch.ones(1, len(example['ids'])))
        rows.append(dict(loss=F.cross_entropy(logits[0], torch.tensor(example['label'])).item(), stats=stats,
                         right=int(logits[0].argmax()) == example['label'], n=len(example['ids'])))
    return rows


@pytest.mark.parametrize('eval_batch', [1, 7, 100])
def test_measure_is_a_loop_over_single_examples(data, eval_batch):
    """Statistics of the routing weigh each real token alike, whatever it is batched with."""
    config, examples, tokenizer, model = setup(data, '--task=multi', '--n_val=0', f'--eval_batch={eval_batch}',
                                               '--route_scale')
    held = examples['validation']
    found, rows = train_cls.measure(model, held, tokenizer.pad, config, ALONE), literal(model, held)
    assert found['val_loss'] == pytest.approx(np.mean([row['loss'] for row in rows]), rel=1e-5)
    assert found['val_accuracy'] == np.mean([row['right'] for row in rows]) and 0 < found['val_accuracy'] < 1
    groups = {}
    for example, row in zip(held, rows):
        depth = example['depth']
        if example['task'] != 'mnli':
            groups.setdefault('unknown' if depth is None else f'depth {depth}', []).append(row['right'])
        groups.setdefault(example['task'], []).append(row['right'])
    by = {**found['accuracy_by_depth'], **found['accuracy_by_task']}
    assert by == pytest.approx({name: np.mean(group) for name, group in groups.items()})
    assert sum(len(groups[name]) for name in found['accuracy_by_task']) == len(held)
    assert sum(len(groups[name]) for name in found['accuracy_by_depth']) == len(groups['proofwriter'])
    assert {'depth 0', 'depth 1', 'depth 2', 'depth 3'} <= set(found['accuracy_by_depth'])

    weights = np.array([row['n'] for row in rows])
    for key in ('entropy', 'fired'):
        values = np.array([row['stats'][key].item() for row in rows])
        assert found[key] == pytest.approx(np.average(values, weights=weights), rel=1e-4)
        assert abs(np.average(values, weights=weights) - values.mean()) > 3e-4 * values.mean(), 'else it shows nothing'
    routing = np.average(np.stack([row['stats']['routing'] for row in rows]), axis=0, weights=weights)
    np.testing.assert_allclose(found['routing'], routing, rtol=1e-3)
    assert np.shape(found['routing']) == (2, 24) and np.sum(found['routing'], axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert found['alpha'] == model.fusion.alpha.item()
    assert model.training


def test_what_a_branch_lacks_is_not_measured(data):
    for name, keys in (('baseline', set()), ('nogate', {'alpha'}),
                       ('inter8', {'alpha', 'entropy', 'fired', 'routing'})):
        config, examples, tokenizer, model = setup(data, f'--variant={name}')
        found = train_cls.measure(model, examples['validation'], tokenizer.pad, config, ALONE)
        assert found.keys() == {'val_loss', 'val_accuracy', 'accuracy_by_depth', *keys}


# ---- two processes

# Makes a run of each list of words, one after the other. WHEN: the count of a step, in which SIGNAL comes to the last
# process, or 'save', then it comes in the middle of writing last.pt
DRIVER = f'''
import json, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import runtime, train_cls
gradients, steps = train_cls.gradients, []
run, stop = runtime.launch('cpu'), runtime.StopSignal()
torch.set_float32_matmul_precision('high')

def watched(net, model, batch, pad, config, run):
    steps.append(len(batch))
    if os.environ.get('WHEN') == str(len(steps)) and run.rank == run.world - 1:
        os.kill(os.getpid(), getattr(signal, os.environ['SIGNAL']))
    return gradients(net, model, batch, pad, config, run)

def watched_save(state, file):
    save(state, file)
    if os.environ.get('WHEN') == 'save' and state['step'] > 4:
        file.truncate(2000)
        os.kill(os.getpid(), getattr(signal, os.environ['SIGNAL']))

train_cls.gradients = watched
save, torch.save = torch.save, watched_save
for words in json.loads(sys.argv[1]):
    config = runtime.configure(train_cls.__file__, train_cls.DEFAULTS, choices=train_cls.CHOICES, rows=train_cls.ROWS,
                               argv=words)
    train_cls.train(config, run, stop)
    stop.signum = 0
runtime.finish()
'''


def drive(runs, before=(), when='', name=''):
    Path('driver.py').write_text(DRIVER)
    return subprocess.run([sys.executable, *before, 'driver.py', json.dumps(runs)], capture_output=True, text=True,
                          timeout=300, env={**PROCESS, 'OMP_NUM_THREADS': '1', 'WHEN': when, 'SIGNAL': name})


SHARED = {                                                  # the last batch has 4 examples, 3 or 1
    'stopped': [],
    'baseline': ['--variant=baseline', '--n_train=27', '--micro_batch=1', '--eval_batch=100', '--epochs=2'],
    'nogate': ['--variant=nogate', '--n_train=17', '--micro_batch=3', '--epochs=2'],
    'inter8_noxattn': ['--variant=inter8_noxattn', '--n_train=17', '--checkpointing', '--eval_batch=100', '--epochs=2'],
    'quant': ['--variant=quant', '--n_train=17', '--epochs=2', '--alpha_lr=0.1'],
    'intra8': ['--task=multi', '--variant=intra8', '--n_train=18', '--epochs=2'],
}


def test_two_processes_take_the_steps_of_one(train, data, whole):
    """Losses, norms and measurements are those of one process with the same total batch: for each branch, and for a
    last batch that does not divide or has fewer examples than there are processes. A signal to one stops both."""
    runs = [[*SMALL, f'--data_dir={data}', *words, f'--out_dir={name}'] for name, words in SHARED.items()]
    done = drive([*runs, ['--resume', '--out_dir=stopped', '--device=cpu']], TORCHRUN, when='6', name='SIGTERM')
    assert done.returncode == 0, done.stderr
    assert all(json.loads(Path(name, 'config.json').read_text())['world'] == 2 for name in SHARED)
    for name, words in SHARED.items():
        other = whole
        if words:
            other = f'{name} alone'
            train(*words, '--micro_batch=8', '--eval_batch=7', f'--out_dir={other}')
        for key in ('loss', 'grad_norm', 'val_loss', 'val_accuracy', 'entropy', 'fired', 'alpha', 'half_life_median'):
            assert records(name, key) == pytest.approx(records(other, key), abs=1e-4), (name, key)
        for key in ('accuracy_by_depth', 'accuracy_by_task', 'routing'):
            ours, theirs = records(name, key), records(other, key)
            assert ours.keys() == theirs.keys()
            for step in theirs:
                if key == 'routing':
                    np.testing.assert_allclose(ours[step], theirs[step], atol=1e-4)
                else:
                    assert ours[step] == pytest.approx(theirs[step])
    assert len(records('stopped', 'loss')) == 12


# ---- stop and resume

@pytest.mark.parametrize('k', [0, 3, 4, 6, 8, 11])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(train, whole, k):
    """Within an epoch and between two: the mean gradient norm of the last is that of an uninterrupted run, too."""
    done = train('--out_dir=x', stop=stop_after(k))
    assert done['interrupted'] == signal.SIGTERM and done['step'] == saved('x')['step'] == k
    assert_same_run('x', whole, train('--resume', '--out_dir=x'))


def test_a_run_can_be_stopped_again_and_again(train, whole):
    done = train('--out_dir=x', stop=stop_after(1))
    while 'interrupted' in done:
        done = train('--resume', '--out_dir=x', stop=stop_after(1))
    assert_same_run('x', whole, done)


def test_a_finished_run_has_nothing_to_do_until_it_gets_more_epochs(train, whole):
    first = train('--out_dir=x')
    before = contents('x')
    again = train('--resume', '--out_dir=x')
    after = contents('x')
    assert {key for key in before if before[key] != after[key]} <= {'config.json'} and before.keys() == after.keys()
    assert without_speed(again) == without_speed(first)
    assert train('--resume', '--out_dir=x', '--epochs=4')['steps'] == 16
    assert list(records('x', 'loss')) == list(range(1, 17)) and list(records('x', 'val_loss')) == [4, 8, 12, 16]


def test_settings_given_at_a_resume_count(train):
    """Those of the optimizer too, whose state brings its own."""
    train('--out_dir=x', stop=stop_after(7))
    before = saved('x')['model']
    train('--resume', '--out_dir=x', '--lr=0', '--alpha_lr=0')
    assert all(torch.equal(saved('x')['model'][key], value) for key, value in before.items())
    train('--out_dir=y', stop=stop_after(7))
    train('--resume', '--out_dir=y', '--weight_decay=30', '--epochs=3')
    norm = lambda folder: saved(folder)['model']['llama.layers.0.attn.q.weight'].norm()
    assert norm('y') < 0.8 * norm('x')


def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(small, train, whole, monkeypatch):
    gradients, steps = train_cls.gradients, itertools.count()

    def interrupted(*args):
        if next(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train_cls, 'gradients', interrupted)
        status, out, err = small('--out_dir=x')
    assert status == 128 + signal.SIGTERM and 'Traceback' not in err
    assert json.loads(out.splitlines()[-1]) == dict(interrupted=signal.SIGTERM, step=6, out_dir='x')
    assert 'step 6' in err.splitlines()[-1] and 'train_cls.py --resume --out_dir=x' in err.splitlines()[-1]
    assert_same_run('x', whole, train('--resume', '--out_dir=x'))


@pytest.mark.parametrize('when', ['7', 'save'])
def test_kill_9_costs_the_steps_since_the_last_save(train, data, whole, when):
    """Between two saves, and in the middle of one, which leaves half a file under another name."""
    assert drive([[*SMALL, f'--data_dir={data}', '--out_dir=x']], when=when, name='SIGKILL').returncode == -9
    assert saved('x')['step'] == 4 and len(records('x')) > 6
    assert len(list(Path('x').glob('last.pt.*.tmp'))) == (when == 'save')
    assert_same_run('x', whole, train('--resume', '--out_dir=x'))


# ---- divergence

def assert_finite(folder):
    for value in saved(folder)['model'].values():
        assert value.isfinite().all()


def test_a_rate_that_is_too_large_ends_the_run_with_the_step_and_the_loss(small, whole):
    status, out, err = small('--lr=1e30', '--grad_clip=0', '--warmup=0', '--out_dir=x')
    said = err.splitlines()[-1]
    assert status == 3 and 'step 1:' in said and f'{records(whole, "loss")[1]:.4f}' in said
    assert 'Traceback' not in err and '{' not in out and not list(Path('x').glob('*.pt'))


def test_a_divergence_right_after_a_resume_knows_the_last_finite_loss(train, monkeypatch):
    train('--out_dir=x', stop=stop_after(6))
    monkeypatch.setattr(train_cls, 'gradients', lambda *args: (math.nan, 1.0))
    with pytest.raises(runtime.Diverged) as error:
        train('--resume', '--out_dir=x')
    assert (error.value.step, error.value.loss) == (6, records('x', 'loss')[6])


@pytest.mark.parametrize('where, step', [('loss', 6), ('gradient', 6), ('validation', 8), ('weights', 6)])
def test_a_divergence_later_leaves_a_finite_checkpoint(small, train, whole, monkeypatch, where, step):
    gradients, measure, steps = train_cls.gradients, train_cls.measure, itertools.count()

    def broken(net, model, *more):
        loss, norm = gradients(net, model, *more)
        n = next(steps)
        if where == 'weights' and n == 5:
            model.head.bias.grad[0] = math.inf
        return (math.nan, norm) if where == 'loss' and n == 6 else (
            loss, math.inf) if where == 'gradient' and n == 6 else (loss, norm)
    with monkeypatch.context() as patch:
        patch.setattr(train_cls, 'gradients', broken)
        if where == 'validation':
            patch.setattr(train_cls, 'measure', lambda *args: measure(*args) | (
                dict(val_loss=math.nan) if next(steps) > 6 else {}))
        status, _, err = small('--out_dir=x')
    assert status == 3 and f'step {step}:' in err.splitlines()[-1] and 'Traceback' not in err
    assert f'{records("x", "loss")[step]:.4f}' in err.splitlines()[-1]
    assert saved('x')['step'] == 4
    assert_finite('x')
    assert_same_run('x', whole, train('--resume', '--out_dir=x'))


def test_weights_that_are_not_finite_are_never_saved(train, monkeypatch):
    """By a signal that comes in the step that breaks them."""
    gradients, steps = train_cls.gradients, itertools.count()

    def broken(net, model, *more):
        found = gradients(net, model, *more)
        if next(steps) == 5:
            model.head.bias.grad[0] = math.inf
        return found
    monkeypatch.setattr(train_cls, 'gradients', broken)
    with pytest.raises(runtime.Diverged) as error:
        train('--out_dir=x', stop=stop_after(6))
    assert error.value.step == 6 and saved('x')['step'] == 4
    assert_finite('x')


def test_a_step_that_does_not_fit_the_gpu_ends_in_one_line(small, monkeypatch):
    def full(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB.')
    monkeypatch.setattr(train_cls, 'gradients', full)
    status, _, err = small('--out_dir=x')
    assert status == 1 and 'smaller micro_batch' in err.splitlines()[-1] and 'Traceback' not in err


# ---- mistakes

def one_line(done, *parts):
    status, out, err = done
    assert (status, out, err.count('\n')) == (2, '', 1), err
    assert all(part in err for part in parts), err


@pytest.mark.parametrize('words, parts', [
    (['--variant=inter9'], ['inter9', 'inter16']),
    (['--task=squad'], ['squad', 'proofwriter']),
    (['--branch=gated'], ['gated', 'nogate']),
    (['--dtype=float16'], ['float16', 'bfloat16']),
    (['--route-scal'], ['--route_scale']),
    (['--alpha=small'], ['alpha', 'small', 'number']),
    (['--lr=-1'], ['lr=-1', 'negative']),
    (['--alpha_lr=-1'], ['alpha_lr=-1', 'negative']),
    (['--epochs=-1'], ['epochs=-1', 'negative']),
    (['--n_val=-1'], ['n_val=-1', 'negative']),
    (['--seed=-1'], ['seed=-1', 'negative']),
    (['--seed=99999999999'], ['eed']),
    (['--beta2=1'], ['beta2=1', 'below 1']),
    *(([f'--{key}=1e308'], [f'{key}=1e+308', 'at most 1e30'])
      for key in ('lr', 'alpha_lr', 'weight_decay', 'alpha', 'tau')),
    (['--alpha=-1e308'], ['alpha=-1e+308']),
    (['--d_logic=4000000000000'], ['does not fit', 'smaller']),
    (['--n_embd=4000000000000'], ['does not fit', 'smaller']),
    (['--n_embd=4000000000000000000'], ['does not fit', 'smaller']),
    (['--axis=quant', '--window=3'], ['window=2', '3']),
    (['--train_depth=-2'], ['train_depth=-2', '-1 for all']),
    (['--train_depth=3'], ['train_depth=3', 'no validation examples', 'rulebase']),
    (['--train_depth=0', '--task=mnli'], ['train_depth=0', 'mnli has no train examples', 'proofwriter']),
    (['--train_depth=0', '--task=multi'], ['train_depth=0', 'multi has no train examples']),
    (['--batch_size=0'], ['batch_size=0', 'at least 1']),
    (['--micro_batch=0'], ['micro_batch=0', 'at least 1']),
    (['--n_layer=0'], ['n_layer=0', 'at least 1']),
    (['--log_every=0'], ['log_every=0', 'at least 1']),
    (['--gates=0'], ['gates', 'positive']),
    (['--tau=0'], ['tau', 'positive']),
    (['--d_logic=15'], ['d_logic', '15', '2']),
    (['--n_head=3'], ['32', '3 heads']),
    (['--max_tokens=5'], ['max_tokens=5', 'at least']),
    (['--task=multi', '--batch_size=7'], ['batch_size=7', 'even']),
    (['--task=mnli', '--data_dir=nowhere'], ['no dataset', 'prepare.py mnli', 'nowhere']),
    (['--task=multi', '--data_dir=nowhere'], ['no dataset', 'prepare.py proofwriter']),
    (['--backbone=nowhere'], ['nowhere', 'tokenizer']),
    (['--device=tpu'], ['tpu', 'cpu']),
    (['--variants=table2', '--variant=inter8'], ['table2', 'table1', 'inter8']),
    (['--variants=inter8,inter9', '--variant=inter8'], ["'inter9'", 'inter8_noxattn']),
    (['--variants=table1'], ['--variant=inter8_learned', '--variants=table1', 'one of the two']),
    (['--variants=table1', '--variant=inter8', '--seeds=1,x'], ['seeds=1,x']),
    (['--variants=table1', '--variant=inter8', '--lr=-1'], ['lr=-1']),
    (['--variants=table1', '--variant=inter8', '--out_dir=x'], ['--variants=table1', '--out_dir']),
    (['--variants=table1', '--variant=inter8', '--overwrite'], ['--variants=table1', '--overwrite']),
    (['--summarize=nowhere.json'], ['nowhere.json', 'paper_b_runs.json']),
    (['--count_params', '--n_head=0'], ['n_head=0', 'at least 1']),
    (['--count_params', '--n_head=3'], ['32', '3 heads']),
    (['--resume'], ['--out_dir']),
    (['--resume', '--out_dir=missing'], ['missing']),
])
def test_a_mistake_is_one_line_and_status_2(small, tmp_path, words, parts):
    one_line(small(*words), *parts)
    assert not list(tmp_path.iterdir()), 'and nothing is made'


def test_without_a_backbone_the_paper_s_run_says_what_to_give(main, tmp_path):
    one_line(main(), '--backbone=FOLDER', '--preset=tiny')
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_llama_or_holds_half_of_one(main, data, backbone, tmp_path):
    words = [f'--data_dir={data}', '--max_tokens=300', '--device=cpu', '--out_dir=x']
    (tmp_path / 'b').mkdir()
    hf_file(tmp_path / 'b')
    one_line(main(*words, '--backbone=b'), 'no Llama in b')
    hf_folder(tmp_path / 'b', small_llama(vocab_size=len(TOKENS)))
    one_line(main(*words, '--backbone=b'), f'{len(TOKENS) + 3} tokens', f'only {len(TOKENS)}', 'of one model')
    (tmp_path / 'b/model.safetensors').write_bytes(b'')
    one_line(main(*words, '--backbone=b'), 'b/model.safetensors', 'download it again')
    assert [path.name for path in tmp_path.iterdir()] == ['b']


@pytest.mark.parametrize('content', ['{', '[]', '{}', '{"results": {"a": []}}', '{"results": {"a": [{"seed"]}}',
                                     '{"runs": {"a": {}}}', '{"runs": {"a": {"seeds": {"x": 1}}}}'])
def test_a_file_that_holds_no_runs(main, tmp_path, content):
    (tmp_path / 'runs.json').write_text(content)
    one_line(main('--summarize=runs.json'), 'runs.json is no file of runs', 'results/NAME.json')


def test_a_folder_that_holds_another_run_stays_as_it_is(small, train):
    train('--out_dir=x', '--epochs=1')
    before = contents('x')
    one_line(small('--out_dir=x'), 'x already holds a run', '--resume', '--overwrite')
    assert contents('x') == before
    assert small('--out_dir=x', '--overwrite')[0] == 0 and saved('x')['step'] == 12


@pytest.mark.parametrize('words, parts', [
    (['--variant=inter16'], ['another model']), (['--variant=nogate'], ['another model']),
    (['--variant=intra8'], ['axis=inter', 'intra']), (['--alpha=0.5'], ['alpha=0.01', '0.5']),
    (['--tau=2'], ['tau=1.0', '2.0']), (['--route_scale'], ['route_scale']), (['--n_embd=16'], ['another model']),
    (['--batch_size=4'], ['batch_size=8', '4']), (['--n_train=20'], ['n_train=28', '20']),
    (['--train_depth=1'], ['train_depth=-1', 'not 1']),
])
def test_a_run_is_not_resumed_as_another_function(small, train, words, parts):
    """Weights of one variant may fit another; the run, its settings and its checkpoint stay as they are."""
    train('--out_dir=x', stop=stop_after(3))
    before = contents('x')
    one_line(small('--resume', '--out_dir=x', *words), 'last.pt', *parts)
    assert contents('x') == before


@pytest.mark.parametrize('garbage', ['text', 'half', 'foreign', 'bare', 'other optimizer', 'no settings'])
def test_a_file_that_is_no_checkpoint_stays_as_it_is(small, train, garbage):
    train('--out_dir=x', stop=stop_after(1))
    path = Path('x/last.pt')
    state = saved('x')
    if garbage == 'text':
        path.write_text('hello')
    elif garbage == 'half':
        path.write_bytes(path.read_bytes()[:-5000])
    else:
        torch.save({'foreign': dict(weights=torch.zeros(3)), 'bare': dict(model=state['model']),
                    'other optimizer': state | dict(optimizer=dict(state={}, param_groups=[])),
                    'no settings': state | dict(config={})}[garbage], path)
    before = contents('x')
    one_line(small('--resume', '--out_dir=x'), 'last.pt')
    assert contents('x') == before


# ---- parameters

def test_count_params_prints_table_2_to_the_unit(main, tmp_path):
    status, out, err = main('--count_params', '--variant=inter8_learned')
    assert status == 0 and not err and not list(tmp_path.iterdir())
    counts = {name: (row['trainable'], row['used']) for name, row in json.loads(out.splitlines()[-1]).items()}
    assert counts == dict(
        baseline=(7_504_936_963, 7_504_936_963), nogate=(7_582_192_483, 7_510_848_355),
        inter8=(7_579_068_163, 7_579_068_163), inter16=(7_579_725_059, 7_579_725_059),
        inter8_noxattn=(7_507_724_035, 7_507_724_035), matched=(7_507_723_779, 7_507_723_779),
        nogate_xattn=(7_582_192_483, 7_582_192_483), inter8_learned=(7_579_068_164, 7_579_068_164))
    assert '| nogate | 7,582,192,483 | 7,510,848,355 | 5,911,392 |' in out.splitlines()
    assert 'with a vocabulary of 128,256' in out.splitlines()


def test_count_params_counts_the_keys_given_beside_the_variants(main):
    """Four gates: the router and the gate lose 12 rows of L and a bias, the update 16 columns, in each of 32 layers."""
    counted = lambda *words: json.loads(main('--count_params', *words)[1].splitlines()[-1])
    plain, given = counted(), counted('--gates=4')
    assert given.pop('as given')['used'] == plain['inter8']['used'] - 32 * (2 * 12 * 257 + 16 * 256)
    assert given == plain and 'as given' not in counted('--variant=nogate')
    quant = counted('--variant=quant')
    assert quant.pop('quant')['used'] == plain['inter8']['used'] + 32 * 24 and quant == plain
    assert counted('--d_logic=128')['inter8'] == counted('--d_logic=128', '--tau=2')['as given'] != plain['inter8']


# ---- the verdicts

def runs(**by_seed):
    """runs(s1=0.9, s2=None): results of seeds, None one that diverged."""
    return [dict(seed=int(seed[1:]), **({} if value is None else dict(val_accuracy=value)))
            for seed, value in by_seed.items()]


def test_paired_differences_by_hand():
    """Over the seeds that both have, whatever their order: 0.1 and 0.05, whose sd is 0.05 / sqrt(2)."""
    found = train_cls.paired(runs(s1=0.9, s2=0.8, s3=0.7, s5=0.1), runs(s2=0.75, s4=0.1, s1=0.8, s5=None))
    assert found == pytest.approx(dict(mean=0.075, se=0.025, t=3, n=2, supported=True))
    # three: 1, 2 and 6 points: mean 3, sd sqrt(7), SE sqrt(7/3) = 1.5275
    found = train_cls.paired(runs(s1=0.51, s2=0.52, s3=0.56), runs(s1=0.5, s2=0.5, s3=0.5))
    assert found == pytest.approx(dict(mean=0.03, se=math.sqrt(7 / 3) / 100, t=3 / math.sqrt(7 / 3), n=3,
                                       supported=False))
    assert train_cls.paired(runs(s1=1, s2=1), runs(s1=0, s3=0)) is None


@pytest.mark.parametrize('diffs, t, supported', [
    ((0.25, 0.25), math.inf, True), ((0.1 + 0.2, 0.3), math.inf, True), ((-0.25, -0.25), -math.inf, False),
    ((0, 0), 0, False),
    ((0.076, 0.025), None, False), ((0.074, 0.025), None, True), ((-0.074, -0.025), None, False)])
def test_supported_is_positive_and_more_than_two_standard_errors(diffs, t, supported):
    """se is half of the gap between two: 0.0255 and 0.0245 against half of 0.0505 and 0.0495."""
    found = train_cls.paired(runs(s1=diffs[0], s2=diffs[1]), runs(s1=0, s2=0))
    assert found['supported'] is supported
    assert t is None or found['t'] == t


def test_of_several_tasks_each_is_compared_by_itself():
    """One variant gains three points and one on a task and loses them on the other: no difference in the mean."""
    def on(seed, one, other):
        return dict(seed=seed, val_accuracy=(one + other) / 2, accuracy_by_task=dict(proofwriter=one, mnli=other))

    text, found = train_cls.summary({'nogate': [on(1, 0.5, 0.5), on(2, 0.5, 0.5), dict(seed=3, diverged_at=1)],
                                     'inter8': [on(1, 0.53, 0.47), on(2, 0.51, 0.49), on(3, 0.9, 0.9)]})
    assert {name: round(pair['mean'], 6) for name, pair in found.items()} == {
        'inter8 - nogate': 0, 'inter8 - nogate, proofwriter': 0.02, 'inter8 - nogate, mnli': -0.02}
    assert 'commonest' not in text
    assert '| accuracy | proofwriter | mnli |' in text and '| nogate | 0.500 ± 0.000 | 0.500 ± 0.000 |' in text


def test_the_commonest_label_is_one_figure_a_seed():
    """However many variants ran with it, and if the first of them diverged: 0.4 and 0.5, whose sd is 0.1/sqrt(2)."""
    rows = [dict(seed=1, val_accuracy=0.6, majority=0.4), dict(seed=2, val_accuracy=0.6, majority=0.5)]
    text, _ = train_cls.summary({'nogate': [dict(seed=1, diverged_at=1), rows[1]], 'inter8': rows, 'scaled': rows})
    assert 'The commonest label alone: 0.4500 ± 0.0707.' in text


@pytest.mark.parametrize('freedom', range(1, 10))
def test_between_the_t_values_lie_95_percent(freedom):
    t_95 = round(runtime.student_t(freedom), 2)              # as the table has it
    t = torch.linspace(-t_95, t_95, 100_001, dtype=torch.float64)
    density = (1 + t.square() / freedom) ** (-(freedom + 1) / 2)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    assert scale * torch.trapezoid(density, t).item() == pytest.approx(0.95, abs=1e-3)


PAPER = ROOT / 'tests' / 'paper_b_runs.json'
# Tables 1, 3, 4 (ProofWriter) and 5 as printed: accuracy, its sd, loss, normalised entropy, gradient norm
PRINTED = dict(
    baseline=(0.925, 0.005, 0.198, None, 28.5),
    nogate=(0.939, 0.004, 0.167, None, 20.3),
    intra8=(0.936, 0.004, 0.194, 0.972, 19.6),
    inter8=(0.927, 0.012, 0.203, 0.972, 22.9),
    inter8_alpha01=(0.936, 0.005, 0.179, 0.972, 22.2),
    inter8_learned=(0.938, 0.011, 0.172, 0.973, 20.9),
    inter16=(0.934, 0.002, 0.198, 0.976, 20.3),
    inter8_noxattn=(0.937, 0.010, 0.178, 0.974, 21.7),
    mnli_nogate=(0.871, 0.006, 0.393, None, None),
    mnli_intra8=(0.860, 0.033, 0.429, None, None),
    mnli_inter8=(0.851, 0.048, 0.451, None, None),
    multi_nogate=(0.918, 0.017, None, None, None),
    multi_inter8=(0.937, 0.009, None, None, None),
)


@pytest.fixture
def paper(main):
    """(cells of each line of the tables by its first, the result) of the paper's runs."""
    status, out, _ = main(f'--summarize={PAPER}')
    assert status == 0
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in out.splitlines() if '|' in line]
    return {line[0]: line[1:] for line in lines}, json.loads(out.splitlines()[-1])


def test_the_paper_s_tables_come_out_of_its_runs(paper):
    """To the last digit that is printed there."""
    lines, _ = paper
    assert [name for name in lines if name in PRINTED] == list(json.loads(PAPER.read_text())['runs'])
    for name, (accuracy, sd, loss, entropy, norm) in PRINTED.items():
        seeds, accuracies, losses, entropies, _, alpha, norms, _ = lines[name]
        assert seeds == '3' and [float(cell) for cell in accuracies.split(' ± ')] == pytest.approx(
            [accuracy, sd], abs=5.5e-4), name
        loss_sd = json.loads(PAPER.read_text())['runs'][name].get('val_loss_sd')
        assert losses == ('' if loss is None else f'{loss:.3f} ± {loss_sd:.3f}')
        assert norms == ('' if norm is None else f'{norm:.2f}')
        assert entropies == '' if entropy is None else float(entropies) == pytest.approx(entropy, abs=5.5e-4), name
        assert alpha == ('0.0077 ± 0.0014' if name == 'inter8_learned' else '')


def test_the_paper_s_paired_differences_and_verdicts_come_out_of_its_runs(paper):
    lines, result = paper
    stored = json.loads(PAPER.read_text())
    for row in stored['paired']:
        name, sign = f'{row["a"]} - {row["b"]}', 1
        if name not in result:
            name, sign = f'{row["b"]} - {row["a"]}', -1
        found = result[name]
        assert (sign * found['mean'], found['se']) == pytest.approx((row['mean'], row['se']), abs=1e-4), name
        assert (found['supported'] if sign == 1 else False) is row['supported']
        mean, se, t, needed, verdict = lines[name]
        assert (float(mean), float(se)) == pytest.approx((100 * found['mean'], 100 * found['se']), abs=0.0051)
        assert float(t) == pytest.approx(found['mean'] / found['se'], abs=0.0051) and needed == '4.3'
        assert verdict == ('yes' if found['supported'] else 'no')
    assert [name for name, found in result.items() if found['supported']] == ['nogate - baseline'] + (
        ['multi_inter8 - multi_nogate'])
    row = stored['multi_mnli_paired']                       # of which only the differences are published
    found = train_cls.paired([dict(seed=seed, val_accuracy=diff) for seed, diff in row['diffs'].items()],
                             [dict(seed=seed, val_accuracy=0) for seed in row['diffs']])
    assert (found['mean'], found['se'], found['supported']) == (
        pytest.approx(row['mean'], abs=1e-4), pytest.approx(row['se'], abs=1e-4), row['supported'])


# ---- tables of variants

def test_a_table_trains_each_variant_with_each_seed_once_and_says_what_came_of_it(small, main, train, monkeypatch):
    """Interrupted, the same command goes on with the run at hand."""
    words = ['--variants=nogate,inter8', '--variant=inter8', '--seeds=1,2', '--epochs=1']
    trained, gradients = [], train_cls.gradients

    def watched(net, model, batch, *more):
        trained.append(len(batch))
        if len(trained) == 6:                               # in the second run
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(net, model, batch, *more)
    monkeypatch.setattr(train_cls, 'gradients', watched)
    status, out, err = small(*words)
    assert status == 128 + signal.SIGTERM and 'inter8, seed 1' in err and not list(Path('results').iterdir())
    status, out, err = small(*words)
    assert status == 0, err
    assert trained == 4 * [8, 8, 8, 4], 'no step is taken twice'
    assert sorted(path.name for path in Path('out/cls-rulebase').iterdir()) == [
        'inter8-seed1', 'inter8-seed2', 'nogate-seed1', 'nogate-seed2']

    written = json.loads(Path('results/cls_rulebase_nogate_inter8.json').read_text())
    results, table = written['results'], Path('results/cls_rulebase_nogate_inter8.md').read_text()
    assert table in out and list(results) == ['nogate', 'inter8'] and written['config']['epochs'] == 1
    for name in ('cls_rulebase_nogate_inter8.png', 'cls_rulebase_nogate_inter8_routing.png'):
        assert Path('results', name).read_bytes().startswith(b'\x89PNG')
    train('--variant=nogate', '--seed=2', '--epochs=1', '--out_dir=alone')
    assert records('alone') == records('out/cls-rulebase/nogate-seed2')
    for name, rows in results.items():
        accuracies = [row['val_accuracy'] for row in rows]
        assert [row['seed'] for row in rows] == [1, 2] and [len(row['curve']) for row in rows] == [1, 1]
        assert f'| {name} | 2 | {np.mean(accuracies):.4f} ± {np.std(accuracies, ddof=1):.4f} |' in table
    assert np.shape(results['inter8'][0]['routing']) == (2, 24) and results['nogate'][0]['routing'] is None
    assert results['inter8'][0]['routing'] == records('out/cls-rulebase/inter8-seed1', 'routing')[4]
    deepest = [row['accuracy_by_depth']['depth 3'] for row in results['inter8']]
    assert f'{np.mean(deepest):.3f} ± ' in next(line for line in table.splitlines()[6:] if line.startswith('| inter8'))
    majority = np.mean([row['majority'] for rows in results.values() for row in rows])
    assert f'The commonest label alone: {majority:.4f}' in table

    difference = train_cls.paired(results['inter8'], results['nogate'])
    assert written['differences']['inter8 - nogate'] == pytest.approx(
        {key: value if math.isfinite(value) else None for key, value in difference.items()})
    status, out, _ = main('--summarize=results/cls_rulebase_nogate_inter8.json')
    assert status == 0 and table in out and json.loads(out.splitlines()[-1])['inter8 - nogate']['se'] == pytest.approx(
        difference['se'], rel=1e-5)

    before = contents('out')
    one_line(small(*words, '--weight_decay=0.3'), 'nogate-seed1', 'weight_decay=0.01', 'not 0.3')
    assert contents('out') == before


def test_tables_share_the_runs_of_a_task(small, monkeypatch):
    monkeypatch.setattr(train_cls, 'TABLES', dict(one=('baseline', 'matched'), two=('baseline',)))
    words = ['--variant=inter8', '--seeds=1', '--epochs=1', '--n_train=8']
    assert small(*words, '--variants=one')[0] == 0
    monkeypatch.setattr(train_cls, 'gradients', None)
    assert small(*words, '--variants=two')[0] == 0
    assert sorted(path.name for path in Path('results').iterdir()) == [
        f'cls_rulebase_{name}' for name in ('one.json', 'one.md', 'one.png', 'two.json', 'two.md', 'two.png')]


def test_a_table_with_a_setting_of_its_own_shares_no_runs(small, monkeypatch):
    """Those of `depth` train on other data; their table has the rates' half-lives."""
    monkeypatch.setitem(train_cls.TABLES, 'depth', ('inter8', 'quant'))
    words = ['--variant=inter8', '--seeds=1,2', '--epochs=1', '--n_train=8']
    assert small(*words, '--variants=inter8')[0] == 0
    status, out, err = small(*words, '--variants=depth')
    assert status == 0, err
    assert sorted(path.name for path in Path('out').iterdir()) == ['cls-rulebase', 'cls-rulebase-depth']
    assert json.loads(Path('out/cls-rulebase-depth/quant-seed2/config.json').read_text())['train_depth'] == 1
    results = json.loads(Path('results/cls_rulebase_depth.json').read_text())['results']
    assert all(row['accuracy_by_depth'].keys() == {'depth 2', 'depth 3'} for rows in results.values() for row in rows)
    header, _, inter8, quant = ([cell.strip() for cell in line.split('|')] for line in out.split('\n| ')[1:5])
    median = np.mean([row['half_life_median'] for row in results['quant']])
    assert header[8] == 'half-life, tokens' and inter8[8] == '' and quant[8].startswith(f'{median:.1f} ± ')
    assert 'half-life' not in Path('results/cls_rulebase_inter8.md').read_text()
    assert '| quant - inter8 |' in out


def test_a_table_goes_on_past_a_run_that_diverges(small):
    status, out, err = small('--variants=baseline,inter8', '--variant=inter8', '--seeds=1,2', '--lr=1e30',
                             '--warmup=0', '--grad_clip=0', '--log_every=10')
    assert status == 0, err
    results = json.loads(Path('results/cls_rulebase_baseline_inter8.json').read_text())['results']
    assert all(row['diverged_at'] == 1 and math.isfinite(row['last_loss']) for rows in results.values() for row in rows)
    assert '| baseline | 2 |  |' in out and Path('results/cls_rulebase_baseline_inter8.png').exists()
    assert json.loads(out.splitlines()[-1]) == dict(baseline='', inter8='')


def test_a_table_is_for_one_process(data, capsys):
    run = SimpleNamespace(**vars(ALONE) | dict(world=2))
    with pytest.raises(SystemExit) as end:
        train_cls.run_variants(configure(*SMALL, '--variant=inter8', '--variants=table1'), run, NEVER)
    assert end.value.code == 2 and 'torchrun' in capsys.readouterr().err and not Path('out').exists()


def test_every_table_names_variants_and_every_pair_is_of_them():
    assert all(name in VARIANTS for names in train_cls.TABLES.values() for name in names)
    assert all(name in VARIANTS for pair in train_cls.PAIRS for name in pair)
    assert set(train_cls.TABLES['table1']) == {name for name in json.loads(PAPER.read_text())['runs']
                                               if name in VARIANTS}
