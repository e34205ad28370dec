"""runtime.py: every mistake is one line and a status, and nothing on disk is lost on the way."""
import errno
import json
import os
import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import runtime

SCRIPT = '''"""A script of three lines.

    python train_toy.py --preset=tiny
"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
from runtime import StopSignal, all_sum, configure, finish, launch, main_first, open_run, result, Log

DEFAULTS = dict(
    # model
    n_layer=12,  # blocks, each '#' is one
    lr=6e-4, beta=0.9,  # peak rate; momentum
    # run
    quant=False,  # on needs --ffn=nc
    ffn='gelu',
    out_dir='',  # empty: a new dated folder
    resume=False,
    overwrite=False,
    device='auto',
)
PRESETS = {{'tiny': dict(n_layer=2, lr=1e-3)}}

if __name__ == '__main__':
    config = configure(__file__, DEFAULTS, rows=dict(preset=PRESETS))
    run = launch(config['device'])
    stop = StopSignal()
    folder = open_run('toy', config, run)
    log = Log(folder, main=run.main)
    for step in range(10 ** 6):
        log.write(step=step)
        if step == 3 and run.rank == run.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if signum := stop.agreed(run):
            break
    try:
        open_run('toy', {{**config, 'out_dir': str(folder)}}, run)  # is taken by now
    except SystemExit as end:
        refused = end.code
    told = main_first(run, lambda: [run.rank, step])
    try:
        main_first(run, lambda: int('what only rank 0 tries'))
    except SystemExit as end:
        failed = end.code
    facts = dict(rank=run.rank, step=step, signum=signum, refused=refused, folder=str(folder), told=told, failed=failed)
    pathlib.Path(f'rank{{run.rank}}.json').write_text(__import__('json').dumps(facts))
    result(sums=all_sum(run.rank + 1, 0.1), loss=float('nan'), third=1 / 3)
    finish()
    if run.world == 1:
        print('again', flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
'''.format(root=os.path.dirname(runtime.__file__))
pytestmark = pytest.mark.usefixtures('here')
ALONE = SimpleNamespace(rank=0, world=1, local_rank=0, device=torch.device('cpu'), main=True)
CONFIG = dict(out_dir='', resume=False, overwrite=False, seed=1)


@pytest.fixture
def toy(tmp_path):
    """toy('--key=value', ...) -> the settings of the script above."""
    path = tmp_path / 'train_toy.py'
    path.write_text(SCRIPT)
    names = runpy.run_path(str(path))
    return lambda *words, **more: runtime.configure(path, names['DEFAULTS'], {'ffn': ['gelu', 'nc']},
                                                    {'preset': names['PRESETS']}, argv=words, **more)


@pytest.fixture
def fails(capsys):
    """fails(call, *parts, status=2): call() ends with the status and one line on stderr that holds the parts."""
    def check(call, *parts, status=2):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            call()
        printed = capsys.readouterr()
        assert end.value.code == status and printed.out == ''
        assert printed.err.count('\n') == 1 and printed.err.endswith('\n'), printed.err
        for part in parts:
            assert str(part) in printed.err
    return check


# ---- command line

def test_values_take_the_type_of_their_default(toy):
    config = toy('--n-layer', '3', '--lr=3', '--beta', '-1e-3', '--quant', '--ffn=nc', '--out_dir', 'a b=ü')
    assert (config['n_layer'], config['lr'], config['beta']) == (3, 3.0, -1e-3)
    assert type(config['lr']) is float and config['quant'] is True and config['out_dir'] == 'a b=ü'
    assert toy('--ffn=nc', '--ffn=gelu')['ffn'] == 'gelu', 'the last of two wins'


@pytest.mark.parametrize('words, value', [(['--quant'], True), (['--quant', 'off'], False), (['--quant=FALSE'], False),
                                          (['--quant', 'true'], True), (['--quant', '--lr=1'], True)])
def test_switches(toy, words, value):
    assert toy(*words)['quant'] is value


def test_keys_win_over_the_preset_wherever_they_stand(toy):
    assert toy()['preset'] == '' and toy()['n_layer'] == 12
    for words in (['--preset=tiny', '--n_layer=5'], ['--n_layer=5', '--preset=tiny']):
        config = toy(*words)
        assert (config['n_layer'], config['lr'], config['preset']) == (5, 1e-3, 'tiny')


