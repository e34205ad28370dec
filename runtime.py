"""What every run shares: command line, device and processes, run folder, log, checkpoints, signals, result.

A script keeps its settings in one plain dict with a trailing comment beside each key, and runs in this order:

    config = configure(__file__, DEFAULTS, rows=dict(preset=PRESETS))      # wrong words end here, before any loading
    run = launch(config['device'])                    # one process, or one of torchrun's
    folder = open_run('lm', config, run)              # the last thing before training: --overwrite deletes here
    log, stop = Log(folder, main=run.main), StopSignal()
    ...                                               # log.write, save_checkpoint, stop.agreed(run)
    result(val_loss=loss)                             # one JSON object, the last line of stdout
    finish()

What a user can cause ends in fail(): one line on stderr and a status, 2 for bad input, 1 for a disk that refuses.
"""

import ast
import contextlib
import difflib
import fcntl
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

SWITCH = {'on': True, 'true': True, 'off': False, 'false': False}
WANTED = {bool: 'on or off', int: 'a whole number of at most 63 bits', float: 'a finite number', str: 'text'}
LIMIT = {int: 2 ** 63, float: math.inf}
MAX_SEED = 2 ** 32 - 1      # NumPy's
# All that --overwrite may delete; .tmp is what a kill in the middle of a save leaves.
RUN_FILES = [name + end for name in ('config.json', 'log.jsonl', 'eval.json', 'result.json', '*.pt', 'interpret.json',
                                     'over.json', 'over.png', 'half_lives.png', 'redundancy.png')
             for end in ('', '.*.tmp')]


def speaks():
    """True in the one process that prints."""
    return os.environ.get('RANK', '0') == '0'


def fail(message, status=2):
    """One line on stderr, from rank 0 alone; then SystemExit(status) in every process."""
    if speaks():
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
    raise SystemExit(status)


# ---- command line

def configure(script, defaults, choices=None, rows=None, argv=None, positional=None):
    """The settings of a run, as a dict: defaults < saved (with --resume) < rows < keys given.

    script is the caller's __file__, whose source gives --help its text; choices maps a key to the values allowed; rows
    maps a key to the settings that each of its values brings, {'preset': {'tiny': {'n_layer': 4}}}, the later key's
    over the earlier's, and a key that defaults lack is one that may name a row; positional names the key that one bare
    word may set. A value takes the type of its default. The result has every key of defaults and rows. Every mistake is
    fail().
    """
    words = sys.argv[1:] if argv is None else list(argv)
    defaults, choices, rows = dict(defaults), dict(choices or {}), rows or {}
    if '--help' in words or '-h' in words:
        if speaks():
            print(help_text(script, defaults, rows))
        raise SystemExit(0)
    for key in [key for key in rows if key not in defaults]:
        defaults[key], choices[key] = '', [*rows[key], '']
    given = read_words(words, defaults, positional)

    def brought(names):
        return {key: value for name, row in rows.items() for key, value in row.get(names.get(name), {}).items()}

    named = {**defaults, **given}
    named = {**defaults, **brought(named), **given}             # a row may name another, as a preset its task
    config = {**defaults, **brought(named), **given}
    if config.get('resume'):
        saved = resumed(script, config, defaults)
        config = {**config, **saved, **brought(given), **given, 'out_dir': saved['out_dir']}
        check_trains(config, '--resume continues the training of a run')
    for key, allowed in choices.items():
        if config[key] not in allowed:
            fail(f'--{key}={shown(config[key])}: expected one of {", ".join(map(shown, allowed))}')
    if not 0 <= config.get('seed', 0) <= MAX_SEED:
        fail(f'seed={config["seed"]}: expected no negative number, and at most {MAX_SEED}')
    return config


def read_words(words, defaults, positional):
    """Words of the command line -> {key: value}; the last of two wins."""
    given, words = {}, list(words)
    while words:
        word = words.pop(0)
        if not word.startswith('--'):
            if word.startswith('-') or positional is None or positional in given:
                fail(f'unexpected word {word!r}: settings are written --key=value (--help lists them)')
            given[positional] = typed(positional, word, defaults[positional])
            continue
        name, equals, text = word[2:].partition('=')
        key = name.replace('-', '_')
        if key not in defaults:
            nearest = difflib.get_close_matches(key.lower(), defaults, n=1, cutoff=0)[0]
            fail(f'unknown key --{name}: the nearest is --{nearest} (--help lists all)')
        if not equals and isinstance(defaults[key], bool):
            text = words.pop(0) if words and words[0].lower() in SWITCH else 'on'
        elif not equals:
            if not words or words[0].startswith('--'):
                fail(f'--{name} has no value: expected {WANTED[type(defaults[key])]}, as in --{key}=VALUE')
            text = words.pop(0)
        given[key] = typed(key, text, defaults[key])
    return given


