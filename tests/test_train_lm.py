"""train_lm.py on models of a few thousand parameters: what a step, a stop, a resume, a divergence and a mistake do."""
import errno
import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prepare
import runtime
import train_lm
from model import FFN_KINDS, GPT

SMALL = ('--preset=tiny --n_layer=1 --n_embd=16 --n_head=2 --block_size=32 --batch_size=4 --micro_batch=4 '
         '--eval_windows=8 --log_every=1 --eval_every=5 --max_steps=12 --warmup=2 --lr=0.01 --ffn=nc --quant=on '
         '--device=cpu').split()
SPEEDS = ('examples_per_second', 'tokens_per_second')
ALONE = SimpleNamespace(rank=0, world=1, local_rank=0, device=torch.device('cpu'), main=True)
NEVER = SimpleNamespace(agreed=lambda run: 0)
pytestmark = pytest.mark.usefixtures('here')
PROCESS = {key: value for key, value in os.environ.items() if key not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    """As in the subprocesses, so that losses can be compared bit by bit."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision('high')
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A data_dir with a small licensing dataset, of its pairs every fortieth."""
    where = tmp_path_factory.mktemp('data')
    for shuffled in (False, True):
        name = 'licensing' + '_shuffled' * shuffled
        prepare.make_licensing(where, name, n_tokens=20_000, shuffled=shuffled)
        pairs = (where / name / 'pairs.jsonl').read_text().splitlines(keepends=True)
        (where / name / 'pairs.jsonl').write_text(''.join(pairs[::40]))
    return where


def configure(*words):
    return runtime.configure(train_lm.__file__, train_lm.DEFAULTS, train_lm.CHOICES,
                             dict(preset=train_lm.PRESETS), argv=words)


@pytest.fixture(scope='module')
def train(data):
    """train('--key=value', ..., stop=NEVER) -> the result of a run of the small model, in this process."""
    def call(*words, stop=NEVER):
        words = words if '--resume' in words else (*SMALL, f'--data_dir={data}', *words)
        return train_lm.train(configure(*words), ALONE, stop)
    return call


@pytest.fixture(scope='module')
def whole(train, tmp_path_factory):
    """The folder of a run that nothing interrupted, to compare others with."""
    folder = tmp_path_factory.mktemp('whole')
    train(f'--out_dir={folder}')
    return folder


@pytest.fixture
def main(run_main):
    """main('--key=value', ...) -> (status, stdout, stderr) of the script, in this process."""
    return functools.partial(run_main, train_lm)


@pytest.fixture
def small(main, data):
    """The same for the small model, unless it resumes."""
    return lambda *words: main(*(words if '--resume' in words else (*SMALL, f'--data_dir={data}', *words)))


def records(folder, key=None):
    """The log without its speeds; with a key {step: value} of the records that have it."""
    lines = [json.loads(line) for line in Path(folder, 'log.jsonl').read_text().splitlines()]
    if key:
        return {line['step']: line[key] for line in lines if key in line}
    return [without_speed(line) for line in lines]


def without_speed(done):
    return {key: value for key, value in done.items() if key not in (*SPEEDS, 'out_dir')}


def saved(folder, name='last.pt'):
    return runtime.load_checkpoint(Path(folder, name))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob('*') if path.is_file()}


def assert_same_run(folder, other):
    """Bit by bit: logged losses, rates, norms and measurements, final and best weights, and the optimizer's state."""
    assert records(folder) == records(other)
    for name in ('last.pt', 'best.pt'):
        ours, theirs = saved(folder, name), saved(other, name)
        assert {key: ours[key] for key in ('step', 'measured', 'best', 'last_loss', 'record')} == {
            key: theirs[key] for key in ('step', 'measured', 'best', 'last_loss', 'record')}
        for key, value in theirs['model'].items():
            assert torch.equal(ours['model'][key], value), key
        for i, state in theirs['optimizer']['state'].items():
            assert all(torch.equal(ours['optimizer']['state'][i][key], value) for key, value in state.items())


def stop_after(n_steps):
    """A signal that comes in the last of so many steps of a process."""
    asked = itertools.count()
    return SimpleNamespace(agreed=lambda run: signal.SIGTERM if next(asked) == n_steps else 0)


# ---- every kind of model learns

KINDS = {kind: [f'--ffn={kind}', '--quant=off'] for kind in FFN_KINDS} | {
    'quantifiers': [],
    'as printed': ['--quant_form=printed'],
    'all Boolean': ['--bool_frac=1', '--quant=off'],
    'all quantifiers': ['--bool_frac=1', '--quant_frac=1'],
    'bound_write': ['--bound_write'],
    'highway': ['--highway'],
    'bound_write and highway of gelu': ['--ffn=gelu', '--quant=off', '--bound_write', '--highway'],
    'zero': ['--op_init=zero'],
    'bfloat16': ['--dtype=bfloat16'],
}


@pytest.mark.parametrize('words', KINDS.values(), ids=KINDS.keys())
def test_every_kind_learns(train, words):
    done = train(*words, '--out_dir=x')
    losses, val_losses = records('x', 'loss'), records('x', 'val_loss')
    assert list(losses) == list(range(1, 13)) and list(val_losses) == [0, 5, 10, 12]
    assert all(math.isfinite(loss) for loss in [*losses.values(), *val_losses.values()])
    assert val_losses[0] == pytest.approx(math.log(len(prepare.WORDS)), rel=0.02)
    assert val_losses[0] - 0.2 > val_losses[5] > val_losses[12] == done['val_loss']