def test_one_bare_word_sets_the_positional_key(toy, fails):
    assert toy('--quant', 'nc', '--n_layer=1', positional='ffn')['ffn'] == 'nc'
    fails(lambda: toy('nc', 'gelu', positional='ffn'), "'gelu'")
    fails(lambda: toy('swiglu', positional='ffn'), 'gelu, nc')


@pytest.mark.parametrize('words, parts', [
    (['--n_layr=3'], ['--n_layr', '--n_layer']),
    (['--LR=3'], ['--lr']),
    (['--zzzz'], ['--zzzz', 'nearest']),
    (['--'], ['unknown key']),
    (['--n_layer=1.5'], ['1.5', 'whole number', '12']),
    (['--n_layer=1e3'], ['whole number']),
    (['--n_layer=' + '9' * 30], ['whole number']),
    (['--n_layer='], ['whole number']),
    (['--lr=fast'], ['fast', 'finite number']),
    (['--lr=nan'], ['finite number']),
    (['--lr', '-inf'], ['finite number']),
    (['--quant=maybe'], ['on or off']),
    (['--quant', 'maybe'], ["unexpected word 'maybe'"]),
    (['--n_layer'], ['--n_layer', 'no value']),
    (['--n_layer', '--quant'], ['--n_layer', 'no value']),
    (['nc'], ["unexpected word 'nc'"]),
    (['-n', '3'], ["unexpected word '-n'"]),
    (['two\nlines'], ['unexpected word']),
    (['--ffn=two\nlines'], ['gelu, nc']),
    (['--preset=huge'], ['huge', 'tiny']),
    (['--ffn=swiglu'], ['swiglu', 'gelu, nc']),
    (['--resume'], ['--out_dir=FOLDER']),
    (['--resume', '--overwrite', '--out_dir=x'], ['one of the two']),
    (['--resume', '--out_dir=missing'], ['missing', 'config.json']),
    (['--resume', '--out_dir=latest'], ['out/toy']),
])
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(toy, fails, words, parts):
    fails(lambda: toy(*words), *parts)


def test_a_script_without_presets_knows_no_preset(fails):
    assert runtime.configure('x.py', {'n': 1}, argv=[]) == {'n': 1}
    fails(lambda: runtime.configure('x.py', {'n': 1}, argv=['--preset=tiny']), 'unknown key --preset')


ROWS = dict(task=dict(easy=dict(n=1, lr=1.0), hard=dict(n=2, lr=2.0, wide=True)),
            preset=dict(quick=dict(task='easy', lr=3.0), wide=dict(wide=True)), kind=dict(a={}, b=dict(lr=4.0)))


@pytest.fixture
def rowed(tmp_path):
    """rowed('--key=value', ...) -> (n, lr, wide, task) of a script whose task, preset and kind bring rows."""
    defaults = dict(n=0, lr=0.0, wide=False, task='', kind='a', out_dir='', resume=False)

    def call(*words):
        config = runtime.configure(tmp_path / 'x.py', defaults, rows=ROWS, choices=dict(kind=ROWS['kind']), argv=words)
        assert config.keys() == {*defaults, 'preset'}
        return config['n'], config['lr'], config['wide'], config['task']
    return call


@pytest.mark.parametrize('words, expected', [
    ('', (0, 0, False, '')),
    ('--task=easy', (1, 1, False, 'easy')),
    ('--preset=quick', (1, 3, False, 'easy')),                  # a row names another, and is over it
    ('--preset=quick --task=hard', (2, 3, True, 'hard')),       # a key given is over a row that names it
    ('--task=hard --preset=quick', (2, 3, True, 'hard')),
    ('--preset=wide --task=easy', (1, 1, True, 'easy')),
    ('--kind=b --preset=quick', (1, 4, False, 'easy')),         # of two rows, that of the later key
    ('--kind=b --task=hard --lr=5 --wide=off', (2, 5, False, 'hard')),
    ('--task=other', (0, 0, False, 'other')),                   # a value without a row brings nothing
])
def test_rows_of_settings_lie_over_the_defaults_in_their_order_and_under_keys_given(rowed, words, expected):
    assert rowed(*words.split()) == expected


def test_rows_have_their_choices_like_presets(rowed, fails):
    fails(lambda: rowed('--preset=slow'), '--preset=slow', 'quick, wide')
    fails(lambda: rowed('--kind=c'), '--kind=c', 'a, b')


