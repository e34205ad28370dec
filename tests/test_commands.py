"""Every command that the READMEs show ends well: typed in their order, in one folder, on models, data and grids of toy
size. What stands for something of the user's (`FOLDER`, `RUN`, `NC` ..) is there under that name; the hub and GPT-2's
vocabulary have stand-ins; torchrun's commands are one process."""
import fnmatch
import importlib
import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench
import interpret
import parity
import prepare
import train_cls
import train_lm
from conftest import ROOT
from test_llama import hf_folder
from test_llama import small as small_llama
from test_parity import SHORT
from test_readme import COMMANDS, README, SCRIPTS, STUDIES
from test_tokenizers import TOKENS, hf_file
from test_train_lm import ALONE, NEVER, configure, one_thread  # noqa: F401

datasets = pytest.importorskip('datasets')

# without python or torchrun; those that stand in two places once
TYPED = list(dict.fromkeys(' '.join(re.sub(r'^(python|torchrun \S+) ', '', command).split()) for command in COMMANDS))

# stands before a command's own words, which so keep their say ..
SMALL = dict(
    train_lm='--n_layer=1 --n_head=1 --n_embd=8 --block_size=64 --batch_size=2 --micro_batch=2 --max_steps=2 '
             '--eval_every=2 --eval_windows=2 --warmup=1 --lr=0.01 --seeds=1,2 --device=cpu',
    train_cls='--n_layer=2 --n_embd=32 --n_head=2 --n_kv_head=1 --d_ff=48 --d_logic=16 --n_head_logic=2 --n_train=8 '
              '--n_val=6 --batch_size=8 --micro_batch=8 --eval_batch=6 --epochs=1 --warmup=1 --device=cpu',
    prepare='--n_tokens=20000 --num_threads=1', evaluate='--seeds=1,2 --device=cpu', parity='--device=cpu',
    interpret='--seeds=1,2 --n_tokens=256 --device=cpu', bench='--repeats=1 --device=cpu')
# .. and after them where those are what takes long or, in two steps, would keep nothing
# (a study's folders hold runs of one size, so tiny's tables of the paper's tasks take seeds that FOLDER's do not)
LESS = {'--max_steps=3000': '--max_steps=2', '--resume': '--max_steps=4', '--keep=': '--keep=1',
        'parity.py --n ': '--steps=2', 'train_cls': '--seeds=1,2', '--preset=tiny --variants=table': '--seeds=3,4'}
WHOLE = '--help', '--count_params', '--summarize'           # quick as they are

# the files that a command promises, a stem and its ends, by the first of these that stands in it; '' is none
FILES = {
    **dict.fromkeys((*WHOLE, '--generate', 'parity.py --n '), ''),
    '--resume': 'out/lm/*/ config.json log.jsonl last.pt',
    '--compare=all': 'results/compare .json .md .png', '--compare=': 'results/compare_* .json .md .png',
    '--boundary': 'results/boundary .json .md .png', '--sweep': 'results/parity .json .md .png',
    '--fixed': 'results/parity_fixed .json .md', '--dynamics': 'results/parity_dynamics .json .png',
    **{f'--variants={name}': f'results/cls_*_{name} .json .md .png _routing.png' for name in train_cls.TABLES},
    '--variants=': 'results/cls_* .json .md .png _routing.png',
    'evaluate.py --study': 'results/eval_compare_books .json .md', 'evaluate.py --ckpt': '*/ eval.json',
    'interpret.py --study': 'results/detectors .json .md', '--html': 'units .html',
    '--over=RUN': 'RUN/over .json .png', '--over=NCQ,NC': 'NCQ/over .json .png',
    'interpret.py --ckpt': '*/ interpret.json half_lives.png redundancy.png',
    'train_lm.py': 'out/lm/*/ config.json log.jsonl last.pt best.pt',
    'train_cls.py': 'out/cls/*/ config.json log.jsonl last.pt',
    'prepare.py text': 'data/*/ train.bin val.bin meta.json',
    'prepare.py openwebtext': 'data/openwebtext/ train.bin val.bin meta.json',
    **{f'prepare.py {task}': f'data/{task}/ train.jsonl validation.jsonl meta.json' for task in prepare.SOURCES},
    'prepare.py licensing --long_memory': 'data/licensing_long/ train.bin val.bin pairs.jsonl meta.json',
    **{f'bench.py --{name}': f'results/bench_{name} .json' for name in bench.BENCHES}}

TEXTS = [f'Anna is taller than Fred, who has {i} books. The king was not helped by the child.' for i in range(40)]
PICK = prepare.picker(1, 'hub')
THEORIES = [(label, *prepare.draw_example(PICK, label, 1)[1:]) for label in [0, 1, 2] * 4]
HUB = {
    'Skylion007/openwebtext': [dict(text=text) for text in TEXTS],
    'tasksource/proofwriter': [dict(theory=theory, question=question, answer=prepare.LABELS['proofwriter'][label])
                               for label, theory, question in THEORIES],
    'nyu-mll/glue': [dict(premise=theory, hypothesis=question, label=prepare.LABELS['mnli'][label])
                     for label, theory, question in THEORIES],
    'EleutherAI/lambada_openai': [dict(text=text) for text in TEXTS[:3]],
    'nyu-mll/blimp': [dict(UID=name, linguistics_term='binding', sentence_good=f'{name} cat sleeps.',
                           sentence_bad=f'{name} cat sleep.') for name in ('one', 'that')]}
