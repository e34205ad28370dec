"""The README says what the files say: tables, links and commands."""
import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
STUDIES = (ROOT / 'results' / 'README.md').read_text()
RESULTS = {name: json.loads((ROOT / 'results' / f'{name}.json').read_text()) for name in ('compare', 'boundary')}


TABLES = [file for file in sorted((ROOT / 'results').glob('*.md')) if file.name != 'README.md']


@pytest.mark.parametrize('file', TABLES, ids=lambda file: file.stem)
def test_tables_are_those_that_the_scripts_wrote(file):
    for table in file.read_text().strip().split('\n\n'):
        assert table in STUDIES


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
    text = ' '.join(STUDIES.split())
    assert f'At {at_six[0]} of the {3 * len(stored["points"])} points and widths' in text
    assert f'at {at_six[1]} others GELU' in text


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


# ---- the ledger: what each row quotes, worked out anew from the files in results/

def stored(name):
    return json.loads((ROOT / 'results' / f'{name}.json').read_text())


def spread(values, digits):
    return f'{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}'


def runs(name, row, key):
    return [run[key] for run in stored(name)['results'][row]]


def largest(kind, depth):
    """The largest N by width, from the trials."""
    cells = [cell for cell in stored('parity')['cells'].values() if (cell['kind'], cell['depth']) == (kind, depth)]
    return ', '.join(str(max([int(n) for n, trial in cell['trials'].items() if trial['solved'] >= 4], default=1))
                     for cell in sorted(cells, key=lambda cell: cell['width']))


def difference(name, first, second, seeds=(), task=''):
    accuracy = [{run['seed']: run['accuracy_by_task'][task] if task else run['val_accuracy']
                 for run in stored(name)['results'][row]} for row in (first, second)]
    points = [100 * (accuracy[0][seed] - accuracy[1][seed]) for seed in seeds or accuracy[0]]
    return f'{statistics.fmean(points):+.1f}, SE {statistics.stdev(points) / len(points) ** 0.5:.1f}'


def percent_less(ones, others):
    return [100 * (1 - one / other) for one, other in zip(ones, others)]


def by_seed(measurement, row):
    return stored('eval_compare_books')['records'][measurement]['by_seed'][row]


def blimp_leads():
    return [100 * (one - other) for one, other in zip(*(by_seed('blimp overall', row) for row in ('nc+quant', 'nc')))]


def of_model(name):
    return [record for record in stored('detectors')['records'] if record['model'] == name]


def two_operand_shares(name):
    share = lambda layer: statistics.fmean(record['layers'][layer]['two_operand_share'] for record in of_model(name))
    return ', '.join(f'{share(layer):.2f}' for layer in range(4))


def detectors(name, kind):
    """Units of a kind that are a detector, of so many, with the seeds that the bounds were not chosen on."""
    others = [record for record in of_model(name) if record['seed'] != 1]
    size = next(group['of'] for group in others[0]['groups'] if group['kind'] == kind)
    found = sum(len({(unit['layer'], unit['unit']) for unit in record['units']
                     if unit['kind'] == kind and unit['detector']}) for record in others)
    return f'{found} of {size * len(others):,}'


def removal(layer, removed, name='nc+quant'):
    return statistics.fmean(one['cost'] for record in of_model(name) for one in record['redundancy']
                            if (one['layer'], one['part'], one['removed']) == (layer, 'Boolean', removed))


def gap(at):
    """Perplexity of nc over gelu on the books, %, at a share of the steps."""
    curves = [[run['curve'] for run in stored('compare_books')['results'][row]] for row in ('nc', 'gelu')]
    point = lambda curve: curve[round(at * (len(curve) - 1))]['val_loss']
    return spread([100 * math.expm1(point(nc) - point(gelu)) for nc, gelu in zip(*curves)], 1)


def interval(measurement, pair, factor, digits):
    record = stored('eval_compare_books')['records'][measurement]
    d = {key: factor * value for key, value in record['differences'][pair].items()}
    return f'{d["difference"]:+.{digits}f} [{d["low"]:+.{digits}f}, {d["high"]:+.{digits}f}]'


def extremes(values, form='{}'):
    return [form.format(min(values)), form.format(max(values))]


CLS, TEN = 'cls_rulebase_all', 'cls_rulebase_baseline_nogate_intra8_inter8_quant'        # of three seeds, of ten
LONG = 'compare_licensing_long'
WITH_FUSION = [row for row in stored(CLS)['results'] if row != 'baseline']
ROUTED = [row for row in WITH_FUSION if 'routing' in stored(CLS)['results'][row][0]
          and stored(CLS)['results'][row][0]['routing']]
