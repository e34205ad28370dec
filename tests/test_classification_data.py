"""Classification data: what a rulebase's labels mean, what becomes of real rows, and what a user's mistake gets."""
import itertools
import json
import re
from collections import Counter

import pytest
import torch

import prepare

STATEMENT = r'(\w+) is (not )?(\w+)'


# ---- rulebase: the labels, against a literal reading of the text

def statements(text):
    return [(who, what, not denial) for who, denial, what in re.findall(STATEMENT, text)]


def read_theory(context):
    """Facts and ground rules as the text has them: a rule about something once for every person."""
    facts, rules = [], []
    people = set(re.findall(r'\b[A-Z]\w+\b', context)) - {'If'}
    for sentence in context.removesuffix('.').split('. '):
        if not sentence.startswith('If '):
            facts += statements(sentence)
            continue
        conditions, conclusion = sentence.removeprefix('If ').split(' then ')
        for person in people:
            named = [statements(re.sub(r'\b(something|it)\b', person, part)) for part in (conditions, conclusion)]
            rules.append((named[0], named[1][0]))
    return facts, rules


def proofs(context):
    """{statement: height of its lowest proof}, by passing over all ground rules until nothing gets lower."""
    facts, rules = read_theory(context)
    height, before = {fact: 0 for fact in facts}, None
    while height != before:
        before = dict(height)
        for conditions, conclusion in rules:
            if all(condition in height for condition in conditions):
                found = 1 + max(height[condition] for condition in conditions)
                height[conclusion] = min(found, height.get(conclusion, found))
    return height