def test_what_others_rely_on_is_in_the_result_and_the_log(small):
    status, out, _ = small('--out_dir=x')
    done = json.loads(out.splitlines()[-1])
    assert status == 0 and done['steps'] == 12 and done['out_dir'] == 'x' and done['tokens_per_second'] > 0
    assert done['params'] == GPT(len(prepare.WORDS), 32, 1, 2, 16, ffn='nc', quant=True).num_params()
    assert done['val_loss'] == pytest.approx(saved('x')['record']['val_loss'], rel=1e-5)
    assert set(done['licensing_families']) == {family.__name__ for family in prepare.FAMILIES}
    assert done['licensing_accuracy'] == pytest.approx(np.mean(list(done['licensing_families'].values())), abs=1e-5)
    assert {'half_life_median', 'half_life_median_top', 'latches', 'saturation'} <= done.keys()
    assert done.keys() - records('x')[-1].keys() == {'params', 'steps', 'tokens_per_second', 'out_dir'}
    assert records('x', 'tokens_per_second').keys() == set(range(1, 13))


def test_best_is_the_lowest_validation_loss(train):
    """At a learning rate that climbs in the end."""
    train('--out_dir=x', '--max_steps=20', '--lr=0.3', '--warmup=20', '--grad_clip=0')
    val_losses = records('x', 'val_loss')
    best = saved('x', 'best.pt')
    assert 0 < best['step'] < 20 and best['record']['val_loss'] == best['best'] == min(val_losses.values())
    assert val_losses[best['step']] == best['best'] and saved('x')['best'] == best['best']


# ---- data

def test_licensing_is_made_where_it_is_missing_and_then_kept(monkeypatch, small, tmp_path):
    """The first command on a fresh machine; the same command again has the data and a folder of its own."""
    made, make = [], prepare.make_licensing
    monkeypatch.setattr(prepare, 'make_licensing',
                        lambda where, name, **more: made.append(name) or make(where, name, n_tokens=20_000, **more))
    for dataset in ('licensing', 'licensing', 'licensing_shuffled'):
        assert small(f'--dataset={dataset}', '--data_dir=data', '--max_steps=1')[0] == 0
    assert made == ['licensing', 'licensing_shuffled']
    assert len(list(tmp_path.glob('out/lm/*/last.pt'))) == 3
    read = lambda name: np.fromfile(tmp_path / 'data' / name / 'train.bin', dtype=np.uint16)
    assert not np.array_equal(read('licensing'), read('licensing_shuffled'))
    assert np.array_equal(np.sort(read('licensing')), np.sort(read('licensing_shuffled')))


def test_without_data_the_paper_s_run_says_how_to_make_them(main, tmp_path):
    status, out, err = main()
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert '`python prepare.py openwebtext`' in err and '--preset=tiny' in err
    assert not list(tmp_path.iterdir())


def test_a_text_in_bytes(train, tmp_path, capsys):
    draw = random.Random(1)
    (tmp_path / 'text.txt').write_text(''.join(f'<|endoftext|> line {draw.randrange(10)}\n' for _ in range(500)))
    prepare.main(['text', '--input=text.txt', '--tokenizer=bytes', '--name=mine', '--data_dir=d'])
    done = train('--data_dir=d', '--dataset=mine', '--out_dir=x')
    assert records('x', 'val_loss')[0] == pytest.approx(math.log(257), rel=0.02)
    assert done['val_loss'] < math.log(257) - 0.3
    assert 'licensing_accuracy' not in done


def test_english_in_gpt2_tokens(train, shared, tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(shared / 'data/tiktoken_cache'))
    with open(shared / 'data/english_train.txt', encoding='utf-8') as file:
        (tmp_path / 'text.txt').write_text(file.read(200_000), encoding='utf-8')
    prepare.main(['text', '--input=text.txt', '--tokenizer=gpt2', '--name=books', '--data_dir=d'])
    done = train('--data_dir=d', '--dataset=books', '--out_dir=x', '--max_steps=5')
    assert records('x', 'val_loss')[0] == pytest.approx(math.log(50257), rel=0.02)
    assert done['val_loss'] < math.log(50257) - 0.3


# ---- a step