QUOTES = {
    'A2 ': lambda: [f'nc solves {largest("nc", 1)} bits and GELU {largest("gelu", 1)}'],
    'A3 ': lambda: [f'{largest("bilinear", depth)}{words}' for depth, words in
                    ((1, ' bits at depth 1'), (2, ' at depth 2'), (4, ' at depth 4'))],
    'A4 ': lambda: [spread([100 * (nc / gelu - 1) for nc, gelu in zip(runs('compare', 'nc', 'val_loss'),
                                                                      runs('compare', 'gelu', 'val_loss'))], 2),
                    f'{gap(1)}% of the perplexity at the end', f'{gap(1 / 3)}% at a third'],
    'A5 ': lambda: [interval(f'blimp {row}', 'nc - gelu', 100, 1)
                    for row in ('phenomenon npi_licensing', 'phenomenon quantifiers', 'overall')],
    'A6 ': lambda: [two_operand_shares('nc')],
    'A7 ': lambda: [f'{max(removal(layer, 1) for layer in range(4)):.4f} nats at most',
                    f'ten {max(removal(layer, 10) for layer in range(4)):.4f}',
                    ', '.join(f'{removal(layer, 128):.3f}' for layer in range(4)),
                    f'in plain nc a block costs {max(removal(layer, 128, "nc") for layer in range(4)):.4f}'],
    'A9 ': lambda: [f'none of {3 * len(stored("boundary")["results"])} runs', 'from 0.39 to 0.84'],
    'A8 ': lambda: [f'{max(statistics.fmean(point["saturation"]) for point in curve):.2f}'
                    for curve in stored('parity_dynamics')['curves'].values()],
    'A10 ': lambda: [spread(percent_less(*(map(math.exp, runs('compare_books', row, 'val_loss'))
                                           for row in ('nc+quant', 'nc'))), 1),
                     ', '.join(f'{points:+.1f}' for points in blimp_leads()),
                     f'SE {statistics.stdev(blimp_leads()) / 3 ** 0.5:.1f}'],
    'A11 ': lambda: [spread(percent_less(*(by_seed('lambada perplexity', row) for row in ('nc+quant', 'nc'))), 0)],
    'A12 ': lambda: [two_operand_shares('nc+quant')],
    'A13 ': lambda: [spread(runs('compare', 'nc+quant', 'half_life_median'), 1),
                     spread(runs('compare', 'nc+quant, shuffled text', 'half_life_median'), 0),
                     spread(runs('compare', 'nc+quant', 'latches'), 0)],
    'A14 ': lambda: [f'{detectors("nc+quant", "gelu")} GELU units, {detectors("nc+quant", "quantifier")} quantifiers, '
                     f'{detectors("nc+quant", "operand")} operands',
                     f'in nc {detectors("nc", "gelu")} and {detectors("nc", "operand")} operands',
                     f'in gelu {detectors("gelu", "gelu")}',
                     f'untrained {detectors("nc+quant, untrained", "quantifier")} quantifiers'],
    'B2 ': lambda: [difference(TEN, 'nogate', 'baseline')],
    'B3 ': lambda: [*extremes([float(difference(CLS, row, 'nogate').split(',')[0]) for row in ROUTED], '{:+.1f}'),
                    *(f'{row} {difference(TEN, row, "nogate")}' for row in ('inter8', 'intra8', 'quant'))],
    'B4 ': lambda: [difference(CLS, 'inter8_noxattn', 'inter8')],
    'B5 ': lambda: [difference(TEN, 'inter8', 'intra8')],
    'B6 ': lambda: [*extremes([100 * statistics.fmean(runs(CLS, row, 'entropy')) for row in ROUTED], '{:.0f}'),
                    spread([100 * x for x in runs('cls_rulebase_fair', 'inter8_noxattn', 'entropy')], 0)],
    'B7 ': lambda: [', '.join(f'{alpha:.4f}' for alpha in runs('cls_rulebase_alpha', 'inter8_learned', 'alpha'))],
    'B8 ': lambda: [f'baseline {statistics.fmean(runs(CLS, "baseline", "grad_norm")):.2f}',
                    *extremes([statistics.fmean(runs(CLS, row, 'grad_norm')) for row in WITH_FUSION], '{:.2f}')],
    'B9 ': lambda: [f'{row} {spread([100 * x for x in runs("cls_mnli_table3", row, "val_accuracy")], 1)}'
                    for row in ('nogate', 'inter8', 'intra8')],
    'B10 ': lambda: [difference('cls_multi_table4', 'inter8', 'nogate', task=task) for task in ('proofwriter', 'mnli')],
    'B11 ': lambda: [', '.join(f'{max(map(max, routing)):.2f}' for routing in runs(CLS, 'inter8', 'routing')),
                     ', '.join(f'{100 * statistics.fmean(abs(24 * x - 1) < 0.5 for row in routing for x in row):.0f}'
                               for routing in runs(CLS, 'inter8', 'routing'))],
    'gates against a control': lambda: [difference(CLS, 'inter8_noxattn', 'matched')],
    'the cell': lambda: [difference(CLS, 'nogate_xattn', 'nogate'), difference(CLS, 'inter8', 'nogate_xattn')],
    '`route_scale`': lambda: [f'{statistics.fmean(runs(CLS, "scaled", "fired")):.0%}',
                              difference(CLS, 'scaled', 'inter8'), difference(CLS, 'ste', 'scaled')],
    'the fair setting': lambda: [difference('cls_rulebase_fair', 'inter8_noxattn', 'matched')],
    'logic modules in fp32': lambda: [difference('cls_rulebase_precision', 'inter8_fp32', 'inter8')],
    '`quant`': lambda: [difference(TEN, 'quant', 'inter8'), spread(runs(TEN, 'quant', 'half_life_median'), 1)],
    'trained on shallow': lambda: [*(spread([100 * x for x in runs('cls_rulebase_depth', row, 'val_accuracy')], 1)
                                     for row in ('baseline', 'nogate', 'inter8', 'quant')),
                                   difference('cls_rulebase_depth', 'nogate', 'baseline'),
                                   difference('cls_rulebase_depth', 'nogate', 'baseline', (42, 777, 123))],
    'a family that needs': lambda: [*(f'{row} ' + ', '.join(f'{families["memory"]:.2f}' for families in runs(
        LONG, row, 'licensing_families')) for row in ('gelu', 'nc+quant')),
        spread(runs(LONG, 'nc+quant', 'half_life_median'), 1), ', '.join(map(str, runs(LONG, 'nc+quant', 'latches')))],
}


