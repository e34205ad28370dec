"""Makes the token files that train_lm.py reads, each dataset in a folder of its own.

    python prepare.py licensing                                # generated, offline, a second
    python prepare.py text --input=books/ --name=books         # any plain text; --tokenizer=bytes needs no vocabulary
    python prepare.py openwebtext                              # the hub: 40 GB of text, 9 billion tokens
    python prepare.py openwebtext --input=owt/                 # the same from local .parquet, .jsonl or .txt files

What lands in data/NAME/ (NAME is the task unless --name says otherwise):

    train.bin, val.bin   token ids, uint16 where the vocabulary fits and uint32 where not
    pairs.jsonl          licensing: minimal pairs {family, good, bad} of word combinations that the .bin files lack
    meta.json            name, tokenizer, vocab_size, dtype, counts {train, val}, source, and what the task adds

Files are written aside and moved in once all are whole, meta.json last: a run that fails leaves what was there.
The same command writes the same bytes. The last line of stdout is meta.json without the words.
"""
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

import runtime

DEFAULTS = dict(
    task='',                                # licensing | text | openwebtext; may stand alone as the first word
    name='',                                # folder under data_dir; '' takes the task's name
    data_dir='data',                        # where datasets live
    seed=1,                                 # licensing: draws the sentences; openwebtext: picks validation documents
    # text, openwebtext
    input='',                               # file or folder: .txt for text; .parquet, .jsonl or .txt for openwebtext
    val='',                                 # text: file or folder to validate on; '' splits off the end of input
    val_frac=0.0,                           # share of documents for validation; 0 is 0.05 (text), 0.0005 (openwebtext)
    tokenizer='gpt2',                       # gpt2 | bytes
    num_threads=0,                          # threads that tokenise; 0 takes every core
    # openwebtext: its main branch went from a script, which datasets 4 no longer runs, to parquet files
    # (huggingface.co/datasets/Skylion007/openwebtext/discussions/18)
    repository='Skylion007/openwebtext',    # dataset on the hub with a column `text`
    revision='main',                        # branch, tag or commit of it
    # licensing
    n_tokens=1_000_000,                     # training tokens; validation has a twentieth as many
    shuffled=False,                         # permute the tokens: a control with nothing to learn but frequencies
    long_memory=False,                      # add a family that spans tens of tokens
)
TASKS = ['licensing', 'text', 'openwebtext']


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

def get_tokenizer(name, words=None):
    """name: 'gpt2', 'bytes', 'words' (then `words` is the list), or a dataset's meta.

    Returns an object with encode(text) -> list of ids, decode(ids) -> text, vocab_size, and eot, the id that stands
    between documents. Special-token strings inside a text are plain text. Raises ValueError.
    """
    if isinstance(name, dict):
        name, words = name['tokenizer'], name.get('words')
    if name == 'gpt2':
        try:
            import tiktoken
            gpt2 = tiktoken.get_encoding('gpt2')
        except Exception as error:      # no tiktoken, no network, a broken download: either way there is no vocabulary
            raise ValueError(f"no GPT-2 vocabulary here ({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a folder "
                             'that holds its files, or give --tokenizer=bytes, which needs none') from None
        return SimpleNamespace(name=name, encode=gpt2.encode_ordinary, decode=gpt2.decode,
                               vocab_size=gpt2.n_vocab, eot=gpt2.eot_token)
    if name == 'bytes':
        return SimpleNamespace(name=name, encode=lambda text: list(text.encode()),
                               decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors='replace'),
                               vocab_size=257, eot=256)
    if name == 'words':
        index = {word: i for i, word in enumerate(words)}
        unknown = index['<unk>']
        return SimpleNamespace(name=name, encode=lambda text: [index.get(word, unknown) for word in text.split()],
                               decode=lambda ids: ' '.join(words[i] for i in ids),
                               vocab_size=len(words), eot=index['.'])    # sentences are the documents
    raise ValueError(f'unknown tokenizer {name!r}: expected gpt2, bytes or words')


# ---------------------------------------------------------------------------------------------------------------------
# Token files

