"""The README says what the files say: tables, links and commands."""
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

import prepare
import train_lm
from runtime import configure

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
RESULTS = {name: json.loads((ROOT / 'results' / f'{name}.json').read_text()) for name in ('compare', 'boundary')}


@pytest.mark.parametrize('name', RESULTS)
def test_tables_are_those_that_the_study_wrote(name):
    assert (ROOT / 'results' / f'{name}.md').read_text().strip() in README


@pytest.mark.parametrize('name', RESULTS)
def test_tables_follow_from_the_results(name):
    """Mean and sd of the validation loss, worked out anew from results/NAME.json, stand in the table's row."""
    lines = (ROOT / 'results' / f'{name}.md').read_text().splitlines()[2:]
    assert len(lines) == len(RESULTS[name]['results'])
    for line, runs in zip(lines, RESULTS[name]['results'].values()):
        losses = [run['val_loss'] for run in runs if 'diverged_at' not in run]
        digits = 4 if name == 'compare' else 3
        if losses:
            assert f'{statistics.fmean(losses):.{digits}f} ± {statistics.stdev(losses):.{digits}f}' in line
        assert len(runs) == 3


def test_links_lead_to_what_they_name():
    links = re.findall(r'\[([\w. ]+)\]\((\w+\.py)#L(\d+)\)', README)
    assert len(links) >= 8
    for text, file, number in links:
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert re.match(r'(def|class) ', line), f'{file}#L{number} is {line!r}'
        if text != file and text != 'backward pass':
            assert text in line, f'[{text}] leads to {line!r}'
    for target in re.findall(r'\]\((results/[^)]+)\)', README):
        assert (ROOT / target).is_file()


COMMANDS = [line.split('#')[0].split('&&')[-1].strip() for line in README.splitlines()
            if re.match(r'\s*(pip install .*&& )?(python|torchrun .*) ?(train_lm|prepare)\.py', line)]


@pytest.mark.parametrize('command', COMMANDS)
def test_commands_are_understood(command, monkeypatch, tmp_path):
    """Every key and value in the README's commands is one that the script knows."""
    words = shlex.split(command)
    script = next(word for word in words if word.endswith('.py'))
    argv = [word for word in words[words.index(script) + 1:] if word not in ('--resume', '--out_dir=latest')]
    module = {'train_lm.py': train_lm, 'prepare.py': prepare}[script]
    if '--help' in argv:
        with pytest.raises(SystemExit) as stop:
            configure(module.__file__, module.DEFAULTS, getattr(module, 'PRESETS', None), argv=argv)
        assert stop.value.code == 0
    elif module is train_lm:
        configure(module.__file__, module.DEFAULTS, module.PRESETS, module.CHOICES, argv)
    else:
        assert configure(module.__file__, module.DEFAULTS, argv=argv, positional='task')['task'] in prepare.TASKS


def test_there_are_commands():
    assert len(COMMANDS) >= 8
