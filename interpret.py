"""Reads the units of a trained GPT: what each fires on, remembers and predicts (paper A, sections 6, 7 and 9).

    python interpret.py                                        # the newest run of train_lm.py: half a minute on a CPU
    python interpret.py --ckpt=out/lm/RUN --html=units.html    # the same as one page to read in a browser
    python interpret.py --ckpt=out/lm/RUN --layer=2            # the Boolean units of a layer by name (layers from 0)
    python interpret.py --ckpt=out/lm/RUN --layer=2 --unit=470 # all about one unit
    python interpret.py --over=out/lm/A,out/lm/B               # logic over the checkpoints of runs trained with --keep
    python interpret.py --study=out/compare                    # the runs of train_lm.py --compare: is a licensing
                                                               # detector due to the architecture, memory, training?

A unit by name, from the tokens that raise its memberships to the tokens that its write raises:

    EXISTS[0.60](taller|older|..) -> than    such a token has occurred; 0.60 of that is left a token later
    OFTEN[0.90](agrees|..) -> most           how often lately
    (is|was) and (tall|..) -> today          both at the same token; "but not" where the second one is negated
    (tall|..) -> today                       where one operand explains 90% of the unit (a soft gate)

What is read and measured:

    half-life    of a quantifier: tokens until half is forgotten; a latch outlasts the context
    fires on     tokens with the highest mean membership; for a GELU unit the mean pre-activation
    raises       logit lens: the unit's column of `down` through the final norm's gain and the head
    detector     a unit that passes three tests on held-out sentences of a family (comparative, passive, neither,
                 negation; prepare.licensed_places), all at the bounds of TEST:
                 1 AUC: it fires more on licensors than on the other tokens; 2 lens: a licensed word is among the tokens
                 that it raises most; 3 mean ablation: setting it to its mean costs the licensed word more
                 log-probability than 95 of 100 random units do, and twice what it costs where the licensor is missing
    groups       the units of a kind that pass 1 and 2, removed together, against as many random ones of their kind
    redundancy   loss against the number of units removed (mean ablation), by layer: Boolean units and GELU units
    participation ratio   (sum of eigenvalues)^2 / sum of squares, of the covariance of hidden units: how many
                 directions they really use

A plain run writes interpret.json, half_lives.png and redundancy.png to the folder of the checkpoint, --over over.json
and over.png to that of the first run, --study results/detectors.json and .md, and each model as it is measured to
out/detectors.json, from where the same command goes on. The last line: detectors, a count by family and layer.
"""

import base64
import contextlib
import html
import itertools
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

import prepare
from evaluate import batch_at, load_model, tokenizer_of, windows
from model import GPT, MODEL_KEYS, POINTWISE, SOFT_GATE
from runtime import (check_numbers, check_results, configure, fail, folder_of, interruptible, launch, plain, pyplot,
                     read_json, result, save_figure, seeds_of, spread, table, write_file, write_json, write_text)

DEFAULTS = dict(
    ckpt='latest',              # a run's folder (its best.pt, else last.pt), a checkpoint, or latest
    data_dir='',                # where prepare.py writes; '' is where the model was trained from
    device='auto',              # auto | cpu | cuda | mps
    n_tokens=8192,              # validation tokens that the units are read on
    layer=-1,                   # read this layer alone
    unit=-1,                    # and in it this hidden unit
    html='',                    # file for a page with all of it
    seed=1,                     # draws test sentences and random units
    # instead of reading one model
    over='',                    # folders of runs with step_*.pt, with commas
    study='',                   # folder of the runs of train_lm.py --compare
    seeds='1,2,3',              # of that study
)
# A detector, see above. Chosen by looking at models of seed CHOSEN_ON, reported on the others.
CHOSEN_ON = 1
TEST = dict(places=50, auc=0.9, top_k=5, random_units=100, above=0.95, drop=0.002, ratio=2.0)
KINDS = {'exists': 'quantifier', 'proportion': 'quantifier', 'and': 'operand', 'and_not': 'operand'}
SHOWN = ('auc', 'rank', 'drop', 'drop_unlicensed', 'above')
LEGEND = ('auc: it fires on licensors rather than other tokens; rank: how many tokens it raises more than the licensed '
          'word; drop: nats that this word loses without it; above: share of random units that cost less')
LABELS = dict(two_operand_share='two-operand share', saturation='saturation', half_life_exists='half-life, exists',
              half_life_proportion='half-life, proportion', latches='latches')
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')


# ---- inside a model