@pytest.mark.parametrize('claim', QUOTES)
def test_the_ledger_quotes_what_the_files_say(claim):
    row = next(line for line in README.splitlines() if line.startswith(f'| {claim}'))
    for words in QUOTES[claim]():
        assert words in row, f'{words!r} is not in {row!r}'


def test_the_short_of_it_is_in_the_ledger():
    short, ledger = README.split('## Two commands')[0], README.split('## The ledger')[1]
    figures = re.findall(r'\d+\.\d+(?: ± \d+\.\d+)?', short)
    assert len(figures) >= 6 and all(figure in ledger for figure in figures), figures


def test_the_ledger_has_a_row_and_a_verdict_a_claim():
    rows = re.findall(r'^\| ([AB]\d+) .*\| (holds|differs|does not hold|not tested)\b[^|]*\|$', README, re.MULTILINE)
    assert [claim for claim, _ in rows] == [f'A{i}' for i in range(1, 15)] + [f'B{i}' for i in range(1, 12)]
    n = Counter(verdict for _, verdict in rows)
    assert (f'{n["holds"]} hold, {n["differs"]} hold in part or differ, {n["does not hold"]} do not hold and '
            f'{n["not tested"]} could not be tested') in ' '.join(README.split())


def test_the_counts_of_parameters_are_those_of_the_model():
    import train_lm
    with torch.device('meta'):
        gelu, nc, quantified = (train_lm.build(50257, train_lm.DEFAULTS | keys).num_params()
                                for keys in (dict(ffn='gelu'), dict(ffn='nc'), dict(ffn='nc', quant=True)))
    row = next(line for line in README.splitlines() if line.startswith('| A1 '))
    assert gelu == nc and f'{gelu:,}' in row and f'{quantified - nc:,}' in row and f'{quantified / nc - 1:.4%}' in row


def test_links_lead_to_what_they_name():
    links = re.findall(r'\[([\w. ]+)\]\(([\w/]+\.py)#L(\d+)\)', README)
    assert len(links) >= 20
    for text, file, number in links:
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert re.match(r'\s*(def|class) ', line), f'{file}#L{number} is {line!r}'
        if text not in (file, 'backward pass', 'a test'):
            assert text.split('.')[-1] in line, f'[{text}] leads to {line!r}'
    for target in re.findall(r'\]\((results/[^)]+)\)', README):
        assert (ROOT / target).is_file()
    for target in re.findall(r'\]\(([\w.]+)\)', STUDIES):
        assert (ROOT / 'results' / target).is_file()


def test_code_in_the_readme_is_code_of_the_model():
    for block in re.findall(r'```python\n(.*?)```', README, re.DOTALL):
        assert block in (ROOT / 'model.py').read_text()


SCRIPTS = ('train_lm', 'train_cls', 'prepare', 'parity', 'evaluate', 'interpret', 'tests/bench')
LINES = [line.split('#')[0].split('&&')[-1].strip() for line in README.splitlines()
         if re.match(rf'\s*(pip install .*&& )?(python|torchrun .*) ?({"|".join(SCRIPTS)})\.py', line)]
# in a table and in the text a command stands between backticks, without `python`
INLINE = re.findall(rf'`((?:python |torchrun [^`]*)?(?:{"|".join(SCRIPTS)})\.py [^`]+)`', README + STUDIES)
COMMANDS = list(dict.fromkeys(LINES + INLINE))


def test_there_are_commands():
    assert {script for script in SCRIPTS for command in LINES if f'{script}.py' in command} == set(SCRIPTS)
    assert len(INLINE) >= 20