class Heard(torch.nn.Linear):
    """A net of one weight that notes whether the processes exchange gradients after a part of the batch."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.exchanged, self.require_backward_grad_sync = [], None

    def forward(self, ids_BT, targets_BT):
        self.exchanged.append(self.require_backward_grad_sync)
        return self.weight.sum() * ids_BT.float().mean()


def drawn(monkeypatch, seed=1, step=0, rank=0, world=1, micro_batch=12):
    """The windows of a process in one step of 12 sequences, the net, and the loss."""
    starts, net, ids, batch_at = [], Heard(), np.arange(1000), train_lm.batch_at
    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'batch_at', lambda ids, rows, *more: starts.extend(rows) or batch_at(ids, rows, *more))
        config = configure(*SMALL, f'--seed={seed}', '--batch_size=12', f'--micro_batch={micro_batch}', '--grad_clip=0')
        run = SimpleNamespace(rank=rank, world=world, device=ALONE.device)
        loss, _ = train_lm.gradients(net, net, ids, step, config, run)
    return sorted(starts), net, loss * world


def test_a_batch_is_a_function_of_seed_and_step(monkeypatch):
    batches = {(seed, step): drawn(monkeypatch, seed, step)[0] for seed in (1, 2) for step in (0, 1, 2)}
    assert len({tuple(starts) for starts in batches.values()}) == 6
    assert batches == {(seed, step): drawn(monkeypatch, seed, step)[0] for seed in (1, 2) for step in (0, 1, 2)}
    every = sum((drawn(monkeypatch, 1, step)[0] for step in range(200)), [])
    assert min(every) < 10 and 957 < max(every) < 1000 - 32, 'windows from all of the text, each with its last target'


@pytest.mark.parametrize('world, micro_batch', [(1, 1), (1, 5), (1, 100), (2, 6), (3, 3), (4, 1), (12, 1)])
def test_a_batch_does_not_depend_on_processes_or_micro_batches(monkeypatch, world, micro_batch):
    """The processes share the windows of one process alone; each weighs them alike and exchanges gradients once."""
    whole, net, loss = drawn(monkeypatch, step=3)
    parts = [drawn(monkeypatch, 1, 3, rank, world, micro_batch) for rank in range(world)]
    assert sorted(start for starts, _, _ in parts for start in starts) == whole
    assert {len(starts) for starts, _, _ in parts} == {12 // world}
    assert np.mean([part.weight.grad.item() for _, part, _ in parts]) == pytest.approx(net.weight.grad.item(), rel=1e-5)
    for starts, part, loss in parts:
        assert loss == pytest.approx((part.weight * (np.mean(starts) + 15.5)).item(), rel=1e-5)
        n_parts = -(-12 // world // micro_batch)
        assert part.exchanged == ([False] * (n_parts - 1) + [True] if world > 1 else [None] * n_parts)


def test_micro_batches_change_no_loss(train, whole):
    for micro_batch in (1, 3):
        train(f'--micro_batch={micro_batch}', f'--out_dir=by{micro_batch}')
        for key in ('loss', 'val_loss', 'grad_norm'):
            assert records(f'by{micro_batch}', key) == pytest.approx(records(whole, key), abs=1e-5)
    train('--seed=2', '--out_dir=x')
    assert records('x', 'loss') != pytest.approx(records(whole, 'loss'), abs=1e-2)


def test_a_target_is_the_next_token():
    ids = np.arange(100, 200, dtype=np.uint16)
    ids_BT, targets_BT = train_lm.batch_at(ids, [0, 7], 4, ALONE.device)
    assert ids_BT.tolist() == [[100, 101, 102, 103], [107, 108, 109, 110]] and ids_BT.dtype == torch.int64
    assert torch.equal(targets_BT, ids_BT + 1)


def test_the_learning_rate_climbs_and_falls_to_a_tenth():
    config = dict(lr=2.0, warmup=4, max_steps=24)
    rates = [train_lm.learning_rate(step, config) for step in range(25)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0] and rates[24] == pytest.approx(0.2)
    assert rates[14] == pytest.approx(1.1), 'half way down the cosine'
    assert all(a > b for a, b in zip(rates[4:], rates[5:]))
    assert train_lm.learning_rate(1000, config) == pytest.approx(0.2)
    assert train_lm.learning_rate(0, config | dict(warmup=0)) == 2.0


def test_a_step_has_its_learning_rate_and_its_clipped_gradient(train, whole):
    config = json.loads((whole / 'config.json').read_text())
    assert records(whole, 'lr') == {step: train_lm.learning_rate(step - 1, config) for step in range(1, 13)}
    train('--out_dir=x', '--max_steps=1')
    train('--out_dir=y', '--max_steps=1', '--grad_clip=1e-12')          # so small that Adam's epsilon rules
    torch.manual_seed(1)
    first = GPT(len(prepare.WORDS), 32, 1, 2, 16, ffn='nc', quant=True).state_dict()
    bias = 'blocks.0.attn.out.bias'
    moved = lambda folder: (saved(folder)['model'][bias] - first[bias]).abs().mean()
    assert records('x', 'grad_norm') == records('y', 'grad_norm') and records('x', 'grad_norm')[1] > 0.1
    assert moved('x') > 0.004 and moved('y') < 0.1 * moved('x')


# ---- what is measured

def nc_model(**options):
    """Two layers of 64 hidden units, of them 16 Boolean: 4 pairs and 8 quantifiers (4 existential)."""
    torch.manual_seed(0)
    return GPT(11, 32, 2, 2, 16, ffn='nc', quant=True, **options)


@torch.no_grad()
def set_biases(model, **biases):
    """Memberships at sigmoid of these, in all layers and whatever the input."""
    for block in model.blocks:
        ffn = block.ffn
        ffn.up.weight.zero_()
        ffn.up.bias.fill_(100)                                  # of GELU units, which do not count
        parts = dict(a=ffn.units['and'], b=ffn.units['and_not'], q=slice(ffn.units['and_not'].stop, None))
        for name, part in parts.items():
            ffn.up.bias[part] = biases[name]


def test_saturation_is_the_share_of_memberships_near_0_or_1():
    model, ids_BT = nc_model(), torch.arange(22).reshape(2, 11) % 11
    for biases, share in ((dict(a=10, b=-10, q=10), 1), (dict(a=0, b=0, q=0), 0), (dict(a=2.9, b=-2.9, q=2.9), 0),
                          (dict(a=3, b=-3, q=-3), 1), (dict(a=0, b=0, q=10), 1 / 3), (dict(a=10, b=0, q=0), 1 / 3)):
        set_biases(model, **biases)
        assert train_lm.saturation(model, ids_BT) == pytest.approx(share), biases
    set_biases(model, a=10, b=10, q=10)
    with torch.no_grad():
        model.blocks[0].ffn.up.bias.zero_()
    assert train_lm.saturation(model, ids_BT) == pytest.approx(0.5), 'over all layers'
    assert not any(block.ffn._forward_pre_hooks for block in model.blocks)
    assert train_lm.saturation(GPT(11, 32, 2, 2, 16), ids_BT) is None


def test_memory_is_the_half_life_of_the_units_and_of_those_that_write_most():
    model = nc_model()
    half_lives = [[1, 2, 3, 4, 50, 60, 70, 80], [5, 6, 7, 1000, 90, 20, 30, 40]]     # 4 existential, 4 proportion
    norms = [[1, 1, 1, 9, 99, 99, 99, 99], [1, 1, 1, 1, 99, 99, 99, 99]]
    with torch.no_grad():
        for block, row, norm in zip(model.blocks, half_lives, norms):
            rate = 0.5 ** (1 / torch.tensor(row, dtype=torch.float64))
            block.ffn.quantifier.decay.copy_((rate / (1 - rate)).log())
            block.ffn.down.weight[:, block.ffn.units['and_not'].stop:] = torch.tensor(norm) / 4      # of 16 equal parts
    found = model.memory()
    # existential: 1 to 7 and 1000, a fifth of them is one unit; proportion: 20, 30, ... 90; a latch outlasts 32 tokens
    expected = dict(half_life_median=4, half_life_median_top=4, half_life_median_proportion=50, latches=7)
    assert found == pytest.approx(expected, rel=1e-3)
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[:, -5] = 9
    assert model.memory()['half_life_median_top'] == pytest.approx(1000, rel=1e-3)
    assert GPT(11, 32, 2, 2, 16).memory() == {}


def test_decays_have_a_learning_rate_of_their_own(train):
    start = math.log(0.5) / math.log(0.99)
    for mult in (0, 1, 100):
        train(f'--decay_lr_mult={mult}', f'--out_dir=by{mult}')
    moved = {mult: abs(records(f'by{mult}', 'half_life_median')[12] - start) for mult in (0, 1, 100)}
    assert start == pytest.approx(69, abs=0.1) and records('by100', 'half_life_median')[0] == pytest.approx(start)
    assert moved[0] < 1e-3 < moved[1] < 0.2 * start < moved[100]


# ---- stop and resume

@pytest.mark.parametrize('k', [0, 3, 5, 7, 10, 11])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(train, whole, k):
    """Before the first step, before the first save, in steps that are evaluated, and between them."""
    done = train('--out_dir=x', stop=stop_after(k))
    assert done['interrupted'] == signal.SIGTERM and done['step'] == saved('x')['step'] == k
    assert max(record['step'] for record in records('x')) == k
    done = train('--resume', '--out_dir=x')
    assert done['steps'] == 12 and 'interrupted' not in done
    assert_same_run('x', whole)


def test_a_run_can_be_stopped_again_and_again(train, whole):
    train('--out_dir=x', stop=stop_after(1))
    while 'interrupted' in train('--resume', '--out_dir=x', stop=stop_after(2)):
        pass
    assert_same_run('x', whole)


def test_a_run_without_a_checkpoint_begins_anew(train, whole):
    """It ended before its first save."""
    train('--out_dir=x', '--max_steps=3', stop=stop_after(2))
    Path('x/last.pt').unlink()
    train('--resume', '--out_dir=x', '--max_steps=12')
    assert_same_run('x', whole)


def test_a_finished_run_has_nothing_to_do_until_it_gets_more_steps(train, whole):
    first = train('--out_dir=x')
    before = contents('x')
    again = train('--resume', '--out_dir=x')
    after = contents('x')
    assert {key for key in before if before[key] != after[key]} <= {'config.json'} and before.keys() == after.keys()
    assert {**again, 'tokens_per_second': 0} == {**first, 'tokens_per_second': 0}
    assert train('--resume', '--out_dir=x', '--max_steps=14')['steps'] == 14
    assert list(records('x', 'loss')) == list(range(1, 15))
    assert json.loads(Path('x/config.json').read_text())['max_steps'] == 14


def test_settings_given_at_a_resume_count(train):
    """Those of the optimizer too, whose state brings its own."""
    for folder in ('x', 'y'):
        train(f'--out_dir={folder}', stop=stop_after(7))
    train('--resume', '--out_dir=x', '--decay_lr_mult=0', '--weight_decay=0', '--eval_every=1')
    assert len(set(list(records('x', 'half_life_median').values())[2:])) == 1, 'the decays rest'
    train('--resume', '--out_dir=y', '--weight_decay=30')
    norm = lambda folder: saved(folder)['model']['blocks.0.attn.qkv.weight'].norm()
    assert norm('y') < 0.8 * norm('x')


def test_keep_keeps_a_checkpoint_every_so_many_steps(train, whole):
    train('--out_dir=x', '--keep=4')
    kept = sorted(path.name for path in Path('x').glob('step_*.pt'))
    assert kept == ['step_000004.pt', 'step_000008.pt', 'step_000012.pt']
    assert [saved('x', name)['step'] for name in kept] == [4, 8, 12]
    train('--out_dir=y', stop=stop_after(8))
    for name, other in (('step_000008.pt', 'y'), ('step_000012.pt', whole)):
        theirs = saved(other)['model']
        assert all(torch.equal(value, theirs[key]) for key, value in saved('x', name)['model'].items())
    assert records('x') == records(whole)


# ---- signals, kills and processes

# WHEN: a step, in which SIGNAL comes to the last process, or 'save', in which it comes in the middle of writing last.pt
DRIVER = f'''
import os, signal, sys
sys.path.insert(0, {str(Path(train_lm.__file__).parent)!r})
import torch
import train_lm
gradients, build, save, models = train_lm.gradients, train_lm.build, torch.save, []

def come():
    os.kill(os.getpid(), getattr(signal, os.environ['SIGNAL']))

def watched_gradients(net, model, ids, step, config, run):
    if os.environ['WHEN'] == str(step) and run.rank == run.world - 1:
        come()
    return gradients(net, model, ids, step, config, run)

def watched_save(state, file):
    save(state, file)
    if os.environ['WHEN'] == 'save' and state['step'] > 5 and 'last.pt' in file.name:
        file.truncate(2000)
        come()

def watched_build(*args):
    models.append(build(*args))
    return models[-1]

train_lm.gradients, train_lm.build, torch.save = watched_gradients, watched_build, watched_save
try:
    train_lm.main()
finally:
    save(models[0].state_dict(), f'rank{{os.environ.get("RANK", 0)}}.pt')
'''
TORCHRUN = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']


def python(*words, when='', name=''):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300,
                          env={**PROCESS, 'OMP_NUM_THREADS': '1', 'WHEN': when, 'SIGNAL': name})


@pytest.fixture
def drive(tmp_path, data):
    """drive(when, signal's name, *words) runs the small model in a process of its own, or two, in the folder x."""
    (tmp_path / 'driver.py').write_text(DRIVER)
    return lambda when, name, *words, before=(): python(
        *before, 'driver.py', *SMALL, f'--data_dir={data}', '--out_dir=x', *words, when=when, name=name)


def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(drive, train, whole):
    done = drive('6', 'SIGTERM')
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    last = done.stderr.splitlines()[-1]
    assert 'Traceback' not in done.stderr and 'step 7' in last and '--resume --out_dir=x' in last
    assert json.loads(done.stdout.splitlines()[-1]) == dict(interrupted=signal.SIGTERM, step=7, out_dir='x')
    assert saved('x')['step'] == 7
    train('--resume', '--out_dir=x')
    assert_same_run('x', whole)


def test_sigint_does_the_same(small, train, whole, monkeypatch):
    gradients = train_lm.gradients

    def interrupted(net, model, ids, step, *more):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return gradients(net, model, ids, step, *more)
    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'gradients', interrupted)
        status, out, _ = small('--out_dir=x')
    assert status == 128 + signal.SIGINT and json.loads(out.splitlines()[-1])['step'] == saved('x')['step'] == 4
    train('--resume', '--out_dir=x')
    assert_same_run('x', whole)