@contextlib.contextmanager
def hooked(hooks):
    """Forward pre-hooks [(module, hook)], for the length of a block."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def trace(model, ids_BT):
    """What each layer sees of the tokens: a list of namespaces block [B,T,D] (what enters the layer), ffn [B,T,D] (what
    enters its FFN) and hidden [B,T,F]."""
    seen = [SimpleNamespace() for _ in model.blocks]

    def keep(layer, name):
        return lambda module, inputs: setattr(layer, name, inputs[0])

    with hooked([(module, keep(layer, name)) for layer, block in zip(seen, model.blocks)
                 for module, name in ((block, 'block'), (block.ffn, 'ffn'), (block.ffn.down, 'hidden'))]):
        model(ids_BT)
    return seen


def parts_of(ffn):
    """The part of FFN.units that each hidden unit belongs to, [F]."""
    return [name for name, part in ffn.units.items() for _ in range(part.start, part.stop)]


@torch.no_grad()
def response(ffn, x_BTD, hidden_BTF):
    """What each hidden unit makes of a token by itself, [B,T,F]: a quantifier its membership before it is carried on, a
    pointwise unit its pre-activation, any other its value. (Pre-activations of q rank like the memberships, without
    ties where the sigmoid saturates.)"""
    if ffn.kind in POINTWISE:
        return ffn.up(x_BTD)
    if ffn.kind != 'nc':
        return hidden_BTF
    pre_BTF = ffn.up(x_BTD)
    pairs = slice(ffn.units['and'].start, ffn.units['and_not'].stop)
    pre_BTF[..., pairs] = hidden_BTF[..., pairs]
    return pre_BTF


@torch.no_grad()
def lens(model, layer):
    """Logit lens: what adding 1 to a hidden unit does to each token's logit, [V,F], but for the final norm's division,
    which is one positive number a token of text. What a unit writes to every direction alike the norm's centring
    removes."""
    write_DF = model.blocks[layer].ffn.down.weight
    write_DF = model.norm.weight[:, None] * (write_DF - write_DF.mean(0))
    return model.tokens.weight[:model.vocab_size] @ write_DF


@torch.no_grad()
def ablation(model, seen, score, real_BT=...):
    """cost(units, n=None) -> [B], how far each sequence's score falls when units, [(layer, unit)], are set to their
    means over a trace's tokens (those of real_BT); n: of the first n sequences alone. score: of what the final norm
    gives, [B,T,D] -> [B]."""
    means = [at.hidden[real_BT].flatten(0, -2).mean(0) for at in seen]

    def finish(x_BTD, layer):
        for block in model.blocks[layer:]:
            x_BTD = block(x_BTD)
        return score(model.norm(x_BTD)).double()

    @torch.no_grad()
    def cost(units, n=None):
        chosen = {}
        for layer, unit in units:
            chosen.setdefault(layer, []).append(unit)

        def replace(layer):
            def hook(module, inputs):
                hidden_BTF = inputs[0].clone()
                hidden_BTF[..., chosen[layer]] = means[layer][chosen[layer]].to(hidden_BTF.dtype)
                return (hidden_BTF,)
            return model.blocks[layer].ffn.down, hook

        first = min(chosen)
        with hooked(map(replace, chosen)):
            return before_B[:n] - finish(seen[first].block[:n], first)

    before_B = finish(seen[0].block, 0)
    return cost


# ---- the licensing test

def auc(in_NF, out_MF):
    """The chance that one of N values exceeds one of M, ties as half: [F]."""
    out_FM, in_FN = out_MF.T.sort(dim=1).values.contiguous(), in_NF.T.contiguous()
    below, up_to = (torch.searchsorted(out_FM, in_FN, right=right) for right in (False, True))
    return (below + up_to).double().mean(1) / (2 * out_FM.size(1))


def encode_places(tokenizer, places, device):
    """prepare.licensed_places as tokens, after an end of text: ids [2n,T], the licensed half first; real [2n,T], last
    [2n] (the token from which the word is predicted), licensor [n] (its last token), word [2n] (its first token)."""
    rows = [[tokenizer.encode(' ' + word) for word in place[key]] for key in ('licensed', 'unlicensed')
            for place in places]
    licensor_n = [sum(map(len, words[:place['licensor'] + 1])) for words, place in zip(rows, places)]
    rows = [[tokenizer.eot, *itertools.chain(*words)] for words in rows]
    last_B = torch.tensor([len(ids) - 1 for ids in rows])
    ids_BT = torch.tensor([*itertools.zip_longest(*rows, fillvalue=tokenizer.eot)]).T
    word_B = torch.tensor([tokenizer.encode(' ' + place['word'])[0] for place in places] * 2)
    fields = dict(ids=ids_BT, real=torch.arange(ids_BT.size(1)) <= last_B[:, None], last=last_B, word=word_B,
                  licensor=torch.tensor(licensor_n))
    return SimpleNamespace(**{key: value.to(device) for key, value in fields.items()})


def word_log_prob(model, task):
    """A score for ablation: the log-probability of the word at each place, [2n], or at the first of them."""
    def score(x_BTD):
        rows = torch.arange(len(x_BTD), device=x_BTD.device)
        logits_BV = model.head(x_BTD[rows, task.last[rows]])[:, :model.vocab_size]
        return logits_BV.float().log_softmax(-1)[rows, task.word[rows]]
    return score


def first_two_tests(model, task, seen):
    """AUC and lens: (auc [F], rank [F]) of each layer. rank: how many tokens the unit raises more than the licensed
    word (of two, the one that it raises more)."""
    rows, others_BT = torch.arange(len(task.licensor), device=task.licensor.device), task.real.clone()
    others_BT[rows, task.licensor] = False
    for layer, (block, at) in enumerate(zip(model.blocks, seen)):
        fires_BTF, raised_VF = response(block.ffn, at.ffn, at.hidden), lens(model, layer)
        rank_WF = torch.stack([(raised_VF > raised_VF[word]).sum(0) for word in task.word.unique()])
        yield auc(fires_BTF[rows, task.licensor], fires_BTF[others_BT]), rank_WF.min(0).values


def is_detector(record):
    """The third test, of a unit that passed the first two."""
    return (record['above'] >= TEST['above'] and
            record['drop'] >= max(TEST['drop'], TEST['ratio'] * record['drop_unlicensed']))


def licensing_test(model, tokenizer, device, seed=1, desc='licensing'):
    """The three tests in every unit and family, naming none beforehand.

    Returns (units, groups). units: records family, layer, unit, kind, auc, rank, drop and drop_unlicensed (nats),
    above (the share of random units whose drop is smaller), detector, of the units that pass the first two. groups:
    records family, kind, of (units of this kind), passed (the first two tests), and of those removed together drop,
    drop_unlicensed and drop_random, the mean over 20 random sets of the same kind and size.
    """
    generator, n = torch.Generator().manual_seed(seed), TEST['places']
    kinds = {(layer, unit): KINDS.get(part, part) for layer, block in enumerate(model.blocks)
             for unit, part in enumerate(parts_of(block.ffn))}

    def sample(options, size):
        return [options[i] for i in torch.randperm(len(options), generator=generator)[:size].tolist()]

    tasks = {family.__name__: encode_places(tokenizer, prepare.licensed_places(family, n, seed), device)
             for family in prepare.LICENSED}
    longest = max(task.ids.size(1) for task in tasks.values())
    if longest > model.block_size:
        fail(f'block_size={model.block_size}: the licensing test needs a context of at least {longest} tokens')
    units, groups = [], []
    for name, task in tqdm(tasks.items(), desc=desc, disable=not desc, dynamic_ncols=True, leave=False):
        seen = trace(model, task.ids)
        drop = ablation(model, seen, word_log_prob(model, task), task.real)
        random_R = torch.stack([drop([unit], n).mean() for unit in sample(list(kinds), TEST['random_units'])])
        passed = [dict(family=name, layer=layer, unit=unit, kind=kinds[layer, unit], auc=float(auc_F[unit]),
                       rank=int(rank_F[unit]))
                  for layer, (auc_F, rank_F) in enumerate(first_two_tests(model, task, seen))
                  for unit in ((auc_F >= TEST['auc']) & (rank_F < TEST['top_k'])).nonzero().flatten().tolist()]
        for record in passed:
            licensed, unlicensed = (part.mean() for part in drop([(record['layer'], record['unit'])]).split(n))
            record |= dict(drop=float(licensed), drop_unlicensed=float(unlicensed),
                           above=float((random_R < licensed).double().mean()))
            record['detector'] = is_detector(record)
        units += passed
        for kind in dict.fromkeys(kinds.values()):
            members = [(record['layer'], record['unit']) for record in passed if record['kind'] == kind]
            of_kind = [unit for unit in kinds if kinds[unit] == kind]
            group = dict(family=name, kind=kind, of=len(of_kind), passed=len(members))
            if members:
                licensed_n, unlicensed_n = drop(members).split(n)
                chance = [drop(sample(of_kind, len(members)), n).mean() for _ in range(20)]
                group |= dict(drop=float(licensed_n.mean()), drop_unlicensed=float(unlicensed_n.mean()),
                              drop_random=float(torch.stack(chance).mean()))
            groups.append(group)
    return units, groups


def count_detectors(units):
    """{family: {layer: how many}}, of families and layers that have any."""
    found = Counter((record['family'], str(record['layer'])) for record in units if record['detector'])
    return {family: {layer: n for (other, layer), n in found.items() if other == family} for family, _ in found}


# ---- reading units

def token_means(ids_N, values_NF, least=5):
    """(tokens [U], mean of the values at each [U,F]), of the tokens that occur at least so often (or at all, where
    none does)."""
    tokens_U, index_N, count_U = ids_N.unique(return_inverse=True, return_counts=True)
    sum_UF = torch.zeros(len(tokens_U), values_NF.size(1), dtype=values_NF.dtype, device=values_NF.device)
    sum_UF.index_add_(0, index_N, values_NF)
    often_U = count_U >= min(least, int(count_U.max()))
    return tokens_U[often_U], (sum_UF / count_U[:, None])[often_U]


@torch.no_grad()
def read_layer(model, layer, seen, ids_BT):
    """What the units of a layer do over a trace's tokens: kinds (parts_of), fires [B,T,F] (a quantifier's membership,
    else the response), hidden [B,T,F], tokens [U] and by_token [U,F] (mean of fires), operands {'a', 'b': [U,n]}, r2
    (see FFN.single_operand_r2) and first (whether A explains a unit better than B), raised [V,F], write_norm and
    half_life [F] (nan but for quantifiers)."""
    ffn, ids_N = model.blocks[layer].ffn, ids_BT.flatten()
    names, flat = parts_of(ffn), lambda x: x.flatten(0, -2).float()
    r = SimpleNamespace(layer=layer, kinds=names, fires=response(ffn, seen.ffn, seen.hidden).float(),
                        hidden=seen.hidden.float(), raised=lens(model, layer).float(), operands={},
                        write_norm=ffn.down.weight.norm(dim=0), half_life=torch.full((len(names),), math.nan).double())
    if ffn.quantifier:
        quantified = slice(ffn.units['and_not'].stop, None)
        r.fires[..., quantified] = r.fires[..., quantified].sigmoid()
        r.half_life[quantified] = ffn.quantifier.half_life().cpu()
    r.tokens, r.by_token = token_means(ids_N, flat(r.fires))
    if ffn.kind == 'nc' and ffn.units['and'].stop > ffn.units['and'].start:
        m = {key: flat(value) for key, value in ffn.memberships(seen.ffn).items()}
        r.operands = {key: token_means(ids_N, m[key])[1] for key in 'ab'}
        by_a, by_b = ffn.operand_r2(seen.ffn)
        r.r2, r.first = torch.maximum(by_a, by_b), by_a >= by_b
        r.pairs_from = ffn.units['and'].start
    return r


def shown(tokenizer, token):
    """A token as one would write it."""
    text = tokenizer.decode([int(token)])
    return text.strip() or repr(text)


def top(tokenizer, tokens, values, n=8):
    """[(text, value)] of the n largest."""
    best = values.topk(min(n, len(values)))
    return [(shown(tokenizer, tokens[i]), value) for value, i in zip(best.values.tolist(), best.indices.tolist())]


def either(best):
    """The tokens of a list from top as one word: those of at least half the first value, at most three by name."""
    names = [text for text, value in best if value >= best[0][1] / 2]
    return '|'.join(names[:3]) + ('|..' if len(names) > 3 else '')


def describe(r, unit, tokenizer):
    """A unit of a read layer as a record: layer, unit, kind, name, fires and raises and lowers [(token, value)],
    write_norm, and where it has them half_life, a, b (as fires) and r2."""
    kind, vocabulary = r.kinds[unit], range(len(r.raised))
    record = dict(layer=r.layer, unit=unit, kind=kind, name='', fires=top(tokenizer, r.tokens, r.by_token[:, unit]),
                  raises=top(tokenizer, vocabulary, r.raised[:, unit]), write_norm=float(r.write_norm[unit]),
                  lowers=[(text, -value) for text, value in top(tokenizer, vocabulary, -r.raised[:, unit])])
    fires = either(record['fires'])
    if kind in ('exists', 'proportion'):
        record['half_life'] = float(r.half_life[unit])
        rate = 0.5 ** (1 / record['half_life']) if record['half_life'] else 0.0
        body = f'{"EXISTS" if kind == "exists" else "OFTEN"}[{rate:.2f}]({fires})'
    elif kind in ('and', 'and_not'):
        i, n = unit - r.pairs_from, r.operands['a'].size(1)
        record |= {key: top(tokenizer, r.tokens, r.operands[key][:, i % n]) for key in 'ab'} | dict(r2=float(r.r2[i]))
        a, b = (f'({either(record[key])})' for key in 'ab')
        if record['r2'] >= SOFT_GATE:
            body = a if r.first[i] else f'{"not " * (kind == "and_not")}{b}'
        else:
            body = f'{a} {"and" if kind == "and" else "but not"} {b}'
    else:
        body = f'{kind}({fires})'
    record['name'] = f'{body} -> {either(record["raises"][:2])}'
    return record


def contexts(r, unit, ids_BT, tokenizer, n=5, reach=7):
    """Where the unit fires most, at most once a window: n lists of (token, fires, hidden) around the place."""
    best_B, at_B = r.fires[..., unit].max(dim=1)
    found = []
    for b in best_B.argsort(descending=True)[:n].tolist():
        around = range(max(0, int(at_B[b]) - reach), min(ids_BT.size(1), int(at_B[b]) + reach + 1))
        found.append([(shown(tokenizer, ids_BT[b, t]), float(r.fires[b, t, unit]), float(r.hidden[b, t, unit]))
                      for t in around])
    return found


def facts(record):
    """[(label, text)] of a record."""
    lists = dict(fires='fires on', a='A', b='B', raises='raises', lowers='lowers')
    rows = [(label, ', '.join(f'{text} {value:.2f}' for text, value in record[key]))
            for key, label in lists.items() if key in record]
    if 'half_life' in record:
        rows.append(('half-life', f'{record["half_life"]:.1f} tokens'))
    if 'r2' in record:
        gate = ': a soft gate' * (record['r2'] >= SOFT_GATE)
        rows.append(('one operand', f'explains {record["r2"]:.0%} of it{gate}'))
    if 'family' in record:
        rows.append((record['family'], f'AUC {record["auc"]:.3f}; it raises {record["rank"]} tokens more than the '
                     f'licensed word, which loses {record["drop"]:.4f} nats without the unit (with no licensor '
                     f'{record["drop_unlicensed"]:.4f}), more than without {record["above"]:.0%} of random units'))
    return rows


def card(record, places):
    """All about a unit as lines of text; in the contexts, the membership in percent where it is at least half the
    highest."""
    lines = [f'layer {record["layer"]} unit {record["unit"]}: {record["name"]}']
    lines += [f'  {label:<12}  {text}' for label, text in facts(record)]
    most = max(fires for place in places for _, fires, _ in place)
    lines += ['  context       ' + ' '.join(f'{text}[{100 * fires:.0f}]' if fires >= most / 2 > 0 else text
                                           for text, fires, _ in place) for place in places]
    return '\n'.join(lines)


# ---- layers as a whole

def participation_ratio(x_NF):
    """(sum of eigenvalues)^2 / (sum of their squares) of the covariance: F for independent units of one variance, 1
    where all move together, 0 where none moves."""
    x_NF = x_NF.double() - x_NF.double().mean(0)
    cov_FF = x_NF.T @ x_NF
    return float(cov_FF.trace().square() / cov_FF.square().sum().clamp_min(1e-300))


@torch.no_grad()
def layer_records(model, seen):
    """Of each layer: two_operand_share, saturation (None without Boolean units), participation ratio of all hidden
    units and of each kind, and half-lives (median) and latches where there are quantifiers."""
    quantifiers, records = model.quantifier_units(), []
    for layer, (block, at) in enumerate(zip(model.blocks, seen)):
        ffn, hidden_NF = block.ffn, at.hidden.flatten(0, 1)
        kinds, saturation = [KINDS.get(part, part) for part in parts_of(ffn)], ffn.saturation(at.ffn)
        ratios = {kind: participation_ratio(hidden_NF[:, [k == kind for k in kinds]]) for kind in dict.fromkeys(kinds)}
        record = dict(layer=layer, saturation=None if saturation is None else float(saturation),
                      two_operand_share=float(ffn.two_operand_share(at.ffn)) if 'operand' in kinds else None,
                      participation_ratio={'all': participation_ratio(hidden_NF), **ratios})
        if quantifiers:
            here = quantifiers['layer'] == layer
            for name, part in (('exists', quantifiers['exists']), ('proportion', ~quantifiers['exists'])):
                if (here & part).any():
                    record[f'half_life_{name}'] = float(quantifiers['half_life'][here & part].median())
            record['latches'] = int((quantifiers['half_life'][here] > model.block_size).sum())
        records.append(record)
    return records


def redundancy(model, seen, targets_BT, seed=1, draws=4):
    """Loss that removing units costs: records layer, part (Boolean or the activation's name), removed (1, 10, as many
    as the layer has Boolean units), cost (nats a token, mean over random draws). Claim A7; for a kind without Boolean
    units the largest number is a quarter of its units."""
    generator, records = torch.Generator().manual_seed(seed), []

    def score(x_BTD):
        logits_BVT = model.head(x_BTD)[..., :model.vocab_size].float().transpose(1, 2)
        return -torch.nn.functional.cross_entropy(logits_BVT, targets_BT, reduction='none').mean(1)

    cost = ablation(model, seen, score)
    for layer, block in enumerate(tqdm(model.blocks, desc='redundancy', dynamic_ncols=True, leave=False)):
        parts, names = {}, parts_of(block.ffn)
        for unit, name in enumerate(names):
            parts.setdefault('Boolean' if name in KINDS else name, []).append((layer, unit))
        most = len(parts.get('Boolean', ())) or len(names) // 4
        for part, members in parts.items():
            for removed in sorted(n for n in {1, min(10, most), most} if n <= len(members)):
                costs = [cost([members[i] for i in torch.randperm(len(members), generator=generator)[:removed]]).mean()
                         for _ in range(draws if removed < len(members) else 1)]
                records.append(dict(layer=layer, part=part, removed=removed, cost=float(sum(costs) / len(costs))))
    return records


def layer_table(records):
    """(header, lines) of layer_records, a column a layer."""
    rows = [(label, [record.get(key) for record in records]) for key, label in LABELS.items()]
    rows += [(f'participation ratio, {kind}', [record['participation_ratio'][kind] for record in records])
             for kind in records[0]['participation_ratio']]
    number = lambda x: '' if x is None else str(x) if isinstance(x, int) else f'{x:.2f}' if x < 1 else f'{x:.1f}'
    return (['layer', *(record['layer'] for record in records)],
            [[label, *map(number, values)] for label, values in rows])


# ---- figures

def draw_half_lives(path, model):
    """Histogram a layer, by sort of quantifier; latches stand right of the dashed line, at the context."""
    units = model.quantifier_units()
    half_life = units['half_life'].cpu().clamp(0.1, 10 * model.block_size).numpy()
    layers, exists = units['layer'].cpu().numpy(), units['exists'].cpu().numpy()
    bins = np.geomspace(0.1, 10 * model.block_size, 41)
    figure, axes = pyplot().subplots(model.n_layer, 1, figsize=(6, 1 + 1.2 * model.n_layer), sharex=True, squeeze=False,
                                     layout='constrained')
    for layer, axis in enumerate(axes[:, 0]):
        for name, color, part in (('exists', COLORS[0], exists), ('proportion', COLORS[1], ~exists)):
            axis.hist(half_life[(layers == layer) & part], bins, color=color, alpha=0.6, label=name)
        axis.axvline(model.block_size, color='#666666', ls='--', lw=1)
        axis.set(xscale='log', ylabel=f'layer {layer}')
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].legend()
    axes[-1, 0].set(xlabel='half-life, tokens')
    save_figure(figure, path)


def draw_redundancy(path, records):
    figure, axis = pyplot().subplots(figsize=(6, 4), layout='constrained')
    for key in dict.fromkeys((record['layer'], record['part']) for record in records):
        line = [record for record in records if (record['layer'], record['part']) == key]
        axis.plot([record['removed'] for record in line], [record['cost'] for record in line],
                  'o-' if key[1] == 'Boolean' else 'o--', color=COLORS[key[0] % len(COLORS)],
                  label=f'layer {key[0]}, {key[1]}')
    axis.set(xscale='log', xlabel='units removed', ylabel='loss added, nats a token')
    axis.set_yscale('symlog', linthresh=1e-3)
    costs = [record['cost'] for record in records]
    axis.set_ylim(2 * min(-1e-4, *costs), 2 * max(1e-3, *costs))
    axis.legend(fontsize='small')
    save_figure(figure, path)


# ---- over the checkpoints of runs

def over(c, device):
    """Two-operand share and saturation by layer, at every step_*.pt of the runs (claims A6, A12)."""
    runs, series = c.over.split(','), {}
    for run in runs:
        paths = sorted(Path(run).glob('step_*.pt'))
        if not paths:
            fail(f'no step_*.pt in {run}: expected a run of train_lm.py with --keep=N, which keeps every N-th step')
        for path in tqdm(paths, desc=Path(run).name, dynamic_ncols=True, leave=False):
            model, config, _ = load_model(path, device, c.data_dir)
            records = layer_records(model, trace(model, text_of(c, config, device)[0]))
            if records[0]['saturation'] is None:
                fail(f'{run} has no Boolean units (ffn={config["ffn"]}): expected runs of --ffn=nc')
            series.setdefault(run, []).append(dict(step=config['step'], layers=records))
    figure, axes = pyplot().subplots(len(runs), 2, figsize=(10, 3 * len(runs)), squeeze=False, layout='constrained')
    for row, (run, points) in zip(axes, series.items()):
        for axis, key in zip(row, ('two_operand_share', 'saturation')):
            for layer in range(len(points[0]['layers'])):
                axis.plot(*zip(*((point['step'], point['layers'][layer][key]) for point in points)), 'o-',
                          color=COLORS[layer % len(COLORS)], label=f'layer {layer}')
            axis.set(xlabel='step', ylabel=LABELS[key], title=Path(run).name, ylim=(-0.03, 1.03))
    axes[0, 1].legend(ncols=2)
    save_figure(figure, Path(runs[0], 'over.png'))
    write_json(Path(runs[0], 'over.json'), series)
    last = {run: points[-1]['layers'] for run, points in series.items()}
    return {run: {key: [record[key] for record in records] for key in ('two_operand_share', 'saturation')}
            for run, records in last.items()}


# ---- the study: what makes a detector?

STUDY = {   # model -> (run of train_lm.py --compare, what is changed in it)
    'nc+quant': ('nc+quant', ''),
    'nc+quant, every rate 0': ('nc+quant', 'rates'),
    'nc+quant, untrained': ('nc+quant', 'untrained'),
    'nc+quant, shuffled text': ('nc+quant-shuffled_text', ''),
    'nc': ('nc', ''),
    'gelu': ('gelu', ''),
    'gelu, untrained': ('gelu', 'untrained'),
}


def changed(model, config, change, seed):
    """The model without memory (every rate 0) or without training."""
    if change == 'rates':
        for block in model.blocks:
            block.ffn.quantifier.decay.data.fill_(-math.inf)
    if change == 'untrained':
        device = model.tokens.weight.device
        torch.manual_seed(seed)
        model = GPT(model.vocab_size, **{key: config[key] for key in MODEL_KEYS}).to(device).eval()
    return model


def study(c, device):
    """Claim A14: detectors by kind of unit and family, in models with and without quantifiers, memory and training, the
    models of each seed on sentences of their own. A model that has been trained anew since it was measured, which its
    weights' norm tells, is measured anew."""
    seeds, path, anew = seeds_of(c.seeds), Path('out', 'detectors.json'), 'move it away to begin anew'
    settings = plain(dict(test=TEST, seed=c.seed, n_tokens=c.n_tokens))
    there = read_json(path, anew) if path.exists() else dict(settings=settings, records=[])
    if there.get('settings') != settings:
        fail(f'{path} was measured with {there.get("settings")}, not {settings}: {anew}')
    kept = {(record['model'], record['seed']): record for record in there['records']}

    def load(name, seed):
        return load_model(folder_of(c.study, STUDY[name][0], seed), device, c.data_dir)

    def norm(model):
        return float(torch.cat([p.detach().double().flatten() for p in model.parameters()]).norm())

    for name, seed in itertools.product(STUDY, seeds):
        if not (folder := folder_of(c.study, STUDY[name][0], seed)).is_dir():
            fail(f'no run {folder}: expected the runs of `train_lm.py --preset=tiny --compare=all`')
    weights = {(name, seed): norm(load(name, seed)[0]) for seed in seeds for name in STUDY}
    check_results()
    todo = [key for key in weights if kept.get(key, {}).get('weights') != weights[key]]
    with tqdm(todo, unit='model', dynamic_ncols=True) as bar:
        for name, seed in bar:
            bar.set_postfix_str(f'{name}, seed {seed}')
            model, config, meta = load(name, seed)
            model = changed(model, config, STUDY[name][1], seed)
            units, groups = licensing_test(model, tokenizer_of(meta), device, seed, desc='')
            ids_BT, targets_BT = text_of(c, config, device)
            seen = trace(model, ids_BT)
            kept[name, seed] = dict(model=name, seed=seed, weights=weights[name, seed], units=units, groups=groups,
                                    layers=layer_records(model, seen))
            if not STUDY[name][1]:                              # as it was trained
                kept[name, seed]['redundancy'] = redundancy(model, seen, targets_BT, c.seed)
            write_json(path, dict(settings=settings, records=list(kept.values())), indent=None)
    records = [kept[name, seed] for name in STUDY for seed in seeds]
    write_json(Path('results', 'detectors.json'), dict(**settings, records=records), indent=None)
    text, values = study_tables(records)
    write_text(Path('results', 'detectors.md'), text)
    return values