def token_dtype(vocab_size):
    """Name of the smallest unsigned type that holds every id below vocab_size."""
    if vocab_size > 2**32:
        raise ValueError(f'a vocabulary of {vocab_size} is beyond uint32, the widest token file')
    return 'uint16' if vocab_size <= 2**16 else 'uint32'


def pack_tokens(ids, vocab_size):
    """A list of ids as the array that token files hold. Raises ValueError where an id is outside the vocabulary."""
    ids = np.asarray(ids, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f'token ids run from {ids.min()} to {ids.max()}, the vocabulary from 0 to {vocab_size - 1}')
    return ids.astype(token_dtype(vocab_size))


@contextlib.contextmanager
def staged(data_dir, name):
    """Yields an empty folder to write in; its files move to data_dir/name if the block ends well, meta.json last."""
    folder, staging = pathlib.Path(data_dir, name), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent))
        yield staging
        for old in ('meta.json', 'pairs.jsonl'):            # until its meta.json is back the folder counts as unmade
            (folder / old).unlink(missing_ok=True)
        for path in sorted(staging.iterdir(), key=lambda path: path.name == 'meta.json'):
            os.replace(path, folder / path.name)
    except OSError as error:
        raise OSError(f'cannot write {folder} ({error.strerror or error}); what was there is as it was') from None
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()                                  # an empty folder, if this was the first try and it failed


def write_meta(staging, name, tokenizer, counts, source, **more):
    """Writes and returns meta.json, all that the other scripts know of a dataset."""
    meta = dict(name=name, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size,
                dtype=token_dtype(tokenizer.vocab_size), counts=counts, source=source, **more)
    (staging / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n')
    return meta


def load_tokens(data_dir, name):
    """Returns ({'train': ids, 'val': ids}, meta), ids read-only memory maps. Raises FileNotFoundError or ValueError."""
    folder = pathlib.Path(data_dir, name)
    if not (folder / 'meta.json').is_file():
        command = name if name in TASKS else f'text --input=FILE_OR_FOLDER --name={name}'
        if name.startswith('licensing_'):
            command = name.replace('_shuffled', ' --shuffled').replace('_long', ' --long_memory')
        where = '' if str(data_dir) == DEFAULTS['data_dir'] else f' --data_dir={data_dir}'
        raise FileNotFoundError(f'no dataset in {folder}: make it with `python prepare.py {command}{where}` '
                                '(--preset=tiny needs none)')
    try:
        meta = json.loads((folder / 'meta.json').read_text())
        if meta['dtype'] != token_dtype(meta['vocab_size']):
            raise ValueError(f"a vocabulary of {meta['vocab_size']} in token files of {meta['dtype']}")
        tokens = {}
        for split in ('train', 'val'):
            tokens[split] = np.memmap(folder / f'{split}.bin', dtype=meta['dtype'], mode='r')
            if len(tokens[split]) != meta['counts'][split]:
                raise ValueError(f"{split}.bin holds {len(tokens[split])} tokens, not {meta['counts'][split]}")
        return tokens, meta
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f'{folder} is damaged, make it again with prepare.py ({error})') from None


def load_pairs(data_dir, name):
    """Returns a dataset's minimal pairs, a list of {family, good, bad}; [] if it has none."""
    path = pathlib.Path(data_dir, name, 'pairs.jsonl')
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


# ---------------------------------------------------------------------------------------------------------------------
# Licensing: sentences in which one word may only come after another

NAMES = 'fred anna bob mary john lucy sam kate paul emma'.split()
NOUNS = 'dog cat king queen baker farmer teacher doctor pilot child'.split()
SUBJECTS = NAMES + NOUNS
ADJECTIVES = 'tall old strong fast kind rich smart young small proud'.split()               # each also with -er
VERBS = 'helped watched followed called visited pushed answered praised trusted guarded'.split()      # object optional
DEEDS = 'slept sang danced waited smiled laughed rested stayed worked ran'.split()                    # no object
FILLERS = [[''], 'today here again now'.split(), ['in town', 'at home', 'here today', 'here again', 'again today'],
           ['in the garden', 'on the hill', 'at the market', 'in town today', 'at home again']]    # by length in words