def test_rows_given_at_a_resume_lie_over_the_saved_settings_and_no_others(rowed, tmp_path):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x/config.json').write_text(json.dumps(dict(n=7, lr=8.0, task='hard', kind='b', preset='quick')))
    assert rowed('--resume', '--out_dir=x') == (7, 8, False, 'hard')
    assert rowed('--resume', '--out_dir=x', '--task=easy') == (1, 1, False, 'easy')
    assert rowed('--resume', '--out_dir=x', '--kind=b', '--n=9') == (9, 4, False, 'hard')


def test_help_ends_with_what_each_row_means(tmp_path, capsys):
    (tmp_path / 'x.py').write_text('DEFAULTS = dict(lr=0.0, kind="a")\n')
    with pytest.raises(SystemExit):
        runtime.configure(tmp_path / 'x.py', dict(lr=0.0, kind='a'), rows=dict(kind=ROWS['kind']), argv=['--help'])
    assert capsys.readouterr().out.endswith('--kind=a means the defaults\n\n--kind=b means --lr=4.0\n')


def test_resume_starts_from_the_saved_settings(toy, tmp_path, fails):
    saved = dict(n_layer=7, lr=2, beta=0.5, ffn='nc', preset='tiny', device='cuda', overwrite=True, git='abc', old=1)
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x/config.json').write_text(json.dumps(saved))
    config = toy('--resume', '--out_dir=x', '--beta=0.8')
    assert (config['n_layer'], config['lr'], config['beta'], config['ffn']) == (7, 2, 0.8, 'nc')
    assert config['resume'] and config['preset'] == 'tiny' and config['out_dir'] == 'x'
    assert config['device'] == 'auto' and not config['overwrite'] and not {'git', 'old'} & config.keys()
    assert toy('--resume', '--out_dir=x', '--preset=tiny')['n_layer'] == 2, 'a preset given now wins'

    (tmp_path / 'out/toy').mkdir(parents=True)
    (tmp_path / 'x').rename(tmp_path / 'out/toy/x')
    (tmp_path / 'out/toy/x/last.pt').touch()
    config = toy('--resume', '--out_dir=latest')
    assert config['n_layer'] == 7 and config['out_dir'] == os.path.join('out', 'toy', 'x')

    for text in ('{"n_layer": "7"}', '{"n_layer": true}', '{"n_layer": 1', '3', ''):
        (tmp_path / 'out/toy/x/config.json').write_text(text)
        fails(lambda: toy('--resume', '--out_dir=latest'), 'config.json')


@pytest.mark.parametrize('key', ['max_steps', 'epochs'])
def test_resume_is_for_training(tmp_path, fails, key):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x/config.json').write_text(json.dumps({key: 3}))
    configure = lambda *words: runtime.configure('x.py', {key: 1, 'out_dir': '', 'resume': False}, argv=words)
    assert configure('--resume', '--out_dir=x')[key] == 3
    fails(lambda: configure('--resume', '--out_dir=x', f'--{key}=0'), f'{key}=0: --resume continues', 'at least 1')


@pytest.mark.parametrize('form', ['dict(...)', '{...}'])
def test_help_is_the_docstring_and_each_key_with_its_comment(tmp_path, capsys, form):
    path = tmp_path / 'x.py'
    body = {'dict(...)': "dict(\n    # size\n    n=3,  # how '#' many\n    on=True, s='#',\n)",
            '{...}': "{\n    # size\n    'n': 3,  # how '#' many\n    'on': True, 's': '#',\n}"}[form]
    path.write_text(f'"""Manual."""\nOTHER = {{"n": 1}}\nDEFAULTS = {body}\n')
    with pytest.raises(SystemExit) as end:
        runtime.configure(path, dict(n=3, on=True, s='#'), rows=dict(preset=dict(tiny=dict(n=1, on=False))),
                          argv=['--bad', '--help'])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert not end.value.code
    assert lines == [['Manual.'], ['settings,', '--key=value:'], ['size'], ['--n=3', 'how', "'#'", 'many'], ['--on=on'],
                     ['--s=#'], ['--preset=tiny', 'means', '--n=1', '--on=off']]


# ---- device