def study_tables(records):
    """(Markdown, {model and kind of unit: {family: detectors of each seed}})."""
    families = [family.__name__ for family in prepare.LICENSED]
    values, unit_lines, group_lines, layer_lines, removal_lines = {}, [], [], [], []
    for name in dict.fromkeys(record['model'] for record in records):
        runs = [record for record in records if record['model'] == name]
        for kind, size in {group['kind']: group['of'] for group in runs[0]['groups']}.items():
            units = [[unit for unit in run['units'] if unit['kind'] == kind] for run in runs]
            found = {family: [sum(unit['detector'] for unit in row if unit['family'] == family) for row in units]
                     for family in families}
            values[f'{name}: {kind}'] = each = {family: ' / '.join(map(str, row)) for family, row in found.items()}
            others = [sum(counts) for run, *counts in zip(runs, *found.values()) if run['seed'] != CHOSEN_ON]
            unit_lines.append([name, kind, size, ' / '.join(str(len(row)) for row in units), *each.values(),
                               f'{1000 * sum(others) / len(others) / size:.1f}' if others else ''])
            for family in families:
                groups = [group for run in runs for group in run['groups']
                          if (group['kind'], group['family']) == (kind, family) and group['passed']]
                of = lambda key, digits=3: spread([group[key] for group in groups], digits)
                if groups:
                    group_lines.append([name, kind, family, of('passed', 0), of('drop'), of('drop_unlicensed'),
                                        of('drop_random')])
        for layer, rows in enumerate(zip(*(run['layers'] for run in runs))):
            ratios = [row['participation_ratio'] for row in rows]
            layer_lines.append([name, layer, *(spread([row[key] for row in rows], 2)
                                               for key in ('two_operand_share', 'saturation')),
                                *(spread([ratio.get(part) for ratio in ratios], 1)
                                  for part in ('all', 'gelu', 'operand', 'quantifier'))])
        costs = {}                                              # (layer, part) -> [cost of each seed] by number removed
        for record in itertools.chain.from_iterable(run.get('redundancy', []) for run in runs):
            at = costs.setdefault((record['layer'], record['part']), {})
            at.setdefault(record['removed'], []).append(record['cost'])
        removal_lines += [[name, *key, *(spread(at[n], 4) for n in sorted(at)), max(at)] for key, at in costs.items()]
    return '\n'.join([
        table(['model', 'units', 'of', 'pass AUC and lens', *families,
               f'detectors a 1,000, without seed {CHOSEN_ON}'], unit_lines),
        table(['model', 'units', 'family', 'removed together', 'cost, nats', 'without licensor', 'of random ones'],
              group_lines),
        table(['model', 'layer', 'two-operand share', 'saturation', 'participation ratio', 'of gelu', 'of operand',
               'of quantifier'], layer_lines),
        table(['model', 'layer', 'part', 'one unit removed: cost, nats a token', 'ten', 'a block', 'of so many'],
              removal_lines)]), values