@pytest.mark.parametrize('when', ['8', 'save'])
def test_kill_9_costs_the_steps_since_the_last_save(drive, train, whole, when):
    """Between two saves, and in the middle of one, which leaves half a file under another name."""
    assert drive(when, 'SIGKILL').returncode == -signal.SIGKILL
    assert saved('x')['step'] == 5 and len(records('x')) > 7
    assert len(list(Path('x').glob('*.tmp'))) == (when == 'save')
    train('--resume', '--out_dir=x')
    assert_same_run('x', whole)
    assert not list(Path('x').glob('*.tmp'))


def test_two_processes_take_the_steps_of_one(whole, data):
    done = python(*TORCHRUN, train_lm.__file__, *SMALL, f'--data_dir={data}', '--micro_batch=1', '--out_dir=x')
    assert done.returncode == 0, done.stderr
    result, = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    assert result['steps'] == 12 and result['val_loss'] == pytest.approx(records(whole, 'val_loss')[12], abs=1e-4)
    for key in ('loss', 'val_loss', 'grad_norm'):
        assert records('x', key) == pytest.approx(records(whole, key), abs=1e-4)
    assert json.loads(Path('x/config.json').read_text())['world'] == 2
    for key, value in saved(whole)['model'].items():
        assert torch.allclose(saved('x')['model'][key], value, atol=1e-3), key


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(drive, train, whole):
    done = drive('6', 'SIGTERM', before=TORCHRUN)
    assert done.returncode != 0 and '"step": 7' in done.stdout
    assert done.stderr.count('--resume --out_dir=x') == 1, 'said once'
    assert saved('x')['step'] == 7
    weights = [torch.load(f'rank{rank}.pt', weights_only=True) for rank in (0, 1)]
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]) and torch.equal(value, saved('x')['model'][key]), key
    train('--resume', '--out_dir=x')
    for key in ('loss', 'val_loss'):
        assert records('x', key) == pytest.approx(records(whole, key), abs=1e-4)