def typed(key, text, default):
    """text as a value of default's type."""
    kind = type(default)
    try:
        value = SWITCH[text.lower()] if kind is bool else kind(text)
        if kind in LIMIT and not abs(value) < LIMIT[kind]:  # nan compares false, so it is refused as well
            raise ValueError
        return value
    except (KeyError, ValueError):
        fail(f'--{key}={text}: expected {WANTED[kind]} (the default is {shown(default)})')


def check_numbers(config, positive, not_negative):
    """Ends in one line where a number of these keys is below 1, or below 0."""
    for key in positive:
        if config[key] < 1:
            fail(f'{key}={config[key]}: expected at least 1')
    for key in not_negative:
        if config[key] < 0:
            fail(f'{key}={config[key]}: expected no negative number')


def check_trains(config, why):
    """Ends in one line where no step would be taken."""
    for key in ('max_steps', 'epochs'):
        if config.get(key, 1) < 1:
            fail(f'{key}={config[key]}: {why}, expected at least 1')


def shown(value):
    """value as one would type it."""
    return {True: 'on', False: 'off'}[value] if isinstance(value, bool) else str(value) or "''"


def resumed(script, config, defaults):
    """The settings saved in the run that --resume continues, less those that belong to one start of it.

    out_dir=latest is the newest run of this script: in out/lm for train_lm.py.
    """
    if config.get('overwrite'):
        fail('--resume continues a run and --overwrite deletes it: give one of the two')
    if not config['out_dir']:
        fail('--resume needs the run to continue: --out_dir=FOLDER, or --out_dir=latest for the newest')
    newest = config['out_dir'] == 'latest'
    folder = latest(Path(script).stem.removeprefix('train_')) if newest else Path(config['out_dir'])
    saved = read_json(folder / 'config.json', 'expected the folder of a run to resume')
    saved = {key: saved[key] for key in defaults if key in saved and key not in ('resume', 'overwrite', 'device')}
    for key, value in saved.items():
        kind = type(defaults[key])
        if type(value) not in ((int, float) if kind is float else (kind,)):
            fail(f'{folder / "config.json"}: {key} is {value!r}, expected {WANTED[kind]}')
    return {**saved, 'out_dir': str(folder)}


def help_text(script, defaults, rows):
    """The script's docstring, each key with its default and the comment beside it in the source, and the rows."""
    source = Path(script).read_text(encoding='utf-8')
    lines = [ast.get_docstring(ast.parse(source)) or '', '', 'settings, --key=value:']
    for key, comment in key_comments(source, defaults):
        setting = f'--{key}={shown(defaults[key])}' if key else ''
        lines.append(f'  {setting:<30}  {comment}'.rstrip() if key else f'\n  {comment}')
    for key, name, row in [(key, name, row) for key in rows for name, row in rows[key].items()]:
        lines.append(f'\n--{key}={name} means ' + (' '.join(f'--{key}={shown(value)}' for key, value in row.items())
                                                   or 'the defaults'))
    return '\n'.join(lines)