def test_one_process_has_the_device_it_asks_for(fails):
    run = runtime.launch('cpu')
    assert (run.rank, run.world, run.main, run.device) == (0, 1, True, torch.device('cpu'))
    assert runtime.launch().device.type == ('cuda' if torch.cuda.is_available() else
                                            'mps' if torch.backends.mps.is_available() else 'cpu')
    assert runtime.all_sum(1, torch.tensor(0.5)) == [1.0, 0.5]
    for device in ('cuda:99', 'tpu', 'cuda:x', ''):
        fails(lambda: runtime.launch(device), 'auto', 'cpu')


def test_precision_rules_the_products():
    a = torch.eye(2)
    with runtime.precision('cpu', 'bfloat16'):
        assert (a @ a).dtype == torch.bfloat16
    with runtime.precision(torch.device('cpu'), 'float32'):
        assert (a @ a).dtype == torch.float32


# ---- run folder

def test_runs_of_one_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(runtime.time, 'strftime', lambda form: '20261130-041500')
    folders = [runtime.open_run('lm', CONFIG, ALONE) for _ in range(3)]
    assert [folder.as_posix() for folder in folders] == [f'out/lm/20261130-041500{end}' for end in ('', '-2', '-3')]


def test_config_json_records_the_run(tmp_path):
    folder = runtime.open_run('lm', {**CONFIG, 'out_dir': 'ü'}, ALONE)
    saved = json.loads((tmp_path / 'ü/config.json').read_text())
    assert folder.samefile(tmp_path / 'ü') and saved['out_dir'] == 'ü' and saved['seed'] == 1
    assert saved['git'] == runtime.git_revision() and saved['torch'] == torch.__version__
    assert saved['device'] == 'cpu' and saved['world'] == 1 and saved['time'] and 'pytest' in saved['command']


def contents(folder):
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.rglob('*')}


@pytest.mark.parametrize('name', ['config.json', 'log.jsonl', 'last.pt', 'step_100.pt'])
def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path, fails, name):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / name).write_text('precious')
    before = contents(tmp_path)
    fails(lambda: runtime.open_run('lm', {**CONFIG, 'out_dir': 'x'}, ALONE), 'x already holds a run', '--overwrite')
    assert contents(tmp_path) == before
    assert runtime.open_run('lm', {**CONFIG, 'out_dir': 'x', 'resume': True}, ALONE).name == 'x'
    assert contents(tmp_path) == before


def test_overwrite_removes_the_run_and_nothing_else(tmp_path, fails):
    (tmp_path / 'x/sub').mkdir(parents=True)
    for name in ('config.json', 'log.jsonl', 'last.pt', 'best.pt', 'last.pt.7.tmp', 'notes.txt', 'sub/last.pt'):
        (tmp_path / 'x' / name).write_text('old')
    (tmp_path / 'x/step.pt').mkdir()
    before = contents(tmp_path)
    overwrite = {**CONFIG, 'out_dir': 'x', 'overwrite': True}
    fails(lambda: runtime.open_run('lm', overwrite, ALONE), 'step.pt is a folder')
    assert contents(tmp_path) == before
    (tmp_path / 'x/step.pt').rmdir()
    runtime.open_run('lm', overwrite, ALONE)
    assert {path.name for path in (tmp_path / 'x').iterdir()} == {'config.json', 'notes.txt', 'sub'}
    assert (tmp_path / 'x/sub/last.pt').exists() and json.loads((tmp_path / 'x/config.json').read_text())['seed'] == 1


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path, fails, monkeypatch):
    (tmp_path / 'file').write_text('precious')
    for out_dir in ('file', 'file/below', 'n' * 300):
        fails(lambda: runtime.open_run('lm', {**CONFIG, 'out_dir': out_dir}, ALONE), 'cannot use', out_dir)
    assert (tmp_path / 'file').read_text() == 'precious'
    (tmp_path / 'out').write_text('')
    fails(lambda: runtime.open_run('lm', CONFIG, ALONE), 'cannot use out')
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x/last.pt').write_text('precious')
    monkeypatch.setattr(os, 'access', lambda path, mode: False)  # for root, every folder is writable
    for mode in ('resume', 'overwrite'):
        fails(lambda: runtime.open_run('lm', {**CONFIG, 'out_dir': 'x', mode: True}, ALONE), 'not writable')
    assert (tmp_path / 'x/last.pt').read_text() == 'precious'