# ---- divergence

def assert_finite(folder):
    """Every checkpoint's weights and optimizer state."""
    paths = list(Path(folder).glob('*.pt'))
    for path in paths:
        state = saved(folder, path.name)
        for value in [*state['model'].values(), *(v for s in state['optimizer']['state'].values() for v in s.values())]:
            assert value.isfinite().all(), path
    return sorted(path.name for path in paths)


def test_a_first_step_too_far_ends_the_run_with_the_step_and_the_loss(small, whole):
    status, out, err = small('--lr=1e30', '--grad_clip=0', '--out_dir=x')
    said = err.splitlines()[-1]
    assert status == 3 and 'step 1:' in said and f'{records(whole, "loss")[1]:.4f}' in said
    assert 'Traceback' not in err and '{' not in out
    assert not assert_finite('x') and list(records('x', 'loss')) == [1]


def poison(monkeypatch, where):
    """Something is not finite from step 7 on."""
    gradients, mean_loss = train_lm.gradients, train_lm.mean_loss
    if where == 'weights':                                     # written by an update
        rate = train_lm.learning_rate
        monkeypatch.setattr(train_lm, 'learning_rate', lambda step, *more: math.inf if step >= 7 else rate(step, *more))
    if where in ('loss', 'gradient'):
        def broken(net, model, ids, step, *more):
            loss, norm = gradients(net, model, ids, step, *more)
            return (loss, norm) if step < 8 else (math.nan, norm) if where == 'loss' else (loss, math.inf)
        monkeypatch.setattr(train_lm, 'gradients', broken)
    if where == 'validation loss':
        reads = itertools.count()
        monkeypatch.setattr(train_lm, 'mean_loss', lambda *args: mean_loss(*args) if next(reads) < 2 else math.inf)


