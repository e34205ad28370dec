"""interpret.py: on models with planted units the readings say what was planted, an untrained model has no detectors,
and each number is that of a literal count."""
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import interpret
import prepare
import runtime
from interpret import (ablation, auc, changed, contexts, describe, encode_places, first_two_tests, html_card,
                       layer_records, lens, licensing_test, page, participation_ratio, read_layer, redundancy,
                       response, token_means, trace)
from model import GPT, MODEL_KEYS

CPU = torch.device('cpu')
WORDS = prepare.get_tokenizer('words', prepare.WORDS)
SHAPE = dict(block_size=16, n_layer=2, n_head=2, n_embd=32, ffn='nc', bool_frac=0.5, quant=True, quant_frac=0.5,
             quant_form='corrected', bound_write=False, highway=False, op_init='normal')
COMPARATIVES = [word + 'er' for word in prepare.ADJECTIVES]


@pytest.fixture(autouse=True)
def few_places(monkeypatch):
    """Seconds instead of a minute."""
    monkeypatch.setattr(interpret, 'TEST', interpret.TEST | dict(places=20, random_units=40))


def random_model(seed=0, std=0.3, **options):
    torch.manual_seed(seed)
    model = GPT(WORDS.vocab_size, **{**SHAPE, **options})
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=std)
    return model.eval()


def planted(part='exists', raises='than', half_life=4.0):
    """A model of layer norms and embeddings alone, but for one unit: it fires on comparatives and raises a word."""
    torch.manual_seed(0)
    model = GPT(WORDS.vocab_size, **SHAPE).eval()
    unit = model.blocks[1].ffn.units[part].start
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'blocks' in name and not name.endswith(('norm_attn.weight', 'norm_ffn.weight')):
                p.zero_()
        model.positions.weight.zero_()
        model.tokens.weight.normal_()
        model.tokens.weight[:, :2] = 0
        model.tokens.weight[WORDS.encode(' '.join(COMPARATIVES)), 0] = 5          # feature 0: a comparative
        model.tokens.weight[WORDS.encode(raises), 1] = 5                          # feature 1: the licensed word
        for block in model.blocks:
            if block.ffn.quantifier:
                block.ffn.quantifier.decay.fill_(math.log(1 / (2 ** (1 / half_life) - 1)))
        ffn = model.blocks[1].ffn
        ffn.up.weight[unit, 0], ffn.up.bias[unit] = 6, -6
        ffn.down.weight[1, unit] = 3
    return model, unit


def ids_of(n=6, T=16, seed=0):
    return torch.randint(WORDS.vocab_size, (n, T), generator=torch.Generator().manual_seed(seed))


# ---- the places of the test

@pytest.mark.parametrize('family', prepare.LICENSED, ids=lambda family: family.__name__)
def test_a_place_differs_from_its_like_in_one_word_which_makes_the_licensor(family):
    places = prepare.licensed_places(family, 40)
    assert places == prepare.licensed_places(family, 40) != prepare.licensed_places(family, 40, seed=2)
    licensors = dict(comparative=COMPARATIVES, passive=prepare.VERBS, neither=['neither'], negation=['not', 'no'])
    for place in places:
        one, other = place['licensed'], place['unlicensed']
        assert len(one) == len(other) and sum(a != b for a, b in zip(one, other)) == 1
        assert one[place['licensor']] in licensors[family.__name__] and place['word'] in prepare.LICENSED[family]
        assert not {place['word'], '.'} & {*one, *other}
        if family is prepare.passive:
            assert one[place['licensor'] - 1] == 'was' and other[place['licensor'] - 1] == 'has'
        else:
            assert one[place['licensor']] != other[place['licensor']]
    assert {place['word'] for place in places} == set(prepare.LICENSED[family])


def test_places_have_word_combinations_that_training_lacks():
    taken = {tuple(sentence.split()[:4]) for pick in [prepare.picker(1, 'train')] for _ in range(3000)
             for sentence in [prepare.comparative(pick, held=False)[0]]}
    assert not taken & {tuple(place['licensed'][:4]) for place in prepare.licensed_places(prepare.comparative, 50)
                        if place['licensed'][0] != 'the'}