WORDS = ['<unk>', '.'] + SUBJECTS + ADJECTIVES + [word + 'er' for word in ADJECTIVES] + VERBS + DEEDS + (
    'today here again now in at on town home garden hill market the is was has that than like by with '
    'neither nor either or both and no some not really ever once any agrees objects so most few agree '
    'somebody nobody cheated game void fair').split()


def partner(pick, who, words, held):
    """A word from `words` to go with the subject `who`. A fifth of all combinations (five diagonals of the table) is
    kept for the minimal pairs (`held`), the rest is for training. Each word has as many partners as any other."""
    row = SUBJECTS.index(who)
    return pick([word for column, word in enumerate(words)
                 if ((row + 2 * column) % 5 == 0) == held and word != who])


def noun_phrase(who):
    return who if who in NAMES else f'the {who}'


def other(pick, *known):
    """Somebody else."""
    return noun_phrase(pick([subject for subject in SUBJECTS if subject not in known]))


def filler(pick, longest=3):
    """Zero to `longest` words, every length as likely: what stands between licensor and licensed word."""
    return pick(FILLERS[pick(range(longest + 1))])


def either_way(pick, one, another):
    """Right and wrong: both directions of an exchange are as likely, so that words alone tell nothing."""
    return pick([(one, another), (another, one)])


# A family returns a sentence, and the same with one word exchanged (*) so that the grammar never makes it.

def comparative(pick, held):
    """fred is taller in town than anna .                  * fred is tall in town than anna .
    fred is tall in town like anna .                       * fred is taller in town like anna ."""
    who = pick(SUBJECTS)
    adjective = partner(pick, who, ADJECTIVES, held)
    (right, link), (wrong, _) = either_way(pick, (adjective + 'er', 'than'), (adjective, 'like'))
    frame = f"{noun_phrase(who)} {pick(['is', 'was'])} %s {filler(pick)} {link} {other(pick, who)} ."
    return frame % right, frame % wrong


def passive(pick, held):
    """the cat was helped in the garden by the dog .       * the cat has helped in the garden by the dog .
    the cat has helped in the garden with the dog .        * the cat was helped in the garden with the dog ."""
    who = pick(SUBJECTS)
    (right, link), (wrong, _) = either_way(pick, ('was', 'by'), ('has', 'with'))
    frame = f'{noun_phrase(who)} %s {partner(pick, who, VERBS, held)} {filler(pick)} {link} {other(pick, who)} .'
    return frame % right, frame % wrong


def neither(pick, held):
    """fred neither sang here today nor slept .            * fred both sang here today nor slept .
    fred either sang here today or slept .                 * fred neither sang here today or slept ."""
    who = pick(SUBJECTS)
    deed = partner(pick, who, DEEDS, held)
    (right, link), (wrong, _) = either_way(pick, ('neither', 'nor'), pick([('either', 'or'), ('both', 'and')]))
    another = pick([word for word in DEEDS if word != deed])
    frame = f'{noun_phrase(who)} %s {deed} {filler(pick, longest=2)} {link} {another} .'
    return frame % right, frame % wrong


def negation(pick, held):
    """fred has not today ever helped the cat .            * fred has really today ever helped the cat .
    fred has really in town helped some cat .              * fred has not in town helped some cat .
    no dog on the hill ever sang .                         * some dog on the hill ever sang ."""
    kind = pick(['has ever', 'has any', 'no'])
    if kind == 'no':
        noun = pick(NOUNS)
        (right, ever), (wrong, _) = either_way(pick, ('no', 'ever'), ('some', 'once'))
        frame = f'%s {noun} {filler(pick, longest=2)} {ever} {partner(pick, noun, DEEDS, held)} .'
        return frame % right, frame % wrong
    who = pick(SUBJECTS)
    verb = partner(pick, who, VERBS, held)
    (right, ever, any_), (wrong, *_) = either_way(pick, ('not', 'ever', 'any'), ('really', 'once', 'some'))
    rest = (f'{filler(pick)} {ever} {verb} {other(pick, who)}' if kind == 'has ever' else
            f'{filler(pick, longest=2)} {verb} {any_} {pick(NOUNS)}')
    frame = f'{noun_phrase(who)} has %s {rest} .'
    return frame % right, frame % wrong