@pytest.mark.parametrize('where, step', [('weights', 8), ('loss', 8), ('gradient', 8), ('validation loss', 10)])
def test_a_divergence_later_leaves_finite_checkpoints(small, train, whole, monkeypatch, where, step):
    with monkeypatch.context() as patch:
        poison(patch, where)
        status, _, err = small('--out_dir=x')
    assert status == 3 and f'step {step}:' in err and f'{records("x", "loss")[step]:.4f}' in err.splitlines()[-1]
    assert assert_finite('x') == ['best.pt', 'last.pt'] and saved('x')['step'] == saved('x', 'best.pt')['step'] == 5
    train('--resume', '--out_dir=x')                            # from there, with nothing broken
    assert_same_run('x', whole)


@pytest.mark.parametrize('words, stop', [((), stop_after(8)), (('--keep=8',), NEVER)])
def test_weights_that_are_not_finite_are_never_saved(train, monkeypatch, words, stop):
    """By a stop right after the step that broke them, or by the checkpoint kept of it."""
    poison(monkeypatch, 'weights')
    with pytest.raises(train_lm.Diverged) as error:
        train('--out_dir=x', *words, stop=stop)
    assert error.value.step == 8 and error.value.loss == records('x', 'loss')[8]
    assert assert_finite('x') == ['best.pt', 'last.pt'] and saved('x')['step'] == 5


def test_a_model_that_starts_broken_is_no_traceback(small, monkeypatch):
    def broken(*args):
        model = build(*args)
        model.norm.weight.data[3] = math.nan
        return model
    build = train_lm.build
    monkeypatch.setattr(train_lm, 'build', broken)
    status, _, err = small('--out_dir=x')
    assert status == 3 and 'step 0' in err and not assert_finite('x')


# ---- nothing on disk

def test_no_steps_measure_the_model_and_leave_nothing(small, data, tmp_path):
    before = contents(data)
    for words in (['--out_dir=x'], []):
        status, out, _ = small('--max_steps=0', *words)
        done = json.loads(out.splitlines()[-1])
        assert status == 0 and done['steps'] == 0
        assert done['val_loss'] == pytest.approx(math.log(len(prepare.WORDS)), rel=0.02)
    assert not list(tmp_path.iterdir()) and contents(data) == before


def test_counting_needs_no_data_and_leaves_nothing(main, tmp_path):
    """GPT-2 small: nc has exactly GELU's count, quantifiers add their decays alone, gated kinds are within 0.2%."""
    status, out, err = main('--ffn=nc', '--quant=on', '--count_params')
    assert status == 0 and not err and not list(tmp_path.iterdir())
    n = {line[:14].strip(): int(line[14:28].replace(',', '')) for line in out.splitlines()[1:-1]}
    assert n.keys() == {*FFN_KINDS, 'nc, quant=on'}
    assert n['gelu'] == n['relu'] == n['nc'] == 124_439_808
    assert n['nc, quant=on'] - n['gelu'] == 12 * 384 < 1e-4 * n['gelu']
    for kind in ('glu', 'swiglu', 'bilinear', 'sigbilinear'):
        assert abs(n[kind] / n['gelu'] - 1) < 0.002
    assert json.loads(out.splitlines()[-1])['params'] == n['nc, quant=on']


# ---- mistakes