def test_places_become_tokens_whatever_a_word_is_made_of():
    """Each character a token, say: the licensor is its last one, and so is that before the licensed word."""
    letters = SimpleNamespace(eot=0, encode=lambda text: [ord(c) for c in text])
    places = [dict(licensed=['fred', 'is', 'taller', 'now'], unlicensed=['fred', 'is', 'tall', 'now'], licensor=2,
                   word='than'),
              dict(licensed=['he', 'is', 'older'], unlicensed=['he', 'is', 'old'], licensor=2, word='than')]
    task = encode_places(letters, places, CPU)
    text = [''.join(chr(i) for i in row[real]) for row, real in zip(task.ids, task.real)]
    assert text == ['\0 fred is taller now', '\0 he is older', '\0 fred is tall now', '\0 he is old']
    assert [text[i][:int(n) + 1].split()[-1] for i, n in enumerate(task.licensor)] == ['taller', 'older']
    assert task.last.tolist() == [len(row) - 1 for row in text] and task.word.tolist() == [ord(' ')] * 4


# ---- the three tests

def test_auc_is_the_share_of_pairs_won():
    generator = torch.Generator().manual_seed(1)
    some, others = (torch.randint(5, (n, 7), generator=generator).float() for n in (13, 29))
    for f in range(7):
        wins = [float(a > b) + (a == b) / 2 for a in some[:, f] for b in others[:, f]]
        assert auc(some, others)[f] == pytest.approx(float(sum(wins)) / len(wins))
    assert auc(torch.ones(2, 1), torch.zeros(3, 1)) == 1 and auc(torch.zeros(2, 1), torch.zeros(3, 1)) == 0.5


def test_the_lens_shows_what_the_write_alone_would_predict():
    """Logits of the normalised write, less those of the norm's bias, but for a positive factor."""
    model = random_model()
    for layer in range(2):
        write_FD = model.blocks[layer].ffn.down.weight.T
        logits_FV = (model.head(model.norm(1e3 * write_FD)) - model.head(model.norm.bias))[:, :model.vocab_size]
        scale_F1 = write_FD.std(dim=1, correction=0, keepdim=True)
        torch.testing.assert_close(lens(model, layer).T, logits_FV * scale_F1, atol=1e-3, rtol=1e-3)