def test_a_folder_in_which_another_process_trains_is_refused_until_it_ends(tmp_path):
    code = ('import sys; sys.path.insert(0, sys.argv[1]); import runtime; '
            'runtime.open_run("lm", dict(out_dir="x", resume=sys.argv[2] == "resume", overwrite=True), '
            'runtime.launch("cpu"))')
    other = lambda mode: shell('-c', code, os.path.dirname(runtime.__file__), mode, cwd=tmp_path)
    runtime.open_run('lm', {**CONFIG, 'out_dir': 'x'}, ALONE)
    before = contents(tmp_path)
    for mode in ('resume', 'overwrite'):
        done = other(mode)
        assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1), done.stderr
        assert 'another process trains in x' in done.stderr and contents(tmp_path) == before
    runtime.open_run('lm', {**CONFIG, 'out_dir': 'x', 'resume': True}, ALONE)       # itself may come back
    runtime.open_run('lm', {**CONFIG, 'out_dir': 'y'}, ALONE)
    assert other('resume').returncode == 0


def test_without_locks_in_the_file_system_there_is_none(monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(runtime.fcntl, 'flock', refuses)
    assert runtime.open_run('lm', {**CONFIG, 'out_dir': 'x'}, ALONE).name == 'x'


def test_a_resumed_run_clears_away_what_a_kill_left_of_a_save(tmp_path):
    runtime.open_run('lm', {**CONFIG, 'out_dir': 'x'}, ALONE)
    for name in ('last.pt.7.tmp', 'last.pt', 'my.tmp'):
        (tmp_path / 'x' / name).touch()
    runtime.open_run('lm', {**CONFIG, 'out_dir': 'x', 'resume': True}, ALONE)
    assert {path.name for path in (tmp_path / 'x').iterdir()} == {'config.json', 'last.pt', 'my.tmp'}


def test_latest_is_the_newest_checkpoint_not_the_newest_folder(tmp_path, fails):
    for when, name in enumerate(('a/last.pt', 'c/last.pt', 'b/best.pt', 'd/config.json')):
        path = tmp_path / 'out/lm' / name
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (when, when))
    assert runtime.latest('lm').as_posix() == 'out/lm/b'
    fails(lambda: runtime.latest('cls'), 'out/cls')


def test_without_git_there_is_no_revision(monkeypatch):
    monkeypatch.setenv('PATH', '')
    assert runtime.git_revision() is None


# ---- log

def test_the_log_of_a_resumed_run_equals_that_of_an_uninterrupted_one(tmp_path):
    def write(steps, resumed_from=None):
        log = runtime.Log(tmp_path, resumed_from)
        for step in steps:
            log.write(step=step, loss=1 / (step + 3))
    path = tmp_path / 'log.jsonl'
    write(range(8))
    whole = path.read_bytes()
    for torn in (b'', b'{"step": 6, "lo', b'{"step": 2, "lo', b'\0\0\xff', b'[]'):
        path.unlink()
        write(range(6))
        with open(path, 'ab') as file:
            file.write(torn)
        write(range(4, 8), resumed_from=3)
        assert path.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ['log.jsonl']


def test_log_records_are_strict_json_on_disk_at_once(tmp_path):
    log = runtime.Log(tmp_path)
    log.write(step=1, loss=float('nan'), rates=[0.1, float('inf')], by={'a': torch.tensor(0.5)}, text='ü')
    runtime.Log(tmp_path, main=False).write(step=2)
    line, = (tmp_path / 'log.jsonl').read_text().splitlines()
    assert json.loads(line) == dict(step=1, loss=None, rates=[0.1, None], by={'a': 0.5}, text='ü')
    assert 'NaN' not in line and 'Infinity' not in line


# ---- checkpoints

STATE = {'model': {'w': torch.arange(1e5)}, 'step': 5}


def test_a_checkpoint_comes_back(tmp_path):
    runtime.save_checkpoint(tmp_path / 'last.pt', STATE)
    state = runtime.load_checkpoint(tmp_path / 'last.pt')
    assert torch.equal(state['model']['w'], STATE['model']['w']) and state['step'] == 5
    assert [path.name for path in tmp_path.iterdir()] == ['last.pt']


class FullDisk:
    """A file on a disk that has room for `room` bytes."""

    def __init__(self, path, mode, room=1000):
        self.file, self.room = FullDisk.open(path, mode), room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    open = staticmethod(open)