def votes(pick, held):
    """anna agrees . fred objects . bob agrees . so most agree .           * ... so few agree .
    Three to seven voters, each undecided beforehand, never a tie."""
    n_voters = pick([3, 4, 5, 6, 7])
    agree = [pick([True, False]) for _ in range(n_voters)]
    if 2 * sum(agree) == n_voters:
        return votes(pick, held)
    voters = [pick(NAMES)]
    voters.append(partner(pick, voters[0], NAMES, held))
    while len(voters) < n_voters:
        voters.append(pick([name for name in NAMES if name not in voters]))
    frame = ' '.join(f"{name} {'agrees' if vote else 'objects'} ." for name, vote in zip(voters, agree))
    right, wrong = ('most', 'few') if 2 * sum(agree) > n_voters else ('few', 'most')
    return f'{frame} so {right} agree .', f'{frame} so {wrong} agree .'


def memory(pick, held):
    """somebody cheated . (four to eight other sentences) so the game was void .       * ... so the game was fair .
    nobody cheated . (four to eight other sentences) so the game was fair .            * ... so the game was void ."""
    (start, right), (_, wrong) = either_way(pick, ('somebody', 'void'), ('nobody', 'fair'))
    between = [pick([comparative, passive, neither, negation, distractor]) for _ in range(pick([4, 5, 6, 7, 8]))]
    frame = f"{start} cheated . {' '.join(family(pick, held)[0] for family in between)} so the game was %s ."
    return frame % right, frame % wrong


def distractor(pick, held):
    """What stands before a licensed word, with nothing licensed after it, and plain uses of the other words:
    fred is tall today .     fred is taller today .     the dog was helped in town .     anna has helped again .
    the king that helped the dog is tall at home .      anna has not helped the dog .    the child slept here .
    anna helped the dog in the garden .                 anna helped the dog and fred again ."""
    who = pick(SUBJECTS)
    adjective, verb, deed = (partner(pick, who, words, held) for words in (ADJECTIVES, VERBS, DEEDS))
    whom = pick([word for word in SUBJECTS if word != who])
    someone, is_tall = noun_phrase(whom), f"{pick(['is', 'was'])} {adjective}{pick(['', 'er'])}"
    phrase = pick([is_tall,
                   f"{pick(['was', 'has'])} {verb}",
                   f'that {verb} {someone} {is_tall}' if who in NOUNS else is_tall,
                   f"has {pick(['not', 'really'])} {verb} {someone}",
                   deed,
                   f'{verb} {someone}',
                   f"{verb} {someone} {pick(['and', 'or'])} {other(pick, who, whom)}"])
    return f'{noun_phrase(who)} {phrase} {filler(pick)} .', None


FAMILIES = [comparative, passive, neither, negation, votes]