# ---- the page

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem;color:#222;background:#fff}
h1,h2,h3{line-height:1.2}img{max-width:100%;height:auto}code{overflow-wrap:anywhere}
article{border:1px solid #ddd;border-radius:6px;padding:.3rem .9rem;margin:1rem 0}
article p{margin:.3rem 0}.scroll{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:.15rem .4rem;text-align:right}td:first-child,th:first-child{text-align:left}
.text{line-height:2}.text span{padding:.1rem .2rem;border-radius:3px;border-bottom:4px solid transparent}"""
INTRODUCTION = """<p>Some hidden units of this language model are explicit fuzzy logic. A <b>membership</b> between 0
and 1 says how far a token has a property. <code>EXISTS[0.60](x)</code> holds the strongest membership so far and keeps
0.60 of it from token to token; <code>OFTEN</code> is the recent average; <code>(x) and (y)</code> and <code>(x) but not
(y)</code> combine two properties of one token. After the arrow stand the next words that the unit makes likelier. In
the examples the ground of a word shows how strongly the unit answers to it, the line below it what the unit holds
there.</p>"""


def html_card(record, places):
    """All about a unit; in the contexts the ground shows how it answers to a word, the line below what it then holds.
    """
    most = max([fires for place in places for _, fires, _ in place] + [1e-9])
    shade = lambda rgb, share: f'rgba({rgb},{max(0.0, min(1.0, share)):.2f})'
    spans = [' '.join(f'<span style="background:{shade("213,94,0", 0.75 * fires / most)};'
                      f'border-color:{shade("0,114,178", hidden)}">{html.escape(text)}</span>'
                      for text, fires, hidden in place) for place in places]
    rows = ''.join(f'<p><b>{label}</b> {html.escape(text)}</p>' for label, text in facts(record))
    return (f'<article><h3>Layer {record["layer"]}, unit {record["unit"]}</h3><p><code>{html.escape(record["name"])}'
            f'</code></p>{rows}{"".join(f"""<p class="text">{span}</p>""" for span in spans)}</article>')


def page(title, header, lines, figures, sections):
    """One HTML file that needs no other. figures: {caption: PNG file}; sections: [(heading, explanation, [cards])]."""
    cells = lambda tag, row: '<tr>' + ''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in row) + '</tr>'
    layers = f'{cells("th", header)}{"".join(cells("td", line) for line in lines)}'
    images = ''.join(f'<h2>{html.escape(caption)}</h2><img alt="{html.escape(caption)}" src="data:image/png;base64,'
                     f'{base64.b64encode(Path(path).read_bytes()).decode()}">' for caption, path in figures.items())
    body = ''.join(f'<h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>{"".join(cards) or "<p>None.</p>"}'
                   for heading, text, cards in sections)
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,'
            f'initial-scale=1"><title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>'
            f'{INTRODUCTION}<h2>Layers</h2><div class="scroll"><table>{layers}</table></div>{images}{body}</html>\n')


# ---- the command

def text_of(c, config, device):
    """(ids, targets), [B,T] each: n_tokens of the validation split in windows spread evenly over it."""
    ids, T = prepare.load_tokens(config['data_dir'], config['dataset'])[0]['val'], config['block_size']
    starts = windows(ids, T, max(1, c.n_tokens // T))
    if not starts:
        fail(f'{config["data_dir"]}/{config["dataset"]} validates on {len(ids)} tokens: expected more than the '
             f'block_size of {T}')
    return batch_at(ids, starts, T, device)


def read_some(c, model, ids_BT, tokenizer):
    """A layer's Boolean units by name (all of its units where it has none), or the card of one unit."""
    F = len(parts_of(model.blocks[0].ffn))
    if not 0 <= c.layer < model.n_layer or not -1 <= c.unit < F:
        fail(f'layer={c.layer}, unit={c.unit}: expected a layer from 0 to {model.n_layer - 1} and a unit from 0 to '
             f'{F - 1}')
    r = read_layer(model, c.layer, trace(model, ids_BT)[c.layer], ids_BT)
    if c.unit >= 0:
        record = describe(r, c.unit, tokenizer)
        print(card(record, contexts(r, c.unit, ids_BT, tokenizer)))
        return dict(name=record['name'])
    units = [unit for unit, kind in enumerate(r.kinds) if kind in KINDS] or range(F)
    for unit in units:
        print(f'{unit:>6}  {describe(r, unit, tokenizer)["name"]}')
    return dict(units=len(units))


def read_all(c, model, config, tokenizer, device):
    """Reads and tests every unit; tables on the screen, the rest in the files that the docstring names."""
    folder = Path(config['ckpt']).parent
    ids_BT, targets_BT = text_of(c, config, device)
    seen = trace(model, ids_BT)
    layers = layer_records(model, seen)
    reads = [read_layer(model, layer, at, ids_BT) for layer, at in enumerate(seen)]
    wordy = tokenizer.name != 'bytes'
    passed, groups = licensing_test(model, tokenizer, device, c.seed) if wordy else ([], [])
    costs = redundancy(model, seen, targets_BT, c.seed)
    units = [describe(r, unit, tokenizer) for r in tqdm(reads, desc='naming', dynamic_ncols=True, leave=False)
             for unit, kind in enumerate(r.kinds) if kind in KINDS]
    detectors = sorted((record for record in passed if record['detector']), key=lambda record: -record['drop'])
    for record in detectors:
        record['name'] = describe(reads[record['layer']], record['unit'], tokenizer)['name']

    def strongest(key, n):
        """The n of each layer that write most, of the units that have the key."""
        ranked = sorted((unit for unit in units if key in unit), key=lambda unit: -unit['write_norm'])
        return [unit for layer in range(model.n_layer) for unit in [u for u in ranked if u['layer'] == layer][:n]]

    header, by_layer = layer_table(layers)
    print(table(header, by_layer))
    quantifiers, pairs = strongest('half_life', 3), strongest('r2', 2)
    for heading, some in (('quantifiers', quantifiers), ('operand units', pairs)):
        print(f'{heading} that write most' + (':' if some else f': none, this model has ffn={config["ffn"]}'))
        print(''.join(f'  layer {unit["layer"]} unit {unit["unit"]:>4}  {unit["name"]}\n' for unit in some))
    lines = [[r['family'], r['layer'], r['unit'], *(f'{r[key]:.4g}' for key in SHOWN),
              f'`{r["name"]}`'.replace('|', '\\|')] for r in detectors]
    print(table(['family', 'layer', 'unit', *SHOWN, 'name'], lines) + LEGEND if lines else
          'no unit is a licensing detector' if wordy else 'no licensing test: tokens are bytes, and it needs words')

    figures = {'Loss when units are removed': folder / 'redundancy.png'}
    draw_redundancy(folder / 'redundancy.png', costs)
    if quantifiers:
        figures['How long quantifiers remember'] = folder / 'half_lives.png'
        draw_half_lives(folder / 'half_lives.png', model)
    write_json(folder / 'interpret.json', dict(ckpt=config['ckpt'], step=config['step'], test=TEST, layers=layers,
                                               passed=passed, groups=groups, redundancy=costs, units=units))
    if c.html:
        def cards(records):
            return [html_card(describe(reads[r['layer']], r['unit'], tokenizer) | r,
                              contexts(reads[r['layer']], r['unit'], ids_BT, tokenizer)) for r in records]
        sections = [('Licensing detectors', 'Units that fire on a licensor, raise the word that it licenses, and '
                     'without which that word loses probability; at most twelve, the costliest first.',
                     cards(detectors[:12])),
                    ('Quantifiers', 'The three of each layer that write most.', cards(quantifiers)),
                    ('And, but not', 'The two of each layer that write most.', cards(pairs))]
        write_file(Path(c.html), page(f'The units of {folder.name}, step {config["step"]}', header, by_layer, figures,
                                      sections))
    print(f'more in {folder}: interpret.json, {", ".join(Path(path).name for path in figures.values())}')
    return model.memory() | dict(detectors=count_detectors(passed))


def main():
    c = SimpleNamespace(**configure(__file__, DEFAULTS))
    run = launch(c.device)
    if run.world > 1:
        fail('interpret.py is one process: run it without torchrun')
    check_numbers(vars(c), positive=('n_tokens',), not_negative=())
    if c.unit >= 0 > c.layer:
        fail(f'unit={c.unit}: of which layer? expected --layer as well')
    if (c.over and c.study) or (c.html and (c.over or c.study or c.layer >= 0)):
        fail('--over, --study, --layer and --html read different things: give one of them')
    with interruptible('the same command goes on from there' if c.study else 'nothing was lost'):
        if c.over or c.study:
            values = over(c, run.device) if c.over else study(c, run.device)
        else:
            model, config, meta = load_model(c.ckpt, run.device, c.data_dir)
            tokenizer = tokenizer_of(meta)
            if c.layer >= 0:
                values = read_some(c, model, text_of(c, config, run.device)[0], tokenizer)
            else:
                values = read_all(c, model, config, tokenizer, run.device)
    result(**values)


if __name__ == '__main__':
    main()