@pytest.mark.parametrize('words, parts', [
    (['--bool_fraction=0.5'], ['--bool_fraction', '--bool_frac ']),
    (['--n_layer=two'], ['n_layer', 'two', 'whole number']),
    (['--lr=fast'], ['lr', 'fast', 'number']),
    (['--quant=maybe'], ['quant', 'on or off']),
    (['--preset=huge'], ['huge', 'tiny']),
    (['--ffn=mlp'], ['mlp', 'gelu', 'nc']),
    (['--ffn=gelu', '--quant=on'], ['quant', 'ffn=nc', 'gelu']),
    (['--n_head=3'], ['n_embd', 'n_head', '16', '3']),
    (['--bool_frac=1.5'], ['bool_frac', '1.5']),
    (['--block_size=1000'], ['block_size=1000', '1000 tokens', 'val']),
    (['--block_size=30000'], ['block_size=30000', '20000 tokens', 'train']),
    (['--n_layer=0'], ['n_layer=0', 'at least 1']),
    (['--micro_batch=0'], ['micro_batch=0', 'at least 1']),
    (['--lr=-1'], ['lr=-1', 'negative']),
    (['--keep=-1'], ['keep=-1', 'negative']),
    (['--dataset=books'], ['books', 'python prepare.py text', '--name=books']),
    (['--device=tpu'], ['tpu', 'cpu']),
    (['--compare=all', '--seeds=1,x'], ['seeds=1,x']),
    (['--compare=gelu,mlp'], ['compare=gelu,mlp', 'mlp', 'all', 'bilinear']),
    (['--compare=nc,bilinear'], ['compare=nc,bilinear', 'expected gelu']),
    (['--resume'], ['--out_dir']),
    (['--resume', '--out_dir=missing'], ['missing']),
])
def test_a_mistake_is_one_line_and_status_2(small, tmp_path, words, parts):
    status, out, err = small(*words)
    assert (status, out, err.count('\n')) == (2, '', 1), err
    assert all(part in err for part in parts), err
    assert not list(tmp_path.iterdir()), 'and nothing is made'


def test_a_context_as_long_as_the_data_allow(train):
    assert math.isfinite(train('--block_size=999', '--max_steps=0')['val_loss'])


def test_a_batch_that_the_processes_cannot_share(data, capsys):
    run = SimpleNamespace(**vars(ALONE) | dict(world=3))
    with pytest.raises(SystemExit) as end:
        train_lm.train(configure(*SMALL, f'--data_dir={data}', '--out_dir=x'), run, NEVER)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count('\n') == 1 and 'batch_size=4' in err and '3 processes' in err
    assert not Path('x').exists()


def test_a_folder_that_holds_another_run_stays_as_it_is(small, train):
    train('--out_dir=x', '--max_steps=1')
    before = contents('x')
    status, out, err = small('--out_dir=x')
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert all(words in err for words in ('x already holds a run', '--resume', '--overwrite'))
    assert contents('x') == before
    assert small('--out_dir=x', '--overwrite')[0] == 0 and saved('x')['step'] == 12


def test_a_checkpoint_of_another_shape_stays_as_it_is(small, train):
    train('--out_dir=x', '--max_steps=1')
    before = contents('x')
    for words in (['--n_embd=32'], ['--quant=off'], ['--n_layer=2'], ['--block_size=64']):
        status, out, err = small('--resume', '--out_dir=x', '--max_steps=2', *words)
        assert (status, out, err.count('\n')) == (2, '', 1) and 'another model' in err and 'last.pt' in err
        assert contents('x') == before


@pytest.mark.parametrize('garbage', ['text', 'half', 'foreign', 'bare'])
def test_a_file_that_is_no_checkpoint_stays_as_it_is(small, train, garbage):
    train('--out_dir=x', '--max_steps=1')
    path = Path('x/last.pt')
    if garbage == 'text':
        path.write_text('hello')
    elif garbage == 'half':
        path.write_bytes(path.read_bytes()[:-5000])
    elif garbage == 'foreign':
        torch.save({'weights': torch.zeros(3)}, path)
    else:
        torch.save({'model': saved('x')['model']}, path)         # weights without the rest of a run
    before = contents('x')
    status, out, err = small('--resume', '--out_dir=x', '--max_steps=2')
    assert (status, out, err.count('\n')) == (2, '', 1) and 'last.pt' in err
    assert contents('x') == before


def test_a_full_disk_keeps_what_was_saved(small, train, whole, monkeypatch):
    save = torch.save

    def full(state, file):
        if state['step'] > 5:
            file.write(b'half')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)
    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', full)
        status, _, err = small('--out_dir=x')
    said, = [line for line in err.splitlines() if line.startswith('error: ')]      # not at the end of the progress bar
    assert status == 1 and all(part in said for part in ('cannot save', 'No space left', 'intact'))
    assert saved('x')['step'] == saved('x', 'best.pt')['step'] == 5 and not list(Path('x').glob('*.tmp'))
    train('--resume', '--out_dir=x')
    assert_same_run('x', whole)


# ---- studies

ROWS = {'gelu': dict(ffn='gelu', quant=False), 'nc, all': dict(bool_frac=1.0), 'too far': dict(lr=1e30, grad_clip=0.0)}