@pytest.fixture(scope='module')
def rulebase(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp('data')
    prepare.make_rulebase(data_dir, n_train=3600, n_val=1200)
    examples, meta = prepare.load_examples(data_dir, 'rulebase')
    return dict(dir=data_dir, meta=meta, rows=examples['train'] + examples['validation'], **examples)


def test_labels_and_depths_are_those_of_a_literal_reading(rulebase):
    for row in rulebase['rows']:
        height = proofs(row['context'])
        (who, what, holds), = statements(row['question'])
        true, false = height.get((who, what, holds)), height.get((who, what, not holds))
        expected = dict(label=2 if true is None and false is None else int(true is not None),
                        depth=false if true is None else true)
        assert {key: row[key] for key in expected} == expected, row


def test_no_theory_contradicts_itself(rulebase):
    for row in rulebase['rows']:
        known = proofs(row['context'])
        assert not any((who, what, not holds) in known for who, what, holds in known), row


@pytest.mark.parametrize('facts, rules, expected', [
    ([('a', 'red', True)], [([(None, 'red', True)], (None, 'big', False))], {('a', 'big'): (False, 1)}),
    ([('a', 'red', True)], [([(None, 'red', False)], (None, 'big', True))], {}),
    ([('a', 'red', True)], [([(None, 'big', False)], (None, 'old', True))], {}),        # not known is not denied
    ([('a', 'red', True)], [([('a', 'red', True)], ('b', 'big', True))], {('b', 'big'): (True, 1)}),
    ([('a', 'red', True), ('b', 'big', True)], [([(None, 'red', True), (None, 'big', True)], (None, 'old', True))], {}),
    ([('a', 'red', True), ('a', 'big', True)], [([(None, 'red', True), (None, 'big', True)], (None, 'old', True))],
     {('a', 'old'): (True, 1)}),
    ([('a', 'red', True)], [([(None, 'big', True)], (None, 'old', True)), ([(None, 'red', True)], (None, 'big', True))],
     {('a', 'big'): (True, 1), ('a', 'old'): (True, 2)}),
    ([('a', 'red', True)], [([(None, 'red', True)], (None, 'red', True))], {}),         # a fact stays at depth 0
    ([('a', 'red', True)], [([(None, 'red', True)], (None, 'red', False))], None),
    ([('a', 'red', True)], [([(None, 'red', True)], (None, 'big', holds)) for holds in (True, False)], None)])
def test_forward_chaining_by_hand(facts, rules, expected):
    known = prepare.forward_chain(['a', 'b'], facts, rules)
    given = {(who, what): (holds, 0) for who, what, holds in facts}
    assert known == (None if expected is None else given | expected)


def test_theories_hold_all_that_is_promised(rulebase):
    rules = [rule for row in rulebase['rows'] for rule in re.findall(r'If [^.]*\.', row['context'])]
    assert {len(re.findall(STATEMENT, rule)) for rule in rules} == {2, 3}
    assert 0.05 < sum('something' not in rule for rule in rules) / len(rules) < 0.15
    assert 0.4 < sum('not' in rule.split(' then ')[1] for rule in rules) / len(rules) < 0.6
    lengths = [len(prepare.split_words(row['context'] + row['question'])) for row in rulebase['rows']]
    assert 25 < sum(lengths) / len(lengths) < 50 and max(lengths) < 110
    assert rulebase['meta']['vocab_size'] < 60 and set(rulebase['meta']['words'][:3]) == {'<unk>', '<pad>', '<begin>'}


# ---- rulebase: what must not give the label away

def test_labels_and_depths_are_balanced(rulebase, tmp_path):
    for split, n in dict(train=3600, validation=1200).items():
        counts = Counter((row['label'], row['depth']) for row in rulebase[split])
        assert counts == {**{(label, depth): n // 12 for label in (0, 1) for depth in range(4)}, (2, None): n // 3}
        assert rulebase['meta']['label_counts'][split] == [n // 3] * 3
    assert rulebase['meta']['majority'] == dict(train=0.3333, validation=0.3333)
    assert len({row['label'] for row in rulebase['train'][:20]}) == 3       # in no order
    meta = prepare.make_rulebase(tmp_path, n_train=60, n_val=30, max_depth=5, balance='1,2,0')
    examples, _ = prepare.load_examples(tmp_path, 'rulebase')
    assert meta['label_counts'] == dict(train=[20, 40, 0], validation=[10, 20, 0])
    assert meta['majority'] == dict(train=0.6667, validation=0.6667)
    assert {row['depth'] for row in examples['train']} == set(range(6))


def test_no_theory_is_in_two_splits_whatever_its_order(tmp_path):
    prepare.make_rulebase(tmp_path, n_train=2000, n_val=600, max_depth=0)   # small theories, which recur
    theories = {split: {frozenset(row['context'].removesuffix('.').split('. ')) for row in rows}
                for split, rows in prepare.load_examples(tmp_path, 'rulebase')[0].items()}
    assert len(theories['train']) < 2000 and not theories['train'] & theories['validation']


def test_same_seed_same_bytes_and_another_seed_other_theories(tmp_path):
    for name, seed in dict(a=1, b=1, c=2).items():
        prepare.make_rulebase(tmp_path, name, seed, n_train=60, n_val=20)
    files = ('train.jsonl', 'validation.jsonl')
    a, b, c = ([(tmp_path / name / file).read_bytes() for file in files] for name in 'abc')
    assert a == b and a[0] != c[0] and a[1] != c[1]


def test_the_people_differ_in_nothing_that_counting_shows(rulebase):
    for row in rulebase['rows']:
        facts, _ = read_theory(row['context'])
        (who, *_), = statements(row['question'])
        people = Counter(who for who, *_ in facts)
        assert len(people) == 2 and len(set(people.values())) == 1 and who in people


def test_a_quarter_of_the_questions_is_negated_whatever_the_label(rulebase):
    for label in range(3):
        questions = [row['question'] for row in rulebase['rows'] if row['label'] == label]
        assert 0.2 < sum(' not ' in question for question in questions) / len(questions) < 0.3


def linear_accuracy(features, rulebase):
    """Validation accuracy of a logistic regression on counts."""
    x, x_val = (torch.tensor([features(row) for row in rulebase[split]]).float() for split in ('train', 'validation'))
    y, y_val = (torch.tensor([row['label'] for row in rulebase[split]]) for split in ('train', 'validation'))
    mean, scale = x.mean(0), x.std(0) + 0.1
    weight = torch.zeros(x.size(1), 3, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.02)
    for _ in range(200):
        loss = torch.nn.functional.cross_entropy((x - mean) / scale @ weight, y) + 0.01 * weight.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ((x_val - mean) / scale @ weight).argmax(1).eq(y_val).float().mean().item()


def test_words_and_overlaps_alone_stay_near_the_majority_rate(rulebase):
    words = rulebase['meta']['words']

    def question(row):
        counts = Counter(prepare.split_words(row['question']))
        return [counts[word] for word in words]

    def bag(row):
        counts = Counter(prepare.split_words(row['context']))
        return question(row) + [counts[word] for word in words]

    def overlap(row):
        words = prepare.split_words(row['context'])
        return bag(row) + [words.count(word.lower()) for word in statements(row['question'])[0][:2]]

    assert linear_accuracy(question, rulebase) < 1 / 3 + 0.04
    assert linear_accuracy(bag, rulebase) < 1 / 3 + 0.08
    assert linear_accuracy(overlap, rulebase) < 1 / 3 + 1 / 12 + 0.08       # a twelfth: what the theory leaves out


def test_a_quarter_of_the_unknowns_asks_of_a_property_that_the_theory_leaves_out(rulebase):
    left_out = {label: [] for label in range(3)}
    for row in rulebase['rows']:
        (_, name, _), = statements(row['question'])
        left_out[row['label']].append(name not in prepare.split_words(row['context']))
    assert not any(left_out[0] + left_out[1]) and 0.2 < sum(left_out[2]) / len(left_out[2]) < 0.3


# ---- rows from elsewhere

THEORY = 'The cow is blue. If something is blue then it is big.'
PROOFWRITER = [dict(id=f'x_{i}', theory=f'{THEORY} It is {i}.', question='The cow is big.', answer=answer, QDep=depth,
                    QDep_computed=7, maxD=5, config='depth-5', allProofs='[]')
               for i, (answer, depth) in enumerate([('False', 1), ('True', 0), ('Unknown', None)])]
MNLI = [dict(premise=f'Él said "yes" {i} times. ', hypothesis='He agreed.', label=label, idx=i)
        for i, label in enumerate([2, 0, 1])]       # GLUE's numbers: contradiction, entailment, neutral
ROWS = dict(proofwriter=PROOFWRITER, mnli=MNLI)


def write(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == '.parquet':
        import datasets
        table = datasets.Dataset.from_list(rows)
        if isinstance(rows[0].get('label'), int):   # as the hub's copy says what its numbers mean, here otherwise
            table = table.map(lambda row: dict(label=2 - row['label']))
            table = table.cast_column('label', datasets.ClassLabel(names=['contradiction', 'neutral', 'entailment']))
        table.to_parquet(path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{', '.join(lines)}]" if path.suffix == '.json' else '\n'.join(lines) + '\n')


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    return datasets


@pytest.mark.parametrize('task', ROWS)
@pytest.mark.parametrize('names', [
    ('train.jsonl', 'validation.jsonl'), ('{}_train.json', '{}_validation.json'),
    ('train.jsonl', 'validation_matched.json'),
    ('train-00000-of-00001.parquet', 'validation-00000-of-00001.parquet')])
def test_a_folder_with_two_splits(tmp_path, datasets, task, names):
    for name in names:
        write(tmp_path / 'in' / name.format(task), ROWS[task])
    write(tmp_path / 'in' / 'validation_mismatched.jsonl', [dict(no='rows')])
    write(tmp_path / 'in' / 'test.jsonl', [dict(no='rows')])
    meta = prepare.make_examples(task, tmp_path, 'x', tmp_path / 'in')
    examples, loaded = prepare.load_examples(tmp_path, 'x')
    assert loaded == meta and meta['counts'] == dict(train=3, validation=3) and meta['task'] == task
    assert meta['label_counts'] == dict(train=[1, 1, 1], validation=[1, 1, 1])
    for rows in examples.values():
        assert [row['label'] for row in rows] == [0, 1, 2]
        assert list(rows[0]) == ['id', 'context', 'question', 'label', 'depth']
        assert [row['depth'] for row in rows] == ([1, 0, 7] if task == 'proofwriter' else [None] * 3)
    first = examples['validation'][0]
    if task == 'proofwriter':
        assert first['id'] == 'x_0' and first['context'] == f'{THEORY} It is 0.'
        assert first['question'] == 'The cow is big.'
        assert meta['labels'] == ['False', 'True', 'Unknown'] and meta['template'] == '{context}\nQuestion: {question}'
    else:
        assert first['context'] == 'Él said "yes" 0 times.' and first['question'] == 'He agreed.'
        assert len({row['id'] for rows in examples.values() for row in rows}) == 6
        assert meta['labels'] == ['contradiction', 'entailment', 'neutral']
        assert meta['template'] == '{context}\nHypothesis: {question}'


def test_numbered_parts_are_one_split_in_their_order(tmp_path):
    for i, row in enumerate(PROOFWRITER):
        write(tmp_path / 'in' / f'train-0000{i}-of-00003.jsonl', [row])
    write(tmp_path / 'in' / 'validation.jsonl', PROOFWRITER)
    prepare.make_examples('proofwriter', tmp_path, 'x', tmp_path / 'in')
    assert [row['id'] for row in prepare.load_examples(tmp_path, 'x')[0]['train']] == ['x_0', 'x_1', 'x_2']


def test_labels_by_name_and_true_without_quotes(tmp_path):
    write(tmp_path / 'a.jsonl', [{**row, 'label': name} for row, name in zip(MNLI, prepare.LABELS['mnli'])] * 2)
    write(tmp_path / 'b.jsonl', [{**row, 'answer': label} for row, label in zip(PROOFWRITER, [False, True, 'Unknown'])])
    for task, file in dict(mnli='a', proofwriter='b').items():
        prepare.make_examples(task, tmp_path, task, tmp_path / f'{file}.jsonl', val_frac=0.34)
        examples, _ = prepare.load_examples(tmp_path, task)
        rows = sorted(itertools.chain(*examples.values()), key=lambda row: row['context'])
        assert sorted({row['label'] for row in rows}) == [0, 1, 2]
        assert [row['label'] for row in rows] == sorted(row['label'] for row in rows)


def test_one_file_is_parted_by_context_and_by_the_seed(tmp_path, capsys):
    rows = [dict(premise=f'Premise {i // 3}.', hypothesis=f'Hypothesis {i}.', label=i % 3) for i in range(90)]
    write(tmp_path / 'a.jsonl', rows)
    contexts = {}
    for name, seed, val_frac in (('a', 1, 0), ('b', 1, 0), ('c', 2, 0), ('d', 1, 0.5)):
        meta = prepare.make_examples('mnli', tmp_path, name, tmp_path / 'a.jsonl', val_frac, seed)
        examples, _ = prepare.load_examples(tmp_path, name)
        contexts[name] = {row['context'] for row in examples['validation']}
        n = len(contexts[name])
        assert n == (15 if name == 'd' else 3) and meta['counts'] == dict(train=90 - 3 * n, validation=3 * n)
        assert meta['seed'] == seed and meta['contexts_in_both'] == 0
        assert not contexts[name] & {row['context'] for row in examples['train']}
    assert contexts['a'] == contexts['b'] != contexts['c']
    assert 'has no splits: the seed 1 keeps 3 of its 30 contexts for validation' in capsys.readouterr().out


def test_contexts_in_both_splits_are_reported(tmp_path, capsys):
    write(tmp_path / 'in' / 'train.jsonl', PROOFWRITER[:2])
    write(tmp_path / 'in' / 'validation.jsonl', PROOFWRITER[1:] + PROOFWRITER[1:])
    assert prepare.make_examples('proofwriter', tmp_path, 'x', tmp_path / 'in')['contexts_in_both'] == 1
    assert capsys.readouterr().out == '1 of 2 validation contexts are also in the training split\n'


def test_the_vocabulary_is_that_of_the_training_split(tmp_path):
    write(tmp_path / 'in' / 'train.jsonl', MNLI[:2])
    write(tmp_path / 'in' / 'validation.jsonl', [{**MNLI[2], 'hypothesis': 'He never agreed.'}])
    meta = prepare.make_examples('mnli', tmp_path, 'x', tmp_path / 'in')
    assert meta['words'] == ['<unk>', '<pad>', '<begin>'] + sorted(
        'él said " yes 0 1 times . hypothesis : he agreed'.split())
    tokenizer = prepare.get_tokenizer(meta)
    assert tokenizer.decode(tokenizer.encode('HE never agreed.')) == 'he <unk> agreed .'
    assert meta['vocab_size'] == tokenizer.vocab_size == 15 and (tokenizer.pad, tokenizer.begin) == (1, 2)


def without(column, rows=PROOFWRITER):
    return [{key: value for key, value in row.items() if key != column} for row in rows]


def changed(**keys):
    return PROOFWRITER[:1] + [{**PROOFWRITER[1], **keys}]


@pytest.mark.parametrize('task, rows, message', [
    ('proofwriter', without('theory'), 'row 1 of train has no column theory.*the question alone'),
    ('proofwriter', without('question'), 'no column question: expected theory, question and answer'),
    ('proofwriter', MNLI, 'no column theory, question, answer.*got premise, hypothesis'),
    ('proofwriter', changed(theory=' '), 'row 2 of train has an empty theory.*the question alone'),
    ('proofwriter', changed(theory=None), 'empty theory'), ('proofwriter', changed(question=''), 'empty question'),
    ('proofwriter', changed(answer='Maybe'), "row 2 of train has the answer 'Maybe': expected False, True, Unknown"),
    ('proofwriter', changed(answer=None), 'the answer None'),
    ('proofwriter', changed(QDep=[1]), r'row 2 of train has the depth \[1\]: expected a whole number'),
    ('proofwriter', changed(QDep='deep'), "the depth 'deep'"), ('proofwriter', changed(QDep=1e400), 'the depth inf'),
    ('mnli', [{**MNLI[0], 'label': -1}], 'the label -1: expected contradiction, entailment, neutral.*test split'),
    ('mnli', [{**MNLI[0], 'label': 3}], 'the label 3'), ('mnli', [{**MNLI[0], 'label': True}], 'the label True'),
    ('mnli', [], 'leaves the train split empty')])
def test_unusable_rows_are_one_line_and_write_nothing(tmp_path, task, rows, message):
    write(tmp_path / 'in' / 'train.jsonl', rows)
    write(tmp_path / 'in' / 'validation.jsonl', ROWS[task])
    with pytest.raises(ValueError, match=message) as error:
        prepare.make_examples(task, tmp_path, 'x', tmp_path / 'in')
    assert '\n' not in str(error.value) and not (tmp_path / 'x').exists()


def test_a_class_that_the_hub_does_not_name_is_refused(tmp_path, datasets):
    names = datasets.ClassLabel(names=['entailment', 'neutral', 'contradiction'])
    table = datasets.Dataset.from_list([{**MNLI[0], 'label': -1}]).cast_column('label', names)
    (tmp_path / 'in').mkdir()
    for split in ('train', 'validation_matched'):
        table.to_parquet(tmp_path / 'in' / f'{split}.parquet')
    with pytest.raises(ValueError, match='the label -1'):
        prepare.make_examples('mnli', tmp_path, 'x', tmp_path / 'in')


@pytest.mark.parametrize('files, message', [
    ({'train.jsonl': '{}'}, 'holds no validation split: expected one of validation.jsonl'), ({}, 'no train split'),
    ({'train.jsonl': '', 'mnli_train.jsonl': '', 'validation.jsonl': ''}, 'mnli_train.jsonl and train.jsonl: expected'),
    ({'train.jsonl': '', 'train.json': '', 'validation.jsonl': ''}, 'train.json and train.jsonl'),
    ({'train.jsonl': '{"premise"', 'validation.jsonl': ''}, 'cannot read .*train.jsonl: expected rows of JSON'),
    ({'train.json': '{"premise": 1}', 'validation.jsonl': ''}, 'not a list of objects'),
    ({'train.jsonl': '[1]', 'validation.jsonl': ''}, 'not a list of objects'),
    ({'train.parquet': 'no parquet', 'validation.jsonl': ''}, 'whole .parquet file')])
def test_unusable_folders(tmp_path, datasets, files, message):
    (tmp_path / 'in').mkdir()
    for name, text in files.items():
        (tmp_path / 'in' / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        prepare.make_examples('mnli', tmp_path, 'x', tmp_path / 'in')


def test_one_context_cannot_be_split(tmp_path):
    write(tmp_path / 'a.jsonl', MNLI[:1])
    with pytest.raises(ValueError, match='leaves the validation split empty'):
        prepare.make_examples('mnli', tmp_path, 'x', tmp_path / 'a.jsonl')


@pytest.mark.parametrize('words, message', [
    (['proofwriter', '--input=gone.jsonl'], 'expected a .jsonl, .json or .parquet file, or a folder'),
    (['mnli', '--input=a.csv'], 'expected a .jsonl'),
    (['proofwriter'], 'cannot read tasksource/proofwriter from the hub: give --input=FOLDER'),
    (['mnli'], 'cannot read nyu-mll/glue from the hub'),
    (['rulebase', '--n_train=0'], 'at least one'), (['rulebase', '--n_val=-1'], 'at least one'),
    (['rulebase', '--max_depth=6'], '0 to 5'), (['rulebase', '--balance=1,1'], 'as in 1,1,1'),
    (['rulebase', '--balance=0,0,0'], 'as in 1,1,1'), (['rulebase', '--balance=1,-1,1'], 'as in 1,1,1')])
def test_a_mistake_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, words, message):
    if len(words) == 1:
        datasets = pytest.importorskip('datasets')
        monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.csv').write_text('premise,hypothesis,label\n')
    with pytest.raises(SystemExit) as stopped:
        prepare.main(words)
    line, = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and message in line and list(tmp_path.iterdir()) == [tmp_path / 'a.csv']


def test_the_hub_is_asked_for_the_papers_splits(tmp_path, datasets, monkeypatch):
    asked = []

    def load_dataset(repository, configuration, split):
        asked.append((repository, configuration, split))
        return datasets.Dataset.from_list(ROWS['mnli' if configuration else 'proofwriter'])
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    for task in ROWS:
        assert prepare.make_examples(task, tmp_path, task)['source'] == prepare.SOURCES[task]['hub'][0]
    assert asked == [('tasksource/proofwriter', None, 'train'), ('tasksource/proofwriter', None, 'validation'),
                     ('nyu-mll/glue', 'mnli', 'train'), ('nyu-mll/glue', 'mnli', 'validation_matched')]


def test_the_command_ends_with_one_json_line(tmp_path, capsys):
    prepare.main(['rulebase', '--n_train=30', '--n_val=12', '--max_depth=1', f'--data_dir={tmp_path}', '--name=small'])
    meta = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert meta['name'] == 'small' and meta['counts'] == dict(train=30, validation=12) and 'words' not in meta
    for split in ('train', 'validation'):
        write(tmp_path / 'in' / f'{split}.jsonl', PROOFWRITER)
    prepare.main(['proofwriter', f'--input={tmp_path / "in"}', f'--data_dir={tmp_path}'])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['contexts_in_both'] == 3


# ---- reading the examples back

def test_a_missing_dataset_names_the_command_that_makes_it(tmp_path):
    for name, command in dict(mnli='prepare.py mnli ', mine='prepare.py TASK --input=.* --name=mine').items():
        with pytest.raises(FileNotFoundError, match=f'{command}.*--data_dir={tmp_path}'):
            prepare.load_examples(tmp_path, name)


def cut(folder):
    text = (folder / 'train.jsonl').read_text()
    (folder / 'train.jsonl').write_text(text[:text.rindex('{')])


def replaced(old, new, file='train.jsonl'):
    def damage(folder):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))
    return damage


@pytest.mark.parametrize('damage', [
    cut, lambda folder: (folder / 'validation.jsonl').unlink(), replaced('{', ''), replaced('"label": 1', '"label": 3'),
    replaced('"depth"', '"deep"'), replaced('"context": "', '"context": "", "was": "'),
    replaced('"counts"', '"count"', 'meta.json'), replaced('"template"', '"pattern"', 'meta.json'),
    replaced('{context}', '{contest}', 'meta.json'), replaced('"<pad>"', '"pad"', 'meta.json'),
    replaced('"anne"', '3', 'meta.json'), replaced('"label": 1', '"label": 1.0'),
    replaced('"label": 1', '"label": true'), replaced('"label": 0', '"label": "0"')])
def test_a_damaged_dataset_is_refused_in_one_line(tmp_path, damage):
    prepare.make_rulebase(tmp_path, n_train=30, n_val=12)
    damage(tmp_path / 'rulebase')
    with pytest.raises(ValueError, match='rulebase is damaged, make it again') as error:
        prepare.load_examples(tmp_path, 'rulebase')
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('split', ['train', 'validation'])
def test_a_split_without_examples_is_refused(tmp_path, split):
    n = prepare.make_rulebase(tmp_path, n_train=30, n_val=12)['counts'][split]
    replaced(f'"{split}": {n}', f'"{split}": 0', 'meta.json')(tmp_path / 'rulebase')
    (tmp_path / 'rulebase' / f'{split}.jsonl').write_text('')
    with pytest.raises(ValueError, match=f'rulebase is damaged, make it again .*{split}.jsonl is empty'):
        prepare.load_examples(tmp_path, 'rulebase')


def test_a_subset_is_drawn_by_the_seed_without_replacement_and_in_order():
    rows = list(range(100, 200))
    assert prepare.subset(rows, 0, 1) == prepare.subset(rows, 100, 1) == prepare.subset(rows, 999, 1) == rows
    drawn = prepare.subset(rows, 30, 1)
    assert drawn == sorted(set(drawn)) == prepare.subset(rows, 30, 1) and len(drawn) == 30 and set(drawn) < set(rows)
    assert drawn != prepare.subset(rows, 30, 2)


# ---- a row as ids

ROW = dict(id='r', context='red is big. big is {old}.', question='red is old')


@pytest.fixture
def tokenizer():
    text = prepare.split_words('Question: red is big. {old}')
    return prepare.get_tokenizer('words', ['<unk>', '<pad>', '<begin>'] + sorted(set(text)))


def encoded(tokenizer, max_tokens):
    return tokenizer.decode(prepare.encode_example(tokenizer, ROW, '{context}\nQuestion: {question}', max_tokens))


def test_begin_then_the_whole_text_exactly_once(tokenizer):
    whole = '<begin> red is big . big is { old } . question : red is old'
    assert encoded(tokenizer, 99) == encoded(tokenizer, 16) == whole


def test_a_long_context_loses_its_beginning_and_never_the_question(tokenizer):
    assert encoded(tokenizer, 15) == '<begin> is big . big is { old } . question : red is old'
    assert encoded(tokenizer, 7) == '<begin> . question : red is old'
    assert encoded(tokenizer, 6) == '<begin> question : red is old'
    with pytest.raises(ValueError, match="max_tokens=5 .* the question 'red is old' of r: expected at least 6"):
        encoded(tokenizer, 5)


def test_the_text_is_tokenised_as_one(tokenizer):
    seen = []
    tokenizer.encode = lambda text: seen.append(text) or list(text.encode())
    ids = prepare.encode_example(tokenizer, ROW, '{context}\nQuestion: {question}', 99)
    assert bytes(ids[1:]).decode() == seen[-1] == 'red is big. big is {old}.\nQuestion: red is old'


def test_special_words_inside_a_text_stay_text(tokenizer):
    assert {tokenizer.begin, tokenizer.pad}.isdisjoint(tokenizer.encode('<begin> red <pad>'))


@pytest.mark.parametrize('side, expected, real', [
    ('right', [[5, 6, 7], [8, 1, 1]], [[True, True, True], [True, False, False]]),
    ('left', [[5, 6, 7], [1, 1, 8]], [[True, True, True], [False, False, True]])])
def test_a_batch_is_padded_on_one_side(side, expected, real):
    ids_BS, mask_BS = prepare.collate([[5, 6, 7], [8]], pad=1, side=side)
    assert ids_BS.tolist() == expected and mask_BS.tolist() == real
    assert ids_BS.dtype == torch.int64 and mask_BS.dtype == torch.bool
    assert prepare.collate([[5]], pad=1)[0].tolist() == [[5]]


# ---- real rows

def test_real_proofwriter(shared, tmp_path, capsys):
    meta = prepare.make_examples('proofwriter', tmp_path, 'proofwriter', shared / 'data')
    examples, _ = prepare.load_examples(tmp_path, 'proofwriter')
    assert meta['counts'] == dict(train=3000, validation=600) and meta['label_counts']['train'] == [1000] * 3
    assert meta['contexts_in_both'] == 0 and '0 of 345 validation contexts' in capsys.readouterr().out
    assert {row['depth'] for row in examples['train'] if row['label'] < 2} == set(range(6))
    tokenizer = prepare.get_tokenizer(meta)
    for row in examples['validation']:
        ids = prepare.encode_example(tokenizer, row, meta['template'], 64)
        assert len(ids) <= 64 and tokenizer.decode(ids).endswith(
            ' '.join(['question', ':'] + prepare.split_words(row['question'])))


def test_real_mnli(shared, tmp_path):
    meta = prepare.make_examples('mnli', tmp_path, 'mnli', shared / 'data' / 'mnli_matched_sample.jsonl')
    counts = [sum(n) for n in zip(*meta['label_counts'].values())]
    assert counts == [1646, 1717, 1537] and sum(meta['counts'].values()) == 4900 and meta['contexts_in_both'] == 0
