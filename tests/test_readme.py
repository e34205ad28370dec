"""The README says what the files say: tables, links and commands."""
import importlib
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
RESULTS = {name: json.loads((ROOT / 'results' / f'{name}.json').read_text()) for name in ('compare', 'boundary')}


@pytest.mark.parametrize('file', sorted((ROOT / 'results').glob('*.md')), ids=lambda file: file.stem)
def test_tables_are_those_that_the_scripts_wrote(file):
    for table in file.read_text().strip().split('\n\n'):
        assert table in README


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


@pytest.mark.parametrize('file', [ROOT / 'results' / 'parity.md'], ids=lambda file: file.stem)
def test_the_frontier_follows_from_the_trials(file):
    """The largest N is solved by half of eight seeds, and N + 1, if it was in reach, is not."""
    stored = json.loads(file.with_suffix('.json').read_text())
    header, _, *lines = [[cell.strip() for cell in line.split('|')[1:-1]] for line in file.read_text().splitlines()]
    table = {(line[0], *map(int, re.findall(r'\d+', name))): int(value)
             for line in lines for name, value in zip(header[1:], line[1:])}
    assert len(table) == len(stored['cells']) and stored['grid']['n_seeds'] == 8
    for cell in stored['cells'].values():
        n, solved = table[cell['kind'], cell['depth'], cell['width']], cell['trials']
        assert solved[str(n)]['solved'] >= 4
        assert n == stored['grid']['largest'] or solved[str(n + 1)]['solved'] < 4


@pytest.mark.parametrize('file', sorted((ROOT / 'results').glob('parity_fixed*.json')), ids=lambda file: file.stem)
def test_the_counts_without_tuning_follow_from_the_seeds(file):
    stored = json.loads(file.read_text())
    solved = {(cell['kind'], cell['width'], cell['n']): cell['solved'] for cell in stored['counts']}
    at_six = [sum(solved[one, width, 8][i] >= 4 > solved[other, width, 8][i] and solved[other, width, 6][i] >= 4
                  for width in (8, 12, 16) for i in range(len(stored['points'])))
              for one, other in (('nc', 'gelu'), ('gelu', 'nc'))]
    assert at_six == [stored['wins']['nc over gelu'], stored['wins']['gelu over nc']]
    assert f'At {at_six[0]} of the {3 * len(stored["points"])} points and widths' in README
    assert f'at {at_six[1]} others GELU' in README


def test_the_classifier_s_figures_follow_from_its_runs():
    """Accuracies and the paired differences, worked out anew from results/cls_rulebase_all.json."""
    results = json.loads((ROOT / 'results' / 'cls_rulebase_all.json').read_text())['results']
    table = (ROOT / 'results' / 'cls_rulebase_all.md').read_text()
    accuracy = {name: {run['seed']: run['val_accuracy'] for run in runs} for name, runs in results.items()}
    for name, by_seed in accuracy.items():
        assert sorted(by_seed) == [42, 123, 777] and min(by_seed.values()) > 0.1 + results[name][0]['majority']
        values = by_seed.values()
        assert f'| {name} | 3 | {statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f} |' in table
    for first, second in re.findall(r'\n\| (\w+) - (\w+) \|', table):
        diffs = [100 * (accuracy[first][seed] - accuracy[second][seed]) for seed in accuracy[first]]
        mean, se = statistics.fmean(diffs), statistics.stdev(diffs) / 3 ** 0.5
        line = next(line for line in table.splitlines() if line.startswith(f'| {first} - {second} |'))
        assert f'| {mean:+.2f} | {se:.2f} |' in line and line.endswith('| yes |' if mean > 2 * se else '| no |')


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


SCRIPTS = ('train_lm', 'train_cls', 'prepare', 'parity', 'evaluate')
COMMANDS = [line.split('#')[0].split('&&')[-1].strip() for line in README.splitlines()
            if re.match(rf'\s*(pip install .*&& )?(python|torchrun .*) ?({"|".join(SCRIPTS)})\.py', line)]


class Understood(Exception):
    pass


@pytest.mark.parametrize('command', COMMANDS)
def test_commands_are_understood(command, monkeypatch):
    """Every key and value in the README's commands is one that the script knows."""
    words = [word for word in shlex.split(command) if word not in ('--resume', '--out_dir=latest')]
    script = next(i for i, word in enumerate(words) if word.endswith('.py'))
    module = importlib.import_module(words[script].removesuffix('.py'))
    configure = runtime.configure

    def stop_here(*args, **options):
        raise Understood(configure(*args, **options))

    monkeypatch.setattr(runtime, 'configure', stop_here)
    monkeypatch.setattr(module, 'configure', stop_here, raising=False)
    monkeypatch.setattr(sys, 'argv', words[script:])
    with pytest.raises(SystemExit if '--help' in words else Understood) as stop:
        module.main()
    assert '--help' not in words or stop.value.code == 0


def test_there_are_commands():
    assert {script for script in SCRIPTS for command in COMMANDS if f'{script}.py' in command} == set(SCRIPTS)