BYTES = prepare.get_tokenizer('bytes')
GPT2 = SimpleNamespace(encode_ordinary=BYTES.encode, decode=BYTES.decode, n_vocab=BYTES.vocab_size, eot_token=BYTES.eot)


def smaller(make, **sizes):
    """make with these sizes where it is called without any, as by a training."""
    return lambda *args, **keys: make(*args, **keys, **({} if len(args) > 2 else sizes))


def stand_in(patch):
    """The sizes that no word sets, and what may be out of reach."""
    short = {row: keys | dict(max_steps=2, eval_every=2) for row, keys in train_lm.BOUNDARY.items()}
    for module, name, value in (
            (train_lm, 'BOUNDARY', short),
            (interpret, 'TEST', interpret.TEST | dict(places=4, random_units=4)),
            (parity, 'SWEEP', parity.SWEEP | dict(depths=(1,), widths=(8,), largest=2, lrs=(0.01,), init_scales=(1,))),
            (parity, 'SWEEP_SETTINGS', parity.SWEEP_SETTINGS | dict(steps=2, n_seeds=2)),
            (parity, 'FIXED', parity.FIXED | dict(widths=(8,), ns=(2, 3))),
            (parity, 'DYNAMICS', SHORT),
            (prepare, 'make_licensing', smaller(prepare.make_licensing, n_tokens=20_000)),
            (prepare, 'load_pairs', lambda *where, load=prepare.load_pairs: load(*where)[::40]),
            (prepare, 'make_rulebase', smaller(prepare.make_rulebase, n_train=60, n_val=24)),
            (bench, 'SMALL', bench.TINY | dict(block_size=256)),
            (bench, 'BACKBONES', dict(toy=dict(d=32, d_ff=48, n_head=2, n_kv_head=1))),
            (bench, 'BENCHES', bench.BENCHES | dict(scan=partial(bench.bench_scan, B=1, T=16, C=4),
                                                    parity=partial(bench.bench_parity, steps=2, n_seeds=2)))):
        patch.setattr(module, name, value)
    patch.setattr(datasets, 'load_dataset', lambda name, *_, **__: datasets.Dataset.from_list(HUB[name]))
    patch.setattr(datasets, 'get_dataset_config_names', lambda name: ['all'])
    patch.setattr('tiktoken.get_encoding', lambda name: GPT2)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):
        patch.delenv(name, raising=False)


@pytest.fixture(scope='module')
def typed(tmp_path_factory):
    """The commands so far, in a folder with all that they name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('typed'))
        stand_in(patch)
        for name in ('tests', 'FOLDER'):                        # FOLDER holds a Llama and texts, as asked for
            Path(name).mkdir()
        hf_folder(hf_file(Path('FOLDER')), small_llama(vocab_size=len(TOKENS) + 3))
        for name in ('FOLDER/book.txt', 'FILE_OR_FOLDER'):
            Path(name).write_text('\n\n\n'.join(TEXTS))
        shutil.copy(ROOT / 'tests' / 'paper_b_runs.json', 'tests')
        prepare.make_text('data', 'some', 'FILE_OR_FOLDER')
        for name, words in dict(NC='--ffn=nc', GELU='', NCQ='--ffn=nc --quant=on', RUN='--ffn=nc --quant=on').items():
            words = f'{SMALL["train_lm"]} --dataset=some --keep=1 --out_dir={name} {words}'
            train_lm.train(configure(*words.split()), ALONE, NEVER)
        yield []


def files():
    return {(path.as_posix(), path.stat().st_mtime_ns) for path in Path().rglob('*') if path.is_file()}


@pytest.mark.parametrize('command', TYPED, ids=str)
def test_the_command_ends_well(command, typed, run_main):
    for each in TYPED[len(typed):TYPED.index(command) + 1]:     # run by itself, it still comes after those before it
        typed.append(each)
        before, (file, *words) = files(), shlex.split(each)
        script = importlib.import_module(Path(file).stem)
        if not any(word in each for word in WHOLE):
            words = [*SMALL[script.__name__].split(), *words, *(LESS[key] for key in LESS if key in each)]
        status, out, err = run_main(script, *words)
    assert status == 0, err
    assert '--key=value' in out if '--help' in command else json.loads(out.splitlines()[-1]).keys()
    written = [name for name, _ in files() - before]
    stem, *ends = next(promised for part, promised in FILES.items() if part in command).split() or ['']
    for end in ends:
        assert fnmatch.filter(written, stem + end), f'{stem + end} is not among {written}'
    assert ends or not written


def test_no_command_is_left_out():
    shown = re.findall(rf'(?:{"|".join(SCRIPTS)})\.py (?:--|[a-z])[^#`|&\n]*', README + STUDIES)
    assert len(shown) >= len(TYPED) > 40
    for text in shown:
        assert any(command.startswith(' '.join(text.split())) for command in TYPED), f'{text!r} is not typed'
    for file, word in re.findall(r'python -m pytest (\S+) -k (\w+)', README):
        assert re.search(rf'def test_\w*{word}', (ROOT / file).read_text())