def key_comments(source, defaults):
    """[(key, comment)] in the order of the source; a comment on a line of its own comes with the key ''."""
    comments = {token.start[0]: token.string.lstrip('# ') for token in
                tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    for node in ast.parse(source).body:
        value = getattr(node, 'value', None)  # of DEFAULTS = dict(key=...) or DEFAULTS = {'key': ...}
        keys = [(key.arg, key.lineno) for key in getattr(value, 'keywords', [])]
        if isinstance(value, ast.Dict):
            keys = [(key.value, key.lineno) for key in value.keys if isinstance(key, ast.Constant)]
        if {key for key, _ in keys} == set(defaults):
            alone = [('', line) for line in comments if node.lineno <= line <= node.end_lineno
                     and line not in [number for _, number in keys]]
            return [(key, comments.get(line, '')) for key, line in sorted(keys + alone, key=lambda pair: pair[1])]
    return [(key, '') for key in defaults]


# ---- device and processes

def launch(device='auto'):
    """Namespace(rank, world, local_rank, device, main): this process among torchrun's, or alone.

    device: auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps; the result's is a torch.device.
    """
    rank, world, local_rank = (int(os.environ.get(name, default))
                               for name, default in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    mps = torch.backends.mps.is_available() and world == 1  # no process group works on mps
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'mps' if mps else 'cpu'
    if world > 1 and device.split(':')[0] == 'cuda':
        device = f'cuda:{local_rank}'
    present = ['cpu', *['mps'] * mps, *['cuda'] * torch.cuda.is_available()]
    present += [f'cuda:{index}' for index in range(torch.cuda.device_count())]
    if device not in present:
        fail(f'device {device} is not there: expected auto or one of {", ".join(present)}')
    device = torch.device(device)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')
    return SimpleNamespace(rank=rank, world=world, local_rank=local_rank, device=device, main=rank == 0)


def conclude(outcome, script):
    """Prints a run's outcome as its result; one that a signal interrupted then ends with 128 + signal."""
    result(**outcome)
    finish()
    if 'interrupted' in outcome:
        fail(f'interrupted after step {outcome["step"]}, which is saved: go on with `python {Path(script).name} '
             f'--resume --out_dir={outcome["out_dir"]}`', status=128 + outcome['interrupted'])


def finish():
    """Leave the process group, if there is one, all at once: who is left alone in it may crash on its way out."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main_first(run, make):
    """make() in rank 0, while the others wait, and what it returned in all; its ValueError or OSError ends all of them.
    """
    answer = [None, '']     # every process must hear of a failure, not wait for it
    if run.main:
        try:
            answer[0] = make()
        except (ValueError, OSError) as error:
            answer[1] = str(error) or type(error).__name__
    if run.world > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        fail(answer[1])
    return answer[0]


def all_reduced(values, op):
    """values (numbers) -> list of floats, reduced over the processes in float64."""
    if not dist.is_initialized():
        return [float(value) for value in values]
    device = 'cuda' if dist.get_backend() == 'nccl' else 'cpu'
    total = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(total, op)
    return total.tolist()


def all_sum(*values):
    """Numbers or 0-d tensors -> list of floats: each summed over the processes; themselves when alone."""
    return all_reduced(values, dist.ReduceOp.SUM)


def precision(device, dtype):
    """Context of the forward pass: autocast for 'bfloat16', nothing for 'float32'."""
    if dtype == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, dtype))


# ---- run folder

def open_run(kind, config, run):
    """Path of this run's folder, made by rank 0 and the same in all processes, with config.json in it.

    out_dir='' makes out/KIND/YYYYMMDD-HHMMSS. A named folder that holds a run is refused, unless config has resume
    (it is left as it is: write_config when the checkpoint has been loaded) or overwrite (its RUN_FILES are deleted). So
    is one in which another process trains.
    """
    def make():
        try:
            folder = Path(config['out_dir'] or dated_folder(Path('out', kind)))
            claim_folder(folder, config)
            if not config.get('resume'):
                write_config(folder, config, run)
            return folder
        except OSError as error:
            where = config['out_dir'] or Path('out', kind)
            raise ValueError(f'cannot use {where} as the folder of a run: {reason(error)}') from None
    return main_first(run, make)


def dated_folder(root):
    """A new folder below root. mkdir decides, so that two runs that start in one second never share."""
    root.mkdir(parents=True, exist_ok=True)
    stamp, count = time.strftime('%Y%m%d-%H%M%S'), 1
    while True:
        folder = root / (stamp if count == 1 else f'{stamp}-{count}')
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            count += 1


def make_writable(folder):
    """The folder, made if need be. Raises OSError where nothing can be written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError('it is not writable')


held = []       # the folder that this process trains in, as an open file: its lock ends with it, however it ends


def hold(folder):
    """Keeps other processes from training in folder, where the file system has locks. ValueError where one does."""
    while held:
        os.close(held.pop())
    held.append(os.open(folder, os.O_RDONLY))
    try:
        fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f'another process trains in {folder}: wait for its end') from None
    except OSError:
        pass


def claim_folder(folder, config):
    """Makes the folder ready for this run, and this run's."""
    make_writable(folder)
    hold(folder)
    files = [path for pattern in RUN_FILES for path in folder.glob(pattern)]
    if config.get('resume'):
        files = [path for path in files if path.suffix == '.tmp']
    elif files and not config.get('overwrite'):
        raise ValueError(f'{folder} already holds a run: --resume continues it, --overwrite replaces it, '
                         'or name another --out_dir')
    if strange := [path for path in files if path.is_dir()]:
        raise ValueError(f'{strange[0]} is a folder where a run has a file: move it, or name another --out_dir')
    for path in files:
        path.unlink()


def write_config(folder, config, run):
    """folder/config.json: all settings, and what else it takes to repeat the run."""
    record = {**config, 'out_dir': str(folder), 'git': git_revision(), 'torch': torch.__version__,
              'device': str(run.device), 'world': run.world, 'time': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
              'command': shlex.join(sys.argv)}
    replace_file(folder / 'config.json', lambda file: file.write((json.dumps(record, indent=1) + '\n').encode()))


def replace_file(path, write):
    """Call write(file) on a temporary neighbour of path, then rename it to path: never half a file under that name."""
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def reason(error):
    """What went wrong, in a few words; torch's writer hides the disk's own error in its context."""
    cause = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__context__
    words = getattr(cause, 'strerror', None) or str(cause or error) or type(error).__name__
    return words.strip().splitlines()[0][:160]


@contextlib.contextmanager
def saving(path):
    """A disk that refuses while path is written ends in one line, status 1."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        fail(f'cannot save {path}: {reason(error)}; what was saved before is intact', status=1)


def read_json(path, expected):
    """The object in a JSON file; a file that cannot be read or holds none ends in one line, which `expected` closes."""
    try:
        value = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(value, dict):
            raise ValueError('it holds no JSON object')
        return value
    except (OSError, ValueError) as error:
        fail(f'cannot read {path} ({reason(error)}): {expected}')


def git_revision():
    """The commit of this folder, or None."""
    try:
        return subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).resolve().parent, check=True, timeout=10,
                              capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def latest(kind, root='out'):
    """Path of the run folder below root/kind with the newest last.pt or best.pt."""
    found = [path for name in ('last.pt', 'best.pt') for path in Path(root, kind).glob(f'*/{name}') if path.is_file()]
    if not found:
        fail(f'no run with a checkpoint in {Path(root, kind)}: train one first, or name a folder')
    return max(found, key=lambda path: path.stat().st_mtime).parent


# ---- log

class Log:
    """log.jsonl in a run's folder: one JSON object a line; silent unless main.

    Resuming from `step`, the records beyond it go first, and with them a line cut short by a kill, so that the log of
    a resumed run equals that of an uninterrupted one.
    """

    def __init__(self, folder, step=None, main=True):
        self.path, self.main = Path(folder, 'log.jsonl'), main
        if main and step is not None and self.path.exists():
            with saving(self.path):
                kept = [line for line in self.path.read_bytes().splitlines() if self.keeps(line, step)]
                replace_file(self.path, lambda file: file.writelines(line + b'\n' for line in kept))

    @staticmethod
    def keeps(line, step):
        try:
            return json.loads(line).get('step', step) <= step
        except (ValueError, AttributeError, TypeError):
            return False

    def write(self, **record):
        """Append one record; it is on its way to the disk when this returns. Floats that are not finite become null."""
        if self.main:
            with saving(self.path), open(self.path, 'a', encoding='utf-8') as file:
                file.write(json.dumps(plain(record)) + '\n')


def plain(value, digits=17):
    """value as JSON can hold it: tensors become numbers or lists, nan and infinities null; 17 digits are exact."""
    if isinstance(value, dict):
        return {key: plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if hasattr(value, 'tolist'):
        return plain(value.tolist(), digits)
    if isinstance(value, float):
        return float(f'{value:.{digits}g}') if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


# ---- checkpoints

def save_checkpoint(path, state):
    """Write state (a dict of tensors and plain values) to path, atomically. Call it on rank 0 alone."""
    path = Path(path)
    with saving(path):
        replace_file(path, lambda file: torch.save(state, file))


def load_checkpoint(path, device='cpu'):
    """The dict that save_checkpoint wrote, tensors on device. Never runs code from the file."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        fail(f'no checkpoint {path}: expected a file that a training run saved')
    except (IsADirectoryError, PermissionError) as error:
        fail(f'cannot read the checkpoint {path}: {reason(error)}')
    except Exception as error:  # of many kinds; torch's own texts advise to trust the file
        fail(f'{path} is no checkpoint of these scripts, or is damaged ({type(error).__name__}): take another of its '
             "run, to resume in this one's place, or train anew with --overwrite")
    if not isinstance(state, dict) or 'model' not in state:
        fail(f"{path} is a checkpoint of something else: expected a dict with 'model'")
    return state


def load_weights(module, state_dict, path):
    """Load state_dict into module; the first name or shape that differs ends in one line. path is for the message."""
    if not isinstance(state_dict, dict):
        fail(f'{path} is a checkpoint of something else: expected the tensors of a model')
    theirs, ours = ({name: str(tuple(value.shape)) if torch.is_tensor(value) else 'no tensor'
                     for name, value in state.items()} for state in (state_dict, module.state_dict()))
    for name in [*ours, *theirs]:
        there, here = theirs.get(name, 'absent'), ours.get(name, 'absent')
        if there != here:
            fail(f'{path} is of another model: {name} is {there} in the file and {here} here')
    module.load_state_dict(state_dict)


def restore(path, model, optimizer, config, device, loop, same, own):
    """Loads a checkpoint into model and optimizer. Returns what it says of the keys in loop, in their order.

    The run must agree with config in the keys of `same`: weights that fit may still be of another function. own: the
    settings of an optimizer's group that stay as asked for now.
    """
    saved = load_checkpoint(path, device)
    asked = [{key: group[key] for key in own} for group in optimizer.param_groups]
    try:
        for key in same:
            if (was := saved['config'][key]) != config[key]:
                fail(f'{path} is of another model or task, with {key}={shown(was)}, not {shown(config[key])}: resume '
                     'it as it was, or begin another')
        load_weights(model, saved['model'], path)
        optimizer.load_state_dict(saved['optimizer'])
        state = [saved[key] for key in loop]
    except (KeyError, ValueError, TypeError) as error:
        fail(f'{path} is no checkpoint of this script, or is damaged ({type(error).__name__})')
    for group, settings in zip(optimizer.param_groups, asked):
        group |= settings                                       # the saved ones came along with the optimizer's state
    return state


# ---- signals

class StopSignal:
    """SIGTERM and SIGINT become a wish to stop after the step at hand; a second one ends the process as usual."""

    def __init__(self):
        self.signum = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        if self.signum:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.signum = signum

    def agreed(self, run):
        """The signal that any process has received, the same in all of them, or 0. All must call it at each step."""
        return self.signum if run.world == 1 else int(all_reduced([self.signum], dist.ReduceOp.MAX)[0])


@contextlib.contextmanager
def interruptible(said):
    """SIGTERM and Ctrl-C end the block in one line, `said` with it, and status 128 + signal."""
    def receive(signum, frame):
        raise KeyboardInterrupt(signum)
    before = {signum: signal.signal(signum, receive) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt as error:
        fail(f'interrupted: {said}', status=128 + (error.args or (signal.SIGINT,))[0])
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# ---- many runs

class Diverged(Exception):
    """A loss or gradient that is not finite at `step`; `loss` is the last that was."""

    def __init__(self, step, loss):
        super().__init__(f'diverged at step {step}: loss or gradient not finite; last finite loss {loss:.4f}')
        self.step, self.loss = step, loss


STUDIES = {'compare', 'boundary', 'variants'}   # keys that ask for one; off in its runs, so that each can go on alone


def folder_of(where, row, seed):
    """The folder of a study's run, below the study's."""
    return Path(where, f'{row}-seed{seed}'.replace(', ', '-').replace(' ', '_'))


def study(name, rows, config, run, stop, train, summarize):
    """Trains each row (settings over config) with each seed, in folders below out/NAME, and goes on where it was left.

    train(settings, run, stop) returns a run's result or raises Diverged; summarize(result, settings, lines) adds what
    the log's lines say, of which a run that diverged at once has none. Returns {row: [result of each seed]}; a run that
    diverged has diverged_at and last_loss.
    """
    if run.world > 1:
        fail(f'{name} trains one model after another: run it without torchrun')
    if config['out_dir'] or config['overwrite']:
        fail(f'a study keeps its runs in {Path("out", name)}: leave out --out_dir, --resume and --overwrite')
    check_trains(config, 'a study compares trained models')
    seeds, results = seeds_of(config['seeds']), {}
    check_results()
    for row, seed in [(row, seed) for seed in seeds for row in rows]:
        folder = folder_of(Path('out', name), row, seed)
        done, anew = (folder / 'result.json').exists(), f'move {folder} away to begin it anew'
        settings = config | rows[row] | dict(seed=seed, out_dir=str(folder))
        settings |= {key: type(config[key])() for key in STUDIES & set(config)}
        settings['resume'] = done or (folder / 'config.json').exists()
        if settings['resume']:
            made = read_json(folder / 'config.json', anew)
            for key in set(config) - STUDIES - {'resume', 'overwrite', 'device', 'seeds', 'preset'}:
                if made.get(key, settings[key]) != settings[key]:
                    fail(f'{folder} was made with {key}={shown(made[key])}, not {shown(settings[key])}: {anew}')
        if not done:
            try:
                outcome = train(settings, run, stop)
            except Diverged as error:
                outcome = dict(diverged_at=error.step, last_loss=error.loss)
            if 'interrupted' in outcome:
                fail(f'interrupted in {row}, seed {seed}: the same command goes on from there',
                     status=128 + outcome['interrupted'])
            log = folder / 'log.jsonl'
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            write_json(folder / 'result.json', summarize(outcome, settings, lines), indent=None)
        results.setdefault(row, []).append({**read_json(folder / 'result.json', anew), 'seed': seed})
    return results


def seeds_of(text):
    """'1,2,3' as a list of numbers."""
    try:
        seeds = [int(seed) for seed in text.split(',')]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds) or not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
        fail(f'seeds={text}: expected different whole numbers from 0 to {MAX_SEED}, with commas between as in 1,2,3')
    return seeds


def spread(values, digits=3):
    """'mean ± sd' over seeds; None is left out."""
    values = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(values):
        return ''
    return f'{values.mean():.{digits}f}' + (f' ± {values.std():.{digits}f}' if len(values) > 1 else '')


def student_t(df):
    """The t that |T| stays below 95 times in 100. With T = sqrt(df) tan(a), the angle a has the density cos(a)^(df-1).
    """
    angle = np.linspace(0, math.pi / 2, 200_001)[:-1]
    area = np.cumsum(np.cos(angle) ** (df - 1))
    return math.sqrt(df) * math.tan(np.interp(0.95 * area[-1], area, angle))


def write_file(path, text):
    """text in the file path, whose folder is made if need be; a disk that refuses ends in one line."""
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(text.encode()))