def test_a_study_trains_each_row_with_each_seed_once(data, train, monkeypatch, capsys):
    """Interrupted, it goes on with the run at hand; another setting is refused before anything changes."""
    trained, gradients = [], train_lm.gradients
    monkeypatch.setattr(train_lm, 'gradients', lambda *args: trained.append(args[3]) or gradients(*args))
    config = configure(*SMALL, f'--data_dir={data}', '--max_steps=4', '--eval_every=2', '--seeds=1,2')
    study = lambda stop, **more: train_lm.study('trial', ROWS, config | more, ALONE, stop, train_lm.train,
                                                train_lm.signs)
    with pytest.raises(SystemExit) as end:
        study(stop_after(5))                                    # in the second run
    assert end.value.code == 128 + signal.SIGTERM
    first, second = (Path('out/trial', name) for name in ('gelu-seed1', 'nc-all-seed1'))
    finished = contents(first), (first / 'last.pt').stat().st_mtime_ns
    assert saved(second)['step'] == 1

    results = study(NEVER)
    assert (contents(first), (first / 'last.pt').stat().st_mtime_ns) == finished
    assert trained.count(0) == trained.count(1) == 6 and trained.count(3) == 4, 'no step of a run is taken twice'
    assert list(results) == list(ROWS) and all([run['seed'] for run in runs] == [1, 2] for runs in results.values())
    for runs in (results['gelu'], results['nc, all']):
        assert [[line['step'] for line in run['curve']] for run in runs] == [[0, 2, 4]] * 2
        assert all(run['val_loss'] == run['curve'][-1]['val_loss'] for run in runs)
        assert runs[0]['val_loss'] != runs[1]['val_loss']
    assert all(run['diverged_at'] == 1 and math.isfinite(run['last_loss']) for run in results['too far'])
    train('--max_steps=4', '--eval_every=2', '--bool_frac=1', '--out_dir=alone')
    assert records(second) == records('alone')
    run, losses, norms = results['nc, all'][0], records(second, 'loss'), records(second, 'grad_norm')
    assert run['rise'] == pytest.approx(max(losses[b] - losses[a] for a in losses for b in losses if a <= b))
    assert run['spike'] == pytest.approx(max(norms[3], norms[4]) / ((norms[3] + norms[4]) / 2)), 'after two of warm-up'
    assert run['saturation'] == records(second, 'saturation')[4]

    before, trained[:] = contents('out'), []
    assert study(NEVER) == results and contents('out') == before and not trained
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        study(NEVER, weight_decay=0.3)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count('\n') == 1
    assert all(words in err for words in ('gelu-seed1', 'weight_decay=0.1', 'not 0.3'))
    assert contents('out') == before and not trained


@pytest.mark.parametrize('name, value, n_rows, digits', [('compare', '=all', 7, 4), ('boundary', '', 12, 3)])
def test_a_study_writes_numbers_table_and_figure(small, monkeypatch, name, value, n_rows, digits):
    rows = {row: keys | dict(max_steps=2) for row, keys in getattr(train_lm, name.upper()).items()}
    monkeypatch.setattr(train_lm, name.upper(), rows)
    status, out, _ = small('--ffn=gelu', '--quant=off', f'--{name}{value}', '--seeds=1,2')
    assert status == 0 and json.loads(out.splitlines()[-1]).keys() == rows.keys() and len(rows) == n_rows
    written = json.loads(Path('results', f'{name}.json').read_text())['results']
    assert written.keys() == rows.keys() and all(len(runs) == 2 for runs in written.values())
    table = Path('results', f'{name}.md').read_text()
    assert table.count('\n') == n_rows + 2 and table in out
    for runs in written.values():
        assert f'| {np.mean([run["val_loss"] for run in runs]):.{digits}f} ± ' in table
    assert Path('results', f'{name}.png').read_bytes().startswith(b'\x89PNG')


def test_a_study_of_a_text_has_its_own_name_and_no_empty_columns(small, monkeypatch):
    monkeypatch.setattr(train_lm, 'COMPARE', {row: keys | dict(max_steps=2) for row, keys in train_lm.COMPARE.items()})
    status, out, err = small('--ffn=gelu', '--quant=off', '--compare=nc,gelu', '--seeds=1,2',
                             '--dataset=licensing_shuffled')
    assert status == 0, err
    table = Path('results', 'compare_licensing_shuffled.md').read_text()
    assert 'half-life' not in table and '| nc |' in table and '| gelu |' in table and 'val loss' in table
    assert list(Path('out').iterdir()) == [Path('out/compare_licensing_shuffled')]


def test_a_comparison_with_a_run_that_diverged_is_one_line(small):
    status, _, err = small('--ffn=gelu', '--quant=off', '--compare=gelu,nc', '--seeds=7', '--lr=1e30', '--grad_clip=0')
    assert status == 3 and 'Traceback' not in err and not Path('results/compare.md').exists()
    assert err.splitlines()[-1].startswith('error: gelu diverged with seed 7 at step 1,')


def test_data_that_cannot_be_made_are_one_line(main):
    Path('file').touch()
    status, out, err = main(*SMALL, '--data_dir=file')
    assert (status, out, err.count('\n')) == (2, '', 1) and 'cannot write file/licensing' in err


def test_a_study_is_for_one_process(data, capsys):
    with pytest.raises(SystemExit) as end:
        train_lm.study('trial', ROWS, configure(*SMALL), SimpleNamespace(**vars(ALONE) | dict(world=2)), NEVER,
                       train_lm.train, train_lm.signs)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count('\n') == 1 and 'trial' in err and not Path('out').exists()


def test_a_run_is_not_resumed_as_another_function(train, capsys):
    """Weights of gelu fit relu; the run, its settings and its checkpoint stay as they are."""
    train('--out_dir=x', '--ffn=gelu', '--quant=off', stop=stop_after(3))
    before = contents('x')
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train('--resume', '--out_dir=x', '--ffn=relu')
    err = capsys.readouterr().err
    assert end.value.code == 2 and 'ffn=gelu' in err and 'relu' in err and contents('x') == before


@pytest.mark.parametrize('words, said', [('--count_params --n_head=0', 'n_head=0'),
                                         ('--compare=all --max_steps=0', 'max_steps=0')])
def test_numbers_are_checked_where_nothing_is_trained_too(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['train_lm.py', '--preset=tiny', *words.split()])
    with pytest.raises(SystemExit) as end:
        train_lm.main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count('\n') == 1 and not list(tmp_path.iterdir())