def make_licensing(data_dir, name='licensing', seed=1, n_tokens=1_000_000, shuffled=False, long_memory=False):
    """Writes sentences, five or six in seven or eight from the families and two from distractor(), drawn independently
    for training and validation, and 200 minimal pairs a family. Returns meta."""
    if n_tokens < 1000:
        raise ValueError(f'n_tokens={n_tokens}: expected at least 1000')
    tokenizer, counts = get_tokenizer('words', WORDS), {}
    families = FAMILIES + [memory] * long_memory

    def picker(purpose):
        draw = random.Random(f'{seed} {purpose}').random    # the one method that Python promises never to change
        return lambda options: options[int(draw() * len(options))]

    with staged(data_dir, name) as staging:
        for split, n in dict(train=n_tokens, val=n_tokens // 20).items():
            pick, ids = picker(split), []
            while len(ids) < n:
                ids += tokenizer.encode(pick(families + 2 * [distractor])(pick, held=False)[0])
            ids = pack_tokens(ids[:n], tokenizer.vocab_size)
            if shuffled:
                np.random.RandomState(seed).shuffle(ids)    # the legacy generator's stream is frozen
            (staging / f'{split}.bin').write_bytes(ids.tobytes())
            counts[split] = n
        with open(staging / 'pairs.jsonl', 'w') as file:
            for family in families:
                pick, pairs = picker(family.__name__), {}
                while len(pairs) < 200:
                    good, bad = (' '.join(sentence.split()) for sentence in family(pick, held=True))
                    pairs[good] = dict(family=family.__name__, good=good, bad=bad)
                file.writelines(json.dumps(pair) + '\n' for pair in pairs.values())
        return write_meta(staging, name, tokenizer, counts, 'generated', words=WORDS, seed=seed, shuffled=shuffled,
                          long_memory=long_memory)


# ---------------------------------------------------------------------------------------------------------------------
# Text

def read_documents(path):
    """The documents of a .txt file, or of all in a folder by name, where two blank lines part them. ValueError."""
    path, documents = pathlib.Path(path), []
    if not path.exists():
        raise ValueError(f'{path} does not exist: expected a text file or a folder of .txt files')
    for file in sorted(path.glob('*.txt')) if path.is_dir() else [path]:
        try:
            text = file.read_text(encoding='utf-8-sig')
        except (UnicodeDecodeError, OSError) as error:
            raise ValueError(f'cannot read {file} as UTF-8 text ({error})') from None
        documents += [part.strip('\n') for part in text.split('\n\n\n') if part.strip()]
    if not documents:
        raise ValueError(f'{path} holds no text: expected a text file or a folder of .txt files')
    return documents


def write_documents(staging, documents, n_documents, tokenizer, num_threads):
    """Streams (split, text) pairs into train.bin and val.bin, an end-of-text id after each text. Returns the counts.
    Threads suffice: tiktoken releases the interpreter's lock. No more than a batch of texts is in memory."""
    counts, documents = dict(train=0, val=0), iter(documents)
    with (ThreadPoolExecutor(num_threads or os.cpu_count()) as pool, open(staging / 'train.bin', 'wb') as train,
          open(staging / 'val.bin', 'wb') as val, tqdm(total=n_documents, unit='doc', desc='tokenising') as bar):
        while batch := list(itertools.islice(documents, 128)):
            pack = lambda text: pack_tokens(tokenizer.encode(text) + [tokenizer.eot], tokenizer.vocab_size)
            for (split, _), ids in zip(batch, pool.map(pack, [text for _, text in batch])):
                (train if split == 'train' else val).write(ids)
                counts[split] += len(ids)
                bar.update()
    return counts


def make_text(data_dir, name, source, val='', val_frac=0.0, tokenizer='gpt2', num_threads=0):
    """Writes a dataset from plain text. Without `val` the last val_frac of the documents validate, or where that is
    less than half a document, as much text from the end of the last. Returns meta."""
    if not source:
        raise ValueError('text needs --input=FILE_OR_FOLDER')
    train, tokenizer, val_frac = read_documents(source), get_tokenizer(tokenizer), val_frac or 0.05
    if val:
        held_out = read_documents(val)
    elif n := round(val_frac * len(train)):
        train, held_out = train[:-n], train[-n:]
    else:
        cut = -min(int(val_frac * sum(map(len, train))), len(train[-1]) // 2) or None
        train, held_out = train[:-1] + [train[-1][:cut]], [train[-1][cut:] if cut else '']
    if not train or not ''.join(held_out).strip():
        raise ValueError(f'val_frac={val_frac} of {source} leaves a part without text: give --val=FILE, or more text')
    documents = [('train', text) for text in train] + [('val', text) for text in held_out]
    with staged(data_dir, name) as staging:
        counts = write_documents(staging, documents, len(documents), tokenizer, num_threads)
        return write_meta(staging, name, tokenizer, counts, str(source), val_source=str(val),
                          documents=dict(train=len(train), val=len(held_out)))


def read_rows(source, repository, revision):
    """The datasets.Dataset of `source` (a file or a folder of one kind of file) or of the hub. Raises ValueError."""
    kinds = {'.parquet': 'parquet', '.jsonl': 'json', '.txt': 'text'}
    path = pathlib.Path(source)
    files = [str(file) for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.suffix in kinds]
    found = {pathlib.Path(file).suffix for file in files}
    if source and (len(found) != 1 or not path.exists()):
        raise ValueError(f'--input={source}: expected a file or a folder with one kind of {", ".join(kinds)}')
    try:
        import datasets
        import huggingface_hub
        huggingface_hub.utils.logging.set_verbosity_error()     # the one line below says what its retries would
        if source:
            kind = kinds[found.pop()]
            one_each = dict(sample_by='document') if kind == 'text' else {}
            rows = datasets.load_dataset(kind, data_files=files, split='train', **one_each)
        else:
            rows = datasets.load_dataset(repository, revision=revision, split='train')
        return rows.select_columns('text').cast_column('text', datasets.Value('string'))
    except Exception as error:      # the hub's library raises what it likes: no network, no such repository, no column
        wanted = f'--input={source}: expected whole files with a column `text`' if source else (
            f'{repository} at {revision}: give --repository (another copy with a column `text`), --revision, or '
            '--input=FOLDER of .parquet, .jsonl or .txt files')
        raise ValueError(f'cannot read {wanted} ({type(error).__name__}: {str(error)[:200]})') from None


def make_openwebtext(data_dir, name, source='', repository=DEFAULTS['repository'], revision=DEFAULTS['revision'],
                     val_frac=0.0, tokenizer='gpt2', seed=1, num_threads=0):
    """Writes a dataset from the column `text` of a repository on the hub, or of local files (a .txt file is one
    document); the seed picks the documents that validate, the rest stay in order. Returns meta."""
    tokenizer, rows = get_tokenizer(tokenizer), read_rows(source, repository, revision)
    n_val = max(1, round((val_frac or 0.0005) * len(rows)))
    if n_val >= len(rows):
        raise ValueError(f'{source or repository} holds {len(rows)} documents: too few to split')
    held_out = set(np.random.RandomState(seed).permutation(len(rows))[:n_val].tolist())
    texts = (text or '' for batch in rows.iter(1024) for text in batch['text'])
    documents = (('val' if i in held_out else 'train', text) for i, text in enumerate(texts))
    with staged(data_dir, name) as staging:
        counts = write_documents(staging, documents, len(rows), tokenizer, num_threads)
        return write_meta(staging, name, tokenizer, counts, str(source) or f'{repository} at {revision}', seed=seed,
                          documents=dict(train=len(rows) - n_val, val=n_val))


def main(argv=None):
    c = SimpleNamespace(**runtime.configure(__file__, DEFAULTS, choices=dict(tokenizer=['gpt2', 'bytes']), argv=argv,
                                            positional='task'))
    if c.task not in TASKS:
        runtime.fail(f"prepare what? expected {', '.join(TASKS)}, got {c.task!r}")
    if not 0 <= c.val_frac < 1:
        runtime.fail(f'val_frac={c.val_frac}: expected a share from 0 to 1')
    if c.seed < 0 or c.num_threads < 0:
        runtime.fail(f'seed={c.seed}, num_threads={c.num_threads}: expected no negative number')
    try:
        if c.task == 'licensing':
            name = c.name or 'licensing' + '_shuffled' * c.shuffled + '_long' * c.long_memory
            meta = make_licensing(c.data_dir, name, c.seed, c.n_tokens, c.shuffled, c.long_memory)
        elif c.task == 'text':
            meta = make_text(c.data_dir, c.name or c.task, c.input, c.val, c.val_frac, c.tokenizer, c.num_threads)
        else:
            meta = make_openwebtext(c.data_dir, c.name or c.task, c.input, c.repository, c.revision, c.val_frac,
                                    c.tokenizer, c.seed, c.num_threads)
    except (ValueError, OSError) as error:
        runtime.fail(error)
    except KeyboardInterrupt:
        runtime.fail('interrupted: nothing was changed', status=130)
    runtime.result(**{key: value for key, value in meta.items() if key != 'words'})


if __name__ == '__main__':
    main()