def check_results():
    """Ends in one line where results/ cannot be written in: before the training, not after it."""
    with saving(Path('results')):
        make_writable(Path('results'))


def write_json(path, value, indent=1):
    """value, as plain has it, in the file path; see write_file."""
    write_file(path, json.dumps(plain(value), indent=indent) + '\n')


def write_results(name, config, results, **more):
    """results/NAME.json: the settings, torch's version and each row's results by seed."""
    settings = {key: value for key, value in config.items() if key not in ('out_dir', 'resume', 'overwrite')}
    write_json(Path('results', f'{name}.json'), dict(config=settings, torch=torch.__version__, results=results, **more))


def table(header, lines):
    """A Markdown table."""
    rows = [header, ['---'] * len(header), *lines]
    return '\n'.join('| ' + ' | '.join(map(str, row)) + ' |' for row in rows) + '\n'


def write_text(path, text):
    """text in the file path, see write_file, and on the screen."""
    write_file(path, text)
    print('\n' + text, flush=True)


def pyplot():
    """matplotlib.pyplot without a screen, in the style of all figures."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams |= {'axes.spines.top': False, 'axes.spines.right': False, 'legend.frameon': False}
    return plt


def save_figure(figure, path):
    """A figure of pyplot's in the file path, and out of memory."""
    with saving(path):
        figure.savefig(path, dpi=150)
    pyplot().close(figure)


# ---- result

def result(**values):
    """Print values as one JSON object, six digits to a float: the last line of stdout, from rank 0 alone."""
    if speaks():
        print(json.dumps(plain(values, digits=6)), flush=True)