def test_mean_ablation_is_that_of_a_loop_over_sentences():
    """Units of both layers, each at its mean over all real tokens; no padding, no hooks."""
    model, chosen = random_model(), [(0, 3), (0, 40), (1, 100), (1, 127)]
    task = encode_places(WORDS, prepare.licensed_places(prepare.negation, 4), CPU)
    assert len(set(task.word.tolist())) == 2
    rows = [ids[real][None] for ids, real in zip(task.ids, task.real)]

    @torch.no_grad()
    def run(ids_1T, means):
        x, hidden = model.tokens(ids_1T) + model.positions(torch.arange(ids_1T.size(1))), []
        for layer, block in enumerate(model.blocks):
            x = x + block.attn(block.norm_attn(x))
            h = block.ffn.hidden(block.ffn.up(block.norm_ffn(x)))
            hidden.append(h[0].clone())
            for l, unit in chosen if means else ():
                if l == layer:
                    h[..., unit] = means[layer][unit]
            x = x + block.ffn.down(h)
        return model.head(model.norm(x))[0, -1, :model.vocab_size].log_softmax(-1), hidden

    plain = [run(ids, None) for ids in rows]
    means = [torch.cat([hidden[layer] for _, hidden in plain]).mean(0) for layer in range(2)]
    expected = [(plain[i][0] - run(ids, means)[0])[task.word[i]].item() for i, ids in enumerate(rows)]
    assert max(map(abs, expected)) > 4e-3
    drop = ablation(model, trace(model, task.ids), interpret.word_log_prob(model, task), task.real)
    torch.testing.assert_close(drop(chosen).tolist(), expected, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(drop(chosen, 4), drop(chosen)[:4])


def test_the_first_two_tests_are_literal():
    task, model = encode_places(WORDS, prepare.licensed_places(prepare.negation, 6), CPU), random_model()
    seen = trace(model, task.ids)
    for layer, (auc_F, rank_F) in enumerate(first_two_tests(model, task, seen)):
        fires = response(model.blocks[layer].ffn, seen[layer].ffn, seen[layer].hidden)
        yes = torch.stack([fires[i, t] for i, t in enumerate(task.licensor.tolist())])
        no = torch.stack([fires[i, t] for i in range(12) for t in range(int(task.last[i]) + 1)
                          if i >= 6 or t != task.licensor[i]])
        torch.testing.assert_close(auc_F, auc(yes, no))
        raised = lens(model, layer)
        for u in (0, 70, 127):
            order = raised[:, u].argsort(descending=True).tolist()
            assert rank_F[u] == min(order.index(WORDS.encode(word)[0]) for word in ('ever', 'any'))


@pytest.mark.parametrize('part', ['exists', 'proportion'])
def test_a_planted_detector_is_found_and_nothing_else(part):
    model, unit = planted(part)
    units, groups = licensing_test(model, WORDS, CPU, desc='')
    (found,) = [record for record in units if record['detector']]
    assert (found['family'], found['layer'], found['unit'], found['kind']) == ('comparative', 1, unit, 'quantifier')
    assert found['auc'] == 1 and found['rank'] == 0 and found['above'] >= 0.99
    assert found['drop'] > 0.1 > 0 > found['drop_unlicensed']
    assert interpret.count_detectors(units) == {'comparative': {'1': 1}}
    group = next(group for group in groups if (group['family'], group['kind']) == ('comparative', 'quantifier'))
    assert (group['of'], group['passed']) == (64, 1) and group['drop'] == pytest.approx(found['drop'])
    assert group['drop_random'] < group['drop'] / 5


def test_a_unit_that_fires_but_predicts_nothing_is_no_detector():
    model, unit = planted(raises='dog')
    units, groups = licensing_test(model, WORDS, CPU, desc='')
    assert not units and {group['passed'] for group in groups} == {0} and 'drop' not in groups[0]


@pytest.mark.parametrize('change, is_one', [
    ({}, True), (dict(drop_unlicensed=-1), True), (dict(drop=0.0019, drop_unlicensed=0), False),
    (dict(above=0.94), False), (dict(drop_unlicensed=0.0026), False)])
def test_the_third_test_has_three_bounds(change, is_one):
    assert interpret.is_detector(dict(drop=0.005, drop_unlicensed=0.002, above=0.95) | change) == is_one


def test_a_unit_that_helps_as_much_without_a_licensor_is_no_detector():
    """It fires on comparatives and, a little less, on adjectives: removing it costs `than` after both."""
    model, unit = planted()
    with torch.no_grad():
        model.tokens.weight[WORDS.encode(' '.join(prepare.ADJECTIVES)), 0] = 4.9
        model.blocks[1].ffn.up.weight[unit, 0] = 3
    (record,) = [r for r in licensing_test(model, WORDS, CPU, desc='')[0] if r['family'] == 'comparative']
    assert record['unit'] == unit and record['auc'] >= 0.9 and record['rank'] == 0 and not record['detector']
    assert record['drop'] > 0.1 and record['drop_unlicensed'] > 0.1


def test_detectors_are_counted_by_family_and_layer():
    records = [dict(family=family, layer=layer, detector=detector) for family, layer, detector in
               [('passive', 0, True), ('passive', 0, True), ('passive', 3, True), ('negation', 1, True),
                ('negation', 2, False), ('neither', 1, False)]]
    assert interpret.count_detectors(records) == {'passive': {'0': 2, '3': 1}, 'negation': {'1': 1}}


@pytest.mark.parametrize('seed', [1, 2, 3])
def test_an_untrained_model_has_no_detectors(seed):
    torch.manual_seed(seed)
    model = GPT(WORDS.vocab_size, **SHAPE).eval()
    assert interpret.count_detectors(licensing_test(model, WORDS, CPU, seed, desc='')[0]) == {}


def test_controls_forget_everything_or_know_nothing():
    model, unit = planted()
    task = encode_places(WORDS, prepare.licensed_places(prepare.comparative, 30), CPU)
    with torch.no_grad():
        before = trace(model, task.ids)[1].hidden[..., unit]
        forgets = changed(model, SHAPE, 'rates', 1)
        after = trace(forgets, task.ids)[1]
    assert (before[torch.arange(30), task.last[:30]] > 0.4).all()          # carried over up to three words
    torch.testing.assert_close(after.hidden[..., unit],
                               response(forgets.blocks[1].ffn, after.ffn, after.hidden)[..., unit].sigmoid())
    fresh = changed(model, SHAPE, 'untrained', 1)
    assert fresh is not model and float(fresh.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


# ---- readings

def test_means_by_token_are_literal():
    ids, values = torch.tensor([5, 7, 5, 5, 7, 9]), torch.arange(12.).view(6, 2)
    tokens, means = token_means(ids, values, least=2)
    assert tokens.tolist() == [5, 7] and means.tolist() == [pytest.approx([10 / 3, 13 / 3]), [5, 6]]
    assert token_means(torch.tensor([3, 4]), values[:2], least=5)[0].tolist() == [3, 4]


def test_a_quantifier_reads_as_what_was_planted():
    model, unit = planted()
    ids_BT = torch.tensor([WORDS.encode('fred is taller here today than anna . fred is old . the dog')] * 5
                          + [WORDS.encode('anna is older now than the dog . fred is tall . anna ran')] * 5)
    seen = trace(model, ids_BT)
    r = read_layer(model, 1, seen[1], ids_BT)
    record = describe(r, unit, WORDS)
    assert re.fullmatch(r'EXISTS\[0\.84\]\((older\|taller|taller\|older)\) -> than', record['name'])
    assert record['half_life'] == pytest.approx(4.0, abs=1e-3) and record['kind'] == 'exists'
    assert record['write_norm'] == pytest.approx(3) and record['lowers'][0][1] < 0 < record['raises'][0][1]
    places = contexts(r, unit, ids_BT, WORDS)
    assert len(places) == 5 and max(places[0], key=lambda word: word[1])[0] in ('taller', 'older')
    text, fires, hidden = zip(*places[0])
    at = fires.index(max(fires))
    assert fires[at] > 0.99 and hidden[at + 1] == pytest.approx(hidden[at] * 0.5 ** (1 / 4)) and fires[at + 1] < 0.2
    proportion = describe(r, model.blocks[1].ffn.units['proportion'].start, WORDS)
    assert proportion['name'].startswith('OFTEN[0.84](')


def test_operand_units_read_as_and_as_but_not_and_as_soft_gates():
    """Feature 0 marks comparatives, feature 2 the words from `helped` on; B of the second pair stands still."""
    model, _ = planted()
    ffn, n = model.blocks[1].ffn, 32
    a, b = ffn.units['and'].start, ffn.units['and_not'].start
    with torch.no_grad():
        model.tokens.weight[:, 2] = 0
        model.tokens.weight[WORDS.encode('taller older helped slept'), 2] = 5
        model.tokens.weight[WORDS.encode('taller older stronger faster'), 0] = 5
        ffn.up.weight[a:b + n] = 0
        ffn.up.weight[a, 0] = ffn.up.weight[b, 2] = ffn.up.weight[a + 1, 0] = ffn.up.weight[b + 2, 2] = 6
        ffn.up.bias[a] = ffn.up.bias[b] = ffn.up.bias[a + 1] = ffn.up.bias[b + 2] = -6
    words = 'taller older stronger faster helped slept fred anna bob mary the dog'
    ids_BT = torch.tensor([WORDS.encode(words)] * 6)
    r = read_layer(model, 1, trace(model, ids_BT)[1], ids_BT)
    name = lambda unit: re.sub(r' -> .*', '', describe(r, unit, WORDS)['name'])
    operand = r'\(\w+\|\w+\|\w+\|\.\.\)'
    assert re.fullmatch(f'{operand} and {operand}', name(a)) and re.fullmatch(f'{operand} but not {operand}', name(b))
    assert describe(r, a, WORDS)['r2'] < 0.9 <= describe(r, a + 1, WORDS)['r2']
    both = {text for text, _ in describe(r, a, WORDS)['fires'][:2]}
    only = {text for text, _ in describe(r, b, WORDS)['fires'][:2]}
    assert both == {'taller', 'older'} and only == {'stronger', 'faster'}
    assert re.fullmatch(operand, name(a + 1)) and 'not' not in name(b + 1)     # B stands still: A alone
    assert {text for text, _ in describe(r, a + 2, WORDS)['b'][:4]} == {'taller', 'older', 'helped', 'slept'}
    assert re.fullmatch(operand, name(a + 2)) and name(b + 2).startswith('not (')      # A stands still: B alone


def test_pointwise_and_gated_models_are_read_by_what_they_have():
    for kind in ('gelu', 'swiglu'):
        model, ids_BT = random_model(ffn=kind, quant=False), ids_of()
        seen = trace(model, ids_BT)
        r = read_layer(model, 0, seen[0], ids_BT)
        assert describe(r, 3, WORDS)['name'].startswith(f'{kind}(') and 'half_life' not in describe(r, 3, WORDS)
        expected = model.blocks[0].ffn.up(seen[0].ffn) if kind == 'gelu' else seen[0].hidden
        torch.testing.assert_close(r.fires, expected.detach())


# ---- layers

def test_participation_ratio_closed_forms():
    signs = torch.cartesian_prod(*[torch.tensor([-1., 1.])] * 5)
    assert participation_ratio(signs) == pytest.approx(5) == participation_ratio(3 + 0.1 * signs)
    assert participation_ratio(signs[:, :1].expand(-1, 4)) == pytest.approx(1)
    assert participation_ratio(signs * torch.tensor([1, 2, 0, 0, 0])) == pytest.approx((1 + 4) ** 2 / (1 + 16))
    assert participation_ratio(torch.ones(9, 3)) == 0


def test_layers_say_what_their_ffn_says():
    model, ids_BT = random_model(), ids_of()
    with torch.no_grad():
        model.blocks[1].ffn.quantifier.decay[:2] = 9.0                    # two latches: a half-life of 5,600 tokens
        seen = trace(model, ids_BT)
        for layer, record in enumerate(layer_records(model, seen)):
            ffn = model.blocks[layer].ffn
            assert record['two_operand_share'] == float(ffn.two_operand_share(seen[layer].ffn))
            assert record['saturation'] == float(ffn.saturation(seen[layer].ffn)) and record['latches'] == 2 * layer
            assert record['half_life_exists'] == pytest.approx(float(ffn.quantifier.half_life()[:16].median()))
            assert record['half_life_proportion'] == pytest.approx(float(ffn.quantifier.half_life()[16:].median()))
            hidden = seen[layer].hidden.flatten(0, 1)
            for kind, part in (('gelu', slice(0, 64)), ('operand', slice(64, 96)), ('quantifier', slice(96, 128))):
                assert record['participation_ratio'][kind] == pytest.approx(participation_ratio(hidden[:, part]))
    gelu = random_model(ffn='gelu', quant=False)
    (record, _) = layer_records(gelu, trace(gelu, ids_BT))
    assert record['two_operand_share'] is record['saturation'] is None and 'latches' not in record


def test_the_table_has_a_column_a_layer():
    records = [dict(layer=0, two_operand_share=0.123, saturation=None, participation_ratio={'all': 12.34}),
               dict(layer=1, two_operand_share=1.0, half_life_exists=69.3, latches=3, participation_ratio={'all': 0.5})]
    header, lines = interpret.layer_table(records)
    assert header == ['layer', 0, 1] and lines[0] == ['two-operand share', '0.12', '1.0']
    assert lines[1:] == [['saturation', '', ''], ['half-life, exists', '', '69.3'], ['half-life, proportion', '', ''],
                         ['latches', '', '3'], ['participation ratio, all', '12.3', '0.50']]


def test_redundancy_is_the_loss_with_units_at_their_means():
    model, ids_BT = random_model(), ids_of(T=17)
    seen, (x_BT, targets_BT) = trace(model, ids_BT[:, :-1]), (ids_BT[:, :-1], ids_BT[:, 1:])
    records = redundancy(model, seen, targets_BT)
    assert [(r['layer'], r['part'], r['removed']) for r in records] == [
        (layer, part, n) for layer in (0, 1) for part in ('gelu', 'Boolean') for n in (1, 10, 64)]
    with torch.no_grad():
        block, hidden = model.blocks[1], seen[1].hidden.clone()
        hidden[..., 64:] = hidden[..., 64:].mean((0, 1))
        x = seen[1].block + block.attn(block.norm_attn(seen[1].block)) + block.ffn.down(hidden)
        loss = F.cross_entropy(model.head(model.norm(x))[..., :model.vocab_size].flatten(0, 1), targets_BT.flatten())
        base = model(x_BT, targets_BT)
    assert records[-1]['cost'] == pytest.approx(float(loss - base), abs=1e-5) and abs(records[-1]['cost']) > 3e-4
    single = {ffn: redundancy(m := random_model(ffn=ffn, quant=False), trace(m, x_BT), targets_BT)
              for ffn in ('gelu', 'nc')}
    assert [r['removed'] for r in single['gelu']] == [1, 10, 32] * 2 and len(single['nc']) == 12


# ---- the page

def test_the_page_needs_no_other_file_and_escapes_what_it_shows(tmp_path):
    (tmp_path / 'a.png').write_bytes(b'png')
    record = dict(layer=0, unit=1, kind='exists', name='EXISTS[0.60](<unk>|&) -> <em>', fires=[('<unk>', 0.9)],
                  raises=[('<i>', 1.0)], lowers=[('"', -1.0)], half_life=1.5, write_norm=1.0)
    text = page('<title>', ['a<'], [['<td>x']], {'"figure"': tmp_path / 'a.png'},
                [('<h>', '<p>?', [html_card(record, [[('<unk>', 0.9, 0.5), ('of', 0.3, 7.0)]])])])
    for raw in ('<unk>', '<em>', '<i>', '<td>x', '<h>', '<p>?', '<title><', 'a<<'):
        assert raw not in text, raw
    assert '&lt;unk&gt;' in text and 'EXISTS[0.60](&lt;unk&gt;|&amp;) -&gt; &lt;em&gt;' in text
    shade = 'background:rgba(213,94,0,{});border-color:rgba(0,114,178,{})'          # relative to the highest; at most 1
    assert shade.format('0.75', '0.50') in text and shade.format('0.25', '1.00') in text
    assert re.findall(r'src="(.{0,22})', text) == ['data:image/png;base64,'] and 'cG5n' in text
    assert not re.search(r'https?:|<script|<link|@import|url\(|href', text) and 'name="viewport"' in text


# ---- the command

@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    prepare.make_licensing(folder, n_tokens=20_000)
    return folder


def save(model, folder, data_dir, name='last.pt', step=7, **options):
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPE, **options, 'dataset': 'licensing', 'data_dir': str(data_dir)}
    assert set(MODEL_KEYS) <= set(config)
    runtime.save_checkpoint(folder / name, dict(model=model.state_dict(), config=config, step=step,
                                                vocab_size=model.vocab_size))
    return folder


@pytest.fixture
def command(run_main):
    """command('--key=value', ...) -> (status, lines of stdout, stderr)."""
    def call(*words):
        status, out, err = run_main(interpret, '--device=cpu', *words)
        return status, out.splitlines(), err
    return call


def test_a_plain_run_names_the_planted_detector_and_writes_its_files(tmp_path, data_dir, command):
    model, unit = planted()
    run = save(model, tmp_path / 'run', data_dir)
    status, lines, _ = command(f'--ckpt={run}', f'--html={tmp_path / "p.html"}', '--n_tokens=2000')
    values = json.loads(lines[-1])
    assert status == 0 and values['detectors'] == {'comparative': {'1': 1}} and values['latches'] == 0
    assert values['half_life_median'] == values['half_life_median_proportion'] == pytest.approx(4, abs=1e-3)
    (line,) = [line for line in lines if line.startswith(f'| comparative | 1 | {unit} |')]
    assert '-> than' in line and 'EXISTS[0.84](' in line
    start = lines.index('quantifiers that write most:')
    some = [re.match(r'  layer (\d) unit +(\d+) ', line).groups() for line in lines[start + 1:start + 7]]
    assert [layer for layer, _ in some] == ['0'] * 3 + ['1'] * 3 and some[3][1] == str(unit) and not lines[start + 7]
    assert {path.name for path in run.iterdir()} == {'last.pt', 'interpret.json', 'half_lives.png', 'redundancy.png'}
    assert {path.name for path in run.iterdir()} - {'last.pt'} <= set(runtime.RUN_FILES)      # --overwrite deletes them
    kept = json.loads((run / 'interpret.json').read_text())
    assert kept['step'] == 7 and len(kept['units']) == 128 and [r['detector'] for r in kept['passed']].count(True) == 1
    text = (tmp_path / 'p.html').read_text()
    assert '<b>comparative</b> AUC 1.000; it raises 0 tokens' in text and text.count('<img') == 2
    assert not re.search(r'https?:|src="(?!data:)', text)


def test_one_layer_and_one_unit(tmp_path, data_dir, command):
    model, unit = planted()
    run = save(model, tmp_path, data_dir)
    status, lines, _ = command(f'--ckpt={run}', '--layer=1')
    assert status == 0 and len(lines) == 64 + 1 and any(line.split()[0] == str(unit) for line in lines)
    status, lines, _ = command(f'--ckpt={run}', '--layer=1', f'--unit={unit}')
    assert status == 0 and 'than' in json.loads(lines[-1])['name'] and sum('context' in line for line in lines) == 5
    assert all(re.search(r'\w+er\[(9\d|100)\]', line) for line in lines if 'context' in line)
    assert [path.name for path in run.iterdir()] == ['last.pt']


def test_a_gelu_model_is_read_without_quantifiers(tmp_path, data_dir, command):
    run = save(random_model(ffn='gelu', quant=False), tmp_path, data_dir, ffn='gelu', quant=False)
    status, lines, _ = command(f'--ckpt={run}', '--n_tokens=500')
    assert status == 0 and 'half_life_median' not in json.loads(lines[-1])
    assert 'quantifiers that write most: none, this model has ffn=gelu' in lines
    assert not (run / 'half_lives.png').exists() and (run / 'redundancy.png').exists()


def test_logic_over_the_checkpoints_of_runs(tmp_path, data_dir, command):
    for name, quant in (('a', True), ('b', False)):
        for step in (10, 200):
            save(random_model(step, quant=quant), tmp_path / name, data_dir, f'step_{step:06d}.pt', step, quant=quant)
    runs = f'{tmp_path / "a"},{tmp_path / "b"}'
    status, lines, _ = command(f'--over={runs}', '--n_tokens=500')
    kept, values = json.loads((tmp_path / 'a' / 'over.json').read_text()), json.loads(lines[-1])
    assert status == 0 and list(kept) == runs.split(',') == list(values) and (tmp_path / 'a' / 'over.png').is_file()
    assert {'over.json', 'over.png'} <= set(runtime.RUN_FILES)
    for run, points in kept.items():
        assert [point['step'] for point in points] == [10, 200]
        last = [record['two_operand_share'] for record in points[1]['layers']]
        assert last == pytest.approx(values[run]['two_operand_share'], abs=1e-5)
        assert points[0]['layers'] != points[1]['layers'] and len(points[0]['layers']) == 2


@pytest.fixture(scope='module')
def studied(tmp_path_factory, data_dir):
    """Folders of a study's runs; the first of them has a planted detector."""
    folder = tmp_path_factory.mktemp('study')
    for row, _ in interpret.STUDY.values():
        kind = dict(ffn=row.partition('+')[0], quant='+' in row)
        save(planted()[0] if row == 'nc+quant' else random_model(**kind), folder / f'{row}-seed1', data_dir, **kind)
    return folder


def test_the_study_counts_by_model_kind_and_family(studied, here, command):
    status, lines, err = command(f'--study={studied}', '--seeds=1', '--n_tokens=200')
    values = json.loads(lines[-1])
    found = values['nc+quant: quantifier']
    assert status == 0 and found == dict(comparative='1', passive='0', neither='0', negation='0')
    assert values['nc+quant, untrained: quantifier']['comparative'] == '0' and 'gelu: quantifier' not in values
    kept = json.loads((here / 'results' / 'detectors.json').read_text())
    assert [record['model'] for record in kept['records']] == list(interpret.STUDY) and kept['test']['places'] == 20
    text = (here / 'results' / 'detectors.md').read_text()
    assert text.count('| model |') == 4
    for record in kept['records']:                              # only models as they were trained
        assert ('redundancy' in record) == (interpret.STUDY[record['model']][1] == '')
        for layer, part in {(one['layer'], one['part']) for one in record.get('redundancy', [])}:
            costs = [one for one in record['redundancy'] if (one['layer'], one['part']) == (layer, part)]
            cells = [*(f'{one["cost"]:.4f}' for one in costs), str(costs[-1]['removed'])]
            assert f'| {record["model"]} | {layer} | {part} | {" | ".join(cells)} |' in text
    assert f'{len(interpret.STUDY)}/{len(interpret.STUDY)}' in err                  # the bar


def test_a_study_goes_on_where_it_was_left_and_measures_anew_what_was_trained_anew(studied, here, command, monkeypatch):
    words, measured, stop_at = [f'--study={studied}', '--seeds=1', '--n_tokens=200'], [], [2]

    def counting(model, *rest, **options):
        if len(measured) in stop_at:
            raise KeyboardInterrupt
        measured.append(model)
        return [dict(family='passive', kind='gelu', detector=True)], []

    monkeypatch.setattr(interpret, 'licensing_test', counting)
    monkeypatch.setattr(interpret, 'STUDY', dict(list(interpret.STUDY.items())[:2] + [('gelu', ('gelu', ''))]))
    status, _, err = command(*words)
    assert status == 130 and err.endswith('error: interrupted: the same command goes on from there\n')
    stop_at.clear()
    path = here / 'results' / 'detectors.json'
    assert command(*words)[0] == 0 and len(measured) == 3
    first = path.read_bytes()
    assert command(*words)[0] == 0 and len(measured) == 3 and path.read_bytes() == first
    other = here / 'runs'
    for row in ('nc+quant', 'gelu'):
        (other / f'{row}-seed1').mkdir(parents=True)
        (other / f'{row}-seed1' / 'last.pt').write_bytes((studied / f'{row}-seed1' / 'last.pt').read_bytes())
    assert command(f'--study={other}', *words[1:])[0] == 0 and len(measured) == 3
    saved = runtime.load_checkpoint(other / 'gelu-seed1' / 'last.pt')
    saved['model']['blocks.0.ffn.up.bias'][3] += 1
    runtime.save_checkpoint(other / 'gelu-seed1' / 'last.pt', saved)
    assert command(f'--study={other}', *words[1:])[0] == 0 and len(measured) == 4


def test_a_model_of_another_seed_is_read_on_other_sentences(data_dir, here, command, monkeypatch):
    seeds, gelu = [], dict(ffn='gelu', quant=False)
    for seed in (1, 2):
        save(random_model(**gelu), here / 'runs' / f'gelu-seed{seed}', data_dir, **gelu)
    monkeypatch.setattr(interpret, 'licensing_test', lambda *args, desc: (seeds.append(args[3]) or [], []))
    monkeypatch.setattr(interpret, 'STUDY', {'gelu': ('gelu', '')})
    assert command('--study=runs', '--seeds=2,1', '--n_tokens=200')[0] == 0 and seeds == [2, 1]
    of = lambda seed: prepare.licensed_places(prepare.passive, 20, seed)
    assert of(1) == of(1) and of(1) != of(2)


@pytest.mark.parametrize('content, says', [
    ('{"settings": ', 'cannot read'),
    ('[1, 2]', 'no JSON object'),
    ('{"test": {}}', 'measured with None'),
    ('{"settings": {"seed": 1}, "records": []}', "measured with {'seed': 1}, not {'test'"),
])
def test_a_study_s_file_that_is_none_is_left_alone(studied, here, command, content, says):
    (here / 'out').mkdir()
    (here / 'out' / 'detectors.json').write_text(content)
    status, lines, err = command(f'--study={studied}', '--seeds=1')
    assert status == 2 and not lines and err.count('\n') == 1 and says in err and 'move it away' in err
    assert (here / 'out' / 'detectors.json').read_text() == content


def test_a_study_of_other_settings_says_which(studied, here, command, monkeypatch):
    monkeypatch.setattr(interpret, 'STUDY', {'gelu': ('gelu', '')})
    assert command(f'--study={studied}', '--seeds=1', '--n_tokens=200')[0] == 0
    status, _, err = command(f'--study={studied}', '--seeds=1', '--n_tokens=300')
    assert status == 2 and re.search(r"'n_tokens': 200}, not .*'n_tokens': 300}", err)


@pytest.mark.parametrize('words, says', [
    (['--unit=3'], 'which layer'),
    (['--layer=2'], 'from 0 to 1'),
    (['--layer=1', '--unit=128'], 'from 0 to 127'),
    (['--n_tokens=0'], 'at least 1'),
    (['--over=x', '--study=y'], 'give one'),
    (['--layer=1', '--html=x.html'], 'give one'),
    (['--over=RUN'], 'no step_*.pt'),
    (['--study=RUN'], 'no run'),
    (['--study=RUN', '--seeds=a'], 'whole numbers'),
])
def test_a_mistake_ends_in_one_line(tmp_path, here, data_dir, command, words, says):
    run = save(random_model(), tmp_path / 'run', data_dir)
    status, lines, err = command(f'--ckpt={run}', *(word.replace('RUN', str(run)) for word in words))
    assert status == 2 and not lines and err.startswith('error: ') and says in err and err.count('\n') == 1
    assert [path.name for path in run.iterdir()] == ['last.pt']


def test_the_licensing_test_needs_a_context_as_long_as_its_sentences(tmp_path, data_dir, command):
    model = random_model(block_size=6)
    status, _, err = command(f'--ckpt={save(model, tmp_path / "run", data_dir, block_size=6)}', '--n_tokens=60')
    assert status == 2 and err.startswith('error: block_size=6: ') and err.count('\n') == 1


def test_bytes_have_no_licensing_test(tmp_path, command):
    (tmp_path / 'text.txt').write_text('the dog is older than the cat. ' * 200)
    prepare.make_text(tmp_path, 'licensing', str(tmp_path / 'text.txt'), tokenizer='bytes', num_threads=1)
    torch.manual_seed(0)
    run = save(GPT(257, **SHAPE), tmp_path / 'run', tmp_path)
    status, lines, _ = command(f'--ckpt={run}', '--n_tokens=200')
    assert status == 0 and json.loads(lines[-1])['detectors'] == {} and any('bytes' in line for line in lines)