@pytest.mark.parametrize('where', ['write', 'flush', 'fsync', 'rename'])
def test_a_full_disk_costs_only_the_checkpoint_at_hand(tmp_path, monkeypatch, fails, where):
    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path = tmp_path / 'last.pt'
    runtime.save_checkpoint(path, STATE)
    with monkeypatch.context() as patch:
        if where in ('write', 'flush'):
            patch.setattr(runtime, 'open', FullDisk, raising=False)
        if where == 'flush':
            patch.setattr(FullDisk, 'write', lambda self, data: self.file.write(data))
            patch.setattr(FullDisk, 'flush', no_space, raising=False)
        patch.setattr(os, {'fsync': 'fsync', 'rename': 'replace'}.get(where, 'sync'), no_space)
        fails(lambda: runtime.save_checkpoint(path, {**STATE, 'step': 6}),
              'cannot save', path, 'No space left', 'intact', status=1)
    assert runtime.load_checkpoint(path)['step'] == 5
    assert [path.name for path in tmp_path.iterdir()] == ['last.pt']


def test_a_log_on_a_full_disk_is_one_line(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(runtime, 'open', lambda path, mode, **_: FullDisk(path, mode, room=10), raising=False)
    fails(lambda: runtime.Log(tmp_path).write(step=1, loss=0.5), 'cannot save', 'No space left', status=1)


def test_a_folder_named_last_pt_is_one_line(tmp_path, fails):
    (tmp_path / 'last.pt').mkdir()
    fails(lambda: runtime.save_checkpoint(tmp_path / 'last.pt', STATE), 'cannot save', 'last.pt', status=1)
    fails(lambda: runtime.load_checkpoint(tmp_path / 'last.pt'), 'last.pt')
    assert [path.name for path in tmp_path.iterdir()] == ['last.pt']


def test_a_bug_in_the_state_leaves_the_old_checkpoint(tmp_path):
    runtime.save_checkpoint(tmp_path / 'last.pt', STATE)
    with pytest.raises(Exception, match='lambda'):
        runtime.save_checkpoint(tmp_path / 'last.pt', {'model': lambda: 0})
    assert runtime.load_checkpoint(tmp_path / 'last.pt')['step'] == 5
    assert [path.name for path in tmp_path.iterdir()] == ['last.pt']


def test_two_processes_never_write_one_temporary_file(tmp_path):
    names = []
    runtime.replace_file(tmp_path / 'x', lambda file: names.extend(path.name for path in tmp_path.iterdir()))
    assert names == [f'x.{os.getpid()}.tmp'] and [path.name for path in tmp_path.iterdir()] == ['x']


def test_a_checkpoint_cut_short_is_called_damaged(tmp_path, fails):
    path = tmp_path / 'last.pt'
    runtime.save_checkpoint(path, STATE)
    whole = path.read_bytes()
    for size in range(0, len(whole), 4300):
        path.write_bytes(whole[:size])
        fails(lambda: runtime.load_checkpoint(path), path, 'damaged', 'another', '--overwrite')


class Evil:
    def __reduce__(self):
        return os.mkdir, ('harmed',)


def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, fails):
    path = tmp_path / 'last.pt'
    fails(lambda: runtime.load_checkpoint(path), 'no checkpoint', path)
    runtime.save_checkpoint(path, STATE)
    whole = path.read_bytes()
    cuts = [whole[:size] for size in (0, 100, len(whole) // 2, len(whole) - 1)]
    for data in (b'hello world', b'\x80\x02', b'PK\x03\x04', bytes(1000), *cuts):
        path.write_bytes(data)
        fails(lambda: runtime.load_checkpoint(path), path)
    for foreign in ({'weights': 1}, [1, 2], torch.zeros(3), {'model': 1}['model'], {'model': Evil()}):
        torch.save(foreign, path)
        fails(lambda: runtime.load_checkpoint(path), path)
    assert not (tmp_path / 'harmed').exists()


def test_weights_of_another_model_name_the_first_mismatch(fails):
    module = torch.nn.Linear(3, 2)
    good = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    runtime.load_weights(module, good, 'x.pt')
    assert (module.weight == 1).all()
    zero = {name: torch.zeros_like(value) for name, value in good.items()}
    for wrong, parts in (({**zero, 'bias': torch.zeros(5)}, ('bias is (5,)', '(2,)')),
                         ({'weight': zero['weight']}, ('bias is absent', '(2,)')),
                         ({**zero, 'extra': torch.zeros(())}, ('extra is ()', 'absent')),
                         ({**zero, 'bias': 3}, ('bias is no tensor',)), ([1], ())):
        fails(lambda: runtime.load_weights(module, wrong, 'x.pt'), 'x.pt', *parts)
    assert (module.weight == 1).all(), 'a refused file changes nothing'


def test_a_run_of_other_settings_is_named_before_its_optimizer_is_read(tmp_path, fails):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = lambda **more: runtime.save_checkpoint('last.pt', dict(
        model=model.state_dict(), optimizer=optimizer.state_dict(), config=dict(a=1, b=False), step=5) | more)
    restore = lambda model=model, **config: runtime.restore(
        'last.pt', model, optimizer, dict(a=1, b=False) | config, 'cpu', loop=('step',), same=('a', 'b'), own=())
    save()
    assert restore() == [5]
    fails(lambda: restore(b=True), 'last.pt', 'with b=off, not on')
    save(optimizer={'state': {}, 'param_groups': []}, model={})
    fails(lambda: restore(a=2), 'last.pt', 'with a=1, not 2')
    fails(restore, 'weight is absent')
    save(optimizer={'state': {}, 'param_groups': []})
    fails(restore, 'last.pt', 'damaged')
    for config in ([1], {'a': 1}, None):
        save(config=config)
        fails(restore, 'last.pt', 'damaged')


# ---- signals

@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_an_interruptible_block_is_one_line(fails, signum):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    tidied = []

    def block():
        with runtime.interruptible('nothing was changed'):
            try:
                os.kill(os.getpid(), signum)
                signal.pause()
            finally:
                tidied.append(signum)
    fails(block, 'error: interrupted: nothing was changed', status=128 + signum)
    assert tidied == [signum] and (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# ---- studies

@pytest.fixture
def study():
    """study(**settings) -> results of two rows with each seed; study.trained: the settings of what was trained."""
    def call(rows=('a', 'b, c'), **settings):
        def train(settings, run, stop):
            runtime.open_run('trial', settings, run)
            call.trained.append(settings)
            return dict(val_loss=settings['lr'])
        config = CONFIG | dict(seeds='1,2', lr=0.5, max_steps=3, compare='all', boundary=True) | settings
        return runtime.study('trial', {row: {} for row in rows}, config, ALONE, None, train,
                             lambda outcome, *_: outcome)
    call.trained = []
    return call


def test_a_study_of_no_steps_is_refused(study, tmp_path, fails):
    for key in ('max_steps', 'epochs'):
        fails(lambda: study(**{key: 0}), f'{key}=0', 'at least 1')
    assert not list(tmp_path.iterdir()) and not study.trained


def test_a_study_has_its_own_folders(study, tmp_path, fails):
    for words in (dict(out_dir='x'), dict(overwrite=True)):
        fails(lambda: study(**words), 'out/trial', '--out_dir', '--overwrite')
    assert not list(tmp_path.iterdir())


def test_each_run_of_a_study_has_the_settings_to_go_on_alone(study, tmp_path):
    study()
    for settings in study.trained:
        assert (settings['compare'], settings['boundary'], settings['resume']) == ('', False, False)
    saved = json.loads((tmp_path / 'out/trial/b-c-seed2/config.json').read_text())
    assert (saved['compare'], saved['boundary'], saved['seed'], saved['lr']) == ('', False, 2, 0.5)
    (tmp_path / 'out/trial/a-seed1/result.json').unlink()
    (tmp_path / 'out/trial/a-seed1/config.json').write_text(json.dumps(
        saved | dict(seed=1, compare='all', out_dir='out/trial/a-seed1')))
    study(compare='a')
    assert len(study.trained) == 5 and study.trained[-1]['resume'], 'which rows were asked for does not matter'


@pytest.mark.parametrize('name, content', [
    ('config.json', None), ('config.json', '{"lr": 0.'), ('config.json', '[]'), ('result.json', ''),
    ('result.json', '{"val_loss"'), ('result.json', '[1]')])
def test_a_damaged_file_of_a_study_is_named_and_left(study, tmp_path, fails, name, content):
    study()
    path = tmp_path / 'out/trial/a-seed2' / name
    path.unlink() if content is None else path.write_text(content)
    before = contents(tmp_path)
    fails(study, f'cannot read out/trial/a-seed2/{name}', 'move out/trial/a-seed2 away')
    assert contents(tmp_path) == before and len(study.trained) == 4


def test_results_that_cannot_be_written_are_known_before_the_training(study, tmp_path, fails, monkeypatch):
    (tmp_path / 'results').write_text('precious')
    fails(study, 'cannot save results', status=1)
    (tmp_path / 'results').unlink()
    monkeypatch.setattr(os, 'access', lambda path, mode: path.name != 'results')
    fails(study, 'cannot save results: it is not writable', status=1)
    assert not study.trained and not (tmp_path / 'out').exists()


@pytest.mark.parametrize('seeds', ['1,1', '-1', '1,4294967296', '', '1,', 'x', '1 2', '01,1'])
def test_seeds_are_different_numbers_that_a_generator_takes(study, tmp_path, fails, seeds):
    fails(lambda: study(seeds=seeds), f'seeds={seeds}:', 'from 0 to 4294967295')
    assert not list(tmp_path.iterdir())


def test_the_ends_of_the_range_are_seeds():
    assert runtime.seeds_of('4294967295,0') == [4294967295, 0]
    for seed in runtime.seeds_of('4294967295,0'):
        np.random.RandomState(seed), np.random.default_rng(seed), torch.manual_seed(seed)


def test_one_seed_is_checked_like_many(fails):
    configure = lambda seed: runtime.configure('x.py', dict(seed=1), argv=[f'--seed={seed}'])
    assert configure(0)['seed'] == 0 and configure(4294967295)['seed'] == 4294967295
    for seed in (-1, 4294967296, 10 ** 18):
        fails(lambda: configure(seed), f'seed={seed}:', 'no negative number, and at most 4294967295')


# ---- result, and whole runs

def test_the_result_is_one_strict_json_line_from_rank_0(capsys, monkeypatch):
    runtime.result(val_loss=1.23456789, n=12, tiny=1.23456789e-9, bad=float('inf'), name='ü')
    line, = capsys.readouterr().out.splitlines()
    assert json.loads(line) == dict(val_loss=1.23457, n=12, tiny=1.23457e-9, bad=None, name='ü')
    monkeypatch.setenv('RANK', '1')
    runtime.result(n=12)
    with pytest.raises(SystemExit) as end:
        runtime.fail('heard once is enough', status=3)
    assert end.value.code == 3 and capsys.readouterr() == ('', '')


def shell(*words, cwd):
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_first_signal_is_a_wish_and_the_second_is_the_end(toy, tmp_path):
    done = shell('train_toy.py', '--device=cpu', cwd=tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stderr.count('\n') == 2 and 'already holds a run' in done.stderr and 'rank 0 tries' in done.stderr
    values, again = done.stdout.splitlines()
    assert json.loads(values) == dict(sums=[1, 0.1], loss=None, third=0.333333) and again == 'again'
    facts = json.loads((tmp_path / 'rank0.json').read_text())
    assert (facts['step'], facts['signum'], facts['refused']) == (3, signal.SIGTERM, 2)


def test_a_wrong_word_ends_a_script_with_status_2(toy, tmp_path):
    done = shell('train_toy.py', '--n_layers=3', cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.count('\n') == 1 and '--n_layer ' in done.stderr
    assert not (tmp_path / 'out').exists()


def test_two_processes_share_the_folder_the_sums_and_the_step_of_the_stop(toy, tmp_path):
    done = shell('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train_toy.py', '--device=cpu',
                 cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict(sums=[3, 0.2], loss=None, third=0.333333)
    assert done.stderr.count('error: ') == 2 and done.stderr.count('rank 0 tries') == 1
    facts = [json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in (0, 1)]
    for fact in facts:
        assert (fact['step'], fact['signum'], fact['refused']) == (3, signal.SIGTERM, 2)
        assert fact['told'] == [0, 3] and fact['failed'] == 2
    assert facts[0]['folder'] == facts[1]['folder']
    assert [json.loads(line)['step'] for line in open(tmp_path / facts[0]['folder'] / 'log.jsonl')] == [0, 1, 2, 3]
    assert json.loads((tmp_path / facts[0]['folder'] / 'config.json').read_text())['world'] == 2
