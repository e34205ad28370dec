"""Makes the datasets of train_lm.py and train_cls.py, each in a folder of its own.

    python prepare.py licensing                                # generated, offline, a second
    python prepare.py text --input=books/ --name=books         # any plain text; --tokenizer=bytes needs no vocabulary
    python prepare.py openwebtext                              # from the hub: 40 GB of text, 9 billion tokens
    python prepare.py openwebtext --input=owt/                 # the same from local .parquet, .jsonl or .txt files
    python prepare.py rulebase                                 # generated, offline: theories, questions, three labels
    python prepare.py proofwriter                              # from the hub, as is mnli
    python prepare.py proofwriter --input=FOLDER               # local .jsonl, .json or .parquet, one of a split
    python prepare.py mnli --input=FILE                        # one file: the seed parts its premises

What lands in data/NAME/ (NAME is the task unless --name says otherwise):

    train.bin, val.bin   token ids, uint16 where the vocabulary fits and uint32 where not
    pairs.jsonl          licensing: minimal pairs {family, good, bad} of word combinations that the .bin files lack
    meta.json            name, tokenizer, vocab_size, dtype, counts {train, val}, source, and what the task adds

and from rulebase, proofwriter and mnli

    train.jsonl, validation.jsonl       {id, context, question, label, depth}: the theory or premise; 0 False or
                         contradiction, 1 True or entailment, 2 Unknown or neutral; how many rules stand above each
                         other in the shortest proof, null where that is not known
    meta.json            also task, template (of the text), labels, contexts_in_both (splits), and for each split
                         label_counts and majority, the rate of the commonest label; the vocabulary is training's

Files are written aside and moved in once all are whole, meta.json last: a run that fails leaves what was there.
The same command writes the same bytes. The last line of stdout is meta.json without the words.
"""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

import runtime

DEFAULTS = dict(
    task='',                                # one of those above; may stand alone as the first word
    name='',                                # folder under data_dir; '' takes the task's name
    data_dir='data',                        # where datasets live
    seed=1,                                 # draws what is generated; picks what validates (openwebtext, one file)
    # text, openwebtext, proofwriter, mnli
    input='',                               # file or folder of .txt, .parquet, .jsonl or .json, as in the lines above
    val='',                                 # text: file or folder to validate on; '' splits off the end of input
    val_frac=0.0,                           # share that validates; 0 is 0.05 (text), 0.0005 (openwebtext), 0.1 (others)
    tokenizer='gpt2',                       # gpt2 | bytes
    num_threads=0,                          # threads that tokenise; 0 takes every core
    # openwebtext
    repository='Skylion007/openwebtext',    # dataset on the hub with a column `text`
    revision='main',                        # branch, tag or commit of it
    # licensing
    n_tokens=1_000_000,                     # training tokens; validation has a twentieth as many
    shuffled=False,                         # permute the tokens: a control with nothing to learn but frequencies
    long_memory=False,                      # add a family that spans tens of tokens
    # rulebase
    n_train=20_000,                         # training examples
    n_val=2_000,                            # validation examples
    max_depth=3,                            # longest of the shortest proofs, in rules: 0 to 5
    balance='1,1,1',                        # parts of False, True, Unknown
)
TASKS = ['licensing', 'text', 'openwebtext', 'rulebase', 'proofwriter', 'mnli']


# ---- tokenizers

def split_words(text):
    """Lower-case words, and each mark of punctuation as a word."""
    return re.findall(r'\w+|[^\w\s]', text.lower())


def get_tokenizer(name, words=None):
    """name: 'gpt2', 'bytes', 'words' (then `words` is the list), or a dataset's meta.

    Returns an object with encode(text) -> list of ids, decode(ids) -> text, vocab_size, and eot, the id that stands
    between documents; for words also begin and pad, None where the list has neither. Special-token strings inside a
    text are plain text. Raises ValueError.
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
        return SimpleNamespace(name=name, encode=lambda text: [index.get(word, unknown) for word in split_words(text)],
                               decode=lambda ids: ' '.join(words[i] for i in ids),
                               vocab_size=len(words), eot=index.get('.', unknown),      # sentences are the documents
                               begin=index.get('<begin>'), pad=index.get('<pad>'))
    raise ValueError(f'unknown tokenizer {name!r}: expected gpt2, bytes or words')


# How text is cut before it is merged, each piece by itself: GPT-2's way, Llama 3's, and GPT-2's around single digits
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r'\s*[\r\n]+|\s+(?!\S)|\s+')
DIGITS_SPLIT = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

# tokenizer.json writes a byte as a character: itself where that is visible, else the next one from U+0100 on (GPT-2)
VISIBLE = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
BYTES = {chr(byte): byte for byte in VISIBLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(0x100) if byte not in VISIBLE)}


def llama_tokenizer(folder):
    """The tokenizer in a Llama's folder: HF's tokenizer.json if it is byte-level BPE, or Meta's tokenizer.model.

    Returns what get_tokenizer does, with begin (the id that a text starts with) and pad (the end of text where there is
    none of its own). encode gives the text alone, without begin; special-token strings inside it are plain text; a byte
    that the vocabulary lacks is a ValueError. Raises ValueError or FileNotFoundError, one line each.
    """
    folder = pathlib.Path(folder)
    file = folder / 'tokenizer.json'
    if not file.is_file():
        file = folder / 'tokenizer.model'
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer in {folder}: expected HF's tokenizer.json or Meta's tokenizer.model")
    import tiktoken
    try:
        ranked, special, pattern = (read_tokenizer_json if file.suffix == '.json' else read_tokenizer_model)(file)
        bpe = tiktoken.Encoding(file.name, pat_str=pattern, special_tokens={},
                                mergeable_ranks={piece: rank for rank, piece in enumerate(ranked)})
        begin, eot, pad = special_ids(folder / 'tokenizer_config.json', special)
        if strange := [i for i in (*ranked.values(), *special.values()) if type(i) is not int or i < 0]:
            raise ValueError(f'an id is {strange[0]!r}, expected whole numbers from 0 on: download it again')
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{file} is damaged ({type(error).__name__}: {error}): download it again') from None
    except (ValueError, OSError) as error:
        raise ValueError(f'{file}: {error}') from None
    ids = list(ranked.values())
    pieces = {i: piece for piece, i in ranked.items()} | {i: name.encode() for name, i in special.items()}
    lacking = set(range(256)) - {piece[0] for piece in ranked if len(piece) == 1}

    def encode(text):
        if lacking and (bad := lacking & set(text.encode(errors='replace'))):       # tiktoken would panic
            raise ValueError(f'{file} has no token for the byte {min(bad):#04x}, as in {text[:40]!r}')
        return [ids[rank] for rank in bpe.encode_ordinary(text)]

    def decode(tokens):
        return b''.join(pieces[i] for i in tokens).decode(errors='replace')

    return SimpleNamespace(name=str(folder), encode=encode, decode=decode, vocab_size=max(pieces) + 1, eot=eot,
                           begin=begin, pad=pad)


def read_tokenizer_model(file):
    """Meta's file, base64 and rank a line, as (bytes -> id in the order of merging, name -> special id, pattern)."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines()]
        ranked = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in pairs}
    except ValueError:
        raise ValueError("not in tiktoken's format, a base64 token and its rank a line; SentencePiece files (Llama 2) "
                         'are not supported') from None
    n = len(ranked)
    if not n or list(ranked.values()) != list(range(n)):
        raise ValueError('it is damaged (its ranks do not count from 0): download it again')
    # Llama 3.1's names for those that matter here; the file has none
    names = {0: '<|begin_of_text|>', 1: '<|end_of_text|>', 4: '<|finetune_right_pad_id|>'}
    return ranked, {names.get(i, f'<|reserved_{i}|>'): n + i for i in range(256)}, LLAMA3_SPLIT


def read_json(file):
    try:
        return json.loads(file.read_text(encoding='utf-8'))
    except ValueError:
        raise ValueError(f'{file.name} is no JSON: download it again') from None


def read_tokenizer_json(file):
    """HF's file as (bytes -> id in the order of merging, name -> added id, pattern)."""
    content = read_json(file)
    model, splitter = content['model'], content['pre_tokenizer'] or {}
    steps = splitter['pretokenizers'] if splitter.get('type') == 'Sequence' else [splitter]
    kinds = [step.get('type') for step in steps]
    if model.get('type', 'BPE') != 'BPE' or kinds[-1:] != ['ByteLevel']:
        raise ValueError('not byte-level BPE, as those of Llama 3 and SmolLM2 are; SentencePiece vocabularies '
                         '(Llama 2) are not supported')
    first, regex = steps[0], steps[-1].get('use_regex', True)
    if kinds == ['ByteLevel'] and regex:
        pattern = GPT2_SPLIT
    elif kinds == ['Digits', 'ByteLevel'] and regex and first['individual_digits']:
        pattern = DIGITS_SPLIT
    elif kinds == ['Split', 'ByteLevel'] and not regex and first['behavior'] == 'Isolated' and not first['invert']:
        given = first['pattern']['Regex']
        pattern = rf'(?:{given})|(?s:.+?)(?=(?:{given})|\z)'            # tiktoken drops what no pattern matches
    else:
        raise ValueError(f'it cuts text in a way that is not supported, {" then ".join(map(str, kinds))}: expected '
                         'ByteLevel, single Digits then ByteLevel, or one isolating Split by a Regex then ByteLevel')
    if content.get('normalizer') or steps[-1]['add_prefix_space'] or any(
            model.get(key) for key in ('continuing_subword_prefix', 'end_of_word_suffix')):
        raise ValueError('it changes text before it cuts it (normalizer, add_prefix_space, prefix or suffix), which is '
                         'not supported')
    added, vocab = {token['content']: token['id'] for token in content.get('added_tokens', [])}, model['vocab']
    # in most files an id is a rank, in all the merges are in order; what no merge makes can only be a whole piece
    merges = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
    names = [name for name in vocab if len(name) == 1] + [a + b for a, b in merges]
    names += sorted(vocab, key=vocab.get) if model.get('ignore_merges') else []
    ranked = {bytes(BYTES[c] for c in name): vocab[name] for name in dict.fromkeys(names) if name not in added}
    return ranked, added, pattern


def special_ids(config, special):
    """Ids of begin, end of text and padding: as tokenizer_config.json names them, else by the names in use."""
    named = read_json(config) if config.is_file() else {}
    found = []
    for key, usual in (('bos_token', ['<|begin_of_text|>', '<|endoftext|>']),
                       ('eos_token', ['<|end_of_text|>', '<|endoftext|>']),
                       ('pad_token', ['<|finetune_right_pad_id|>'])):
        name = named.get(key) or next((name for name in usual if name in special), None)
        name = name['content'] if isinstance(name, dict) else name
        if name not in special and (name or key != 'pad_token'):
            raise ValueError(f'{key} is {name!r}, which is no special token of this vocabulary: expected one, named in '
                             f'{config}')
        found.append(special.get(name))
    return found[0], found[1], found[1] if found[2] is None else found[2]


# ---- token files

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


FILES = ('train.bin', 'val.bin', 'pairs.jsonl', 'train.jsonl', 'validation.jsonl', 'meta.json')      # of any dataset


@contextlib.contextmanager
def staged(data_dir, name):
    """Yields an empty folder to write in; its files move to data_dir/name if the block ends well, meta.json last."""
    folder, staging = pathlib.Path(data_dir, name), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if strange := [file for file in FILES if (folder / file).is_dir()]:
            raise OSError(f'{strange[0]} is a folder')
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


def read_meta(folder):
    """A dataset's meta.json. Its callers say of its KeyError, TypeError or ValueError that the dataset is damaged."""
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    if meta['tokenizer'] not in ('gpt2', 'bytes', 'words'):
        raise ValueError(f'meta.json: no tokenizer {meta["tokenizer"]!r}')
    if meta['tokenizer'] == 'words':
        words = meta['words']
        if not all(isinstance(word, str) for word in words) or len(words) != meta['vocab_size'] or '<unk>' not in words:
            raise ValueError('meta.json: words and vocab_size do not fit')
    return meta


def load_tokens(data_dir, name):
    """Returns ({'train': ids, 'val': ids}, meta), ids read-only memory maps. Raises FileNotFoundError or ValueError."""
    folder = pathlib.Path(data_dir, name)
    if not (folder / 'meta.json').is_file():
        command = name if name in TASKS else f'text --input=FILE_OR_FOLDER --name={name}'
        if name.startswith('licensing_'):
            command = name.replace('_shuffled', ' --shuffled').replace('_long', ' --long_memory')
        where = '' if str(data_dir) == DEFAULTS['data_dir'] else f' --data_dir={data_dir}'
        raise FileNotFoundError(f'no dataset in {folder}: make it with `python prepare.py {command}{where}`'
                                + ' (--preset=tiny needs none)' * (name == 'openwebtext'))
    try:
        meta = read_meta(folder)
        if 'template' in meta:
            raise ValueError('it holds examples for train_cls.py, not text')
        if meta['dtype'] != token_dtype(meta['vocab_size']):
            raise ValueError(f"a vocabulary of {meta['vocab_size']} in token files of {meta['dtype']}")
        tokens = {}
        for split in ('train', 'val'):
            tokens[split] = np.memmap(folder / f'{split}.bin', dtype=meta['dtype'], mode='r')
            if len(tokens[split]) != meta['counts'][split]:
                raise ValueError(f"{split}.bin holds {len(tokens[split])} tokens, not {meta['counts'][split]}")
            if len(tokens[split]) < 2:
                raise ValueError(f'{split}.bin holds no two tokens, of which one predicts the other')
            pack_tokens(tokens[split][:10_000_000], meta['vocab_size'])     # of 18 GB enough to know a foreign file
        return tokens, meta
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f'{folder} is no dataset of text, or is damaged: make it again with prepare.py '
                         f'({error})') from None


def load_pairs(data_dir, name):
    """Returns a dataset's minimal pairs, a list of {family, good, bad}; [] if it has none. Raises ValueError."""
    path = pathlib.Path(data_dir, name, 'pairs.jsonl')
    try:
        pairs = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        if not all(isinstance(pair[key], str) for pair in pairs for key in ('family', 'good', 'bad')):
            raise ValueError('a text is missing')
        return pairs
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} is damaged, make it again with prepare.py ({error})') from None


def picker(seed, purpose):
    """pick(options) -> one of them, each as likely. What one seed draws for two purposes is independent."""
    uniform = random.Random(f'{seed} {purpose}').random     # the one method that Python promises never to change
    return lambda options: options[int(uniform() * len(options))]


# ---- licensing: sentences in which one word may only come after another

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
# the words of a family that only come after a licensor
LICENSED = {comparative: ['than'], passive: ['by'], neither: ['nor'], negation: ['ever', 'any']}


def licensed_places(family, n, seed=1):
    """n held-out places where a word of LICENSED[family] is licensed, each with its like that has no licensor.

    Returns dicts: licensed and unlicensed, the words before the place, which differ in one; licensor, the index among
    them of the licensor (in the passive the participle, which follows the word that differs); word, the licensed one.
    """
    pick, places = picker(seed, f'places {family.__name__}'), []
    while len(places) < n:
        right, wrong = (sentence.split() for sentence in family(pick, held=True))
        place = max((i for i, word in enumerate(right) if word in LICENSED[family]), default=0)
        if place:
            differs = next(i for i, (one, another) in enumerate(zip(right, wrong)) if one != another)
            places.append(dict(licensed=right[:place], unlicensed=wrong[:place], word=right[place],
                               licensor=differs + (family is passive)))
    return places


def make_licensing(data_dir, name='licensing', seed=1, n_tokens=1_000_000, shuffled=False, long_memory=False):
    """Writes sentences, five or six in seven or eight from the families and two from distractor(), drawn independently
    for training and validation, and 200 minimal pairs a family. Returns meta."""
    if n_tokens < 1000:
        raise ValueError(f'n_tokens={n_tokens}: expected at least 1000')
    tokenizer, counts = get_tokenizer('words', WORDS), {}
    families = FAMILIES + [memory] * long_memory
    with staged(data_dir, name) as staging:
        for split, n in dict(train=n_tokens, val=n_tokens // 20).items():
            pick, ids = picker(seed, split), []
            while len(ids) < n:
                ids += tokenizer.encode(pick(families + 2 * [distractor])(pick, held=False)[0])
            ids = pack_tokens(ids[:n], tokenizer.vocab_size)
            if shuffled:
                np.random.RandomState(seed).shuffle(ids)    # the legacy generator's stream is frozen
            (staging / f'{split}.bin').write_bytes(ids.tobytes())
            counts[split] = n
        with open(staging / 'pairs.jsonl', 'w') as file:
            for family in families:
                pick, pairs = picker(seed, family.__name__), {}
                while len(pairs) < 200:
                    good, bad = (' '.join(sentence.split()) for sentence in family(pick, held=True))
                    pairs[good] = dict(family=family.__name__, good=good, bad=bad)
                file.writelines(json.dumps(pair) + '\n' for pair in pairs.values())
        return write_meta(staging, name, tokenizer, counts, 'generated', words=WORDS, seed=seed, shuffled=shuffled,
                          long_memory=long_memory)


# ---- text

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
        # openwebtext's main branch went from a script, which datasets 4 no longer runs, to parquet files
        # (huggingface.co/datasets/Skylion007/openwebtext/discussions/18)
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


# ---- classification: a context, a question, one of three labels

TEMPLATES = dict(rulebase='{context}\nQuestion: {question}', proofwriter='{context}\nQuestion: {question}',
                 mnli='{context}\nHypothesis: {question}')      # paper B prints ProofWriter's, none for MNLI
LABELS = dict(rulebase=['False', 'True', 'Unknown'], proofwriter=['False', 'True', 'Unknown'],
              mnli=['contradiction', 'entailment', 'neutral'])  # label 0, 1, 2: paper B, section 5.3
SOURCES = dict(     # where a row keeps its context, question and label, and the hub's repository and splits
    proofwriter=dict(columns=('theory', 'question', 'answer'), hub=('tasksource/proofwriter', None),
                     splits=dict(train='train', validation='validation')),
    mnli=dict(columns=('premise', 'hypothesis', 'label'), hub=('nyu-mll/glue', 'mnli'),
              splits=dict(train='train', validation='validation_matched')))
GLUE = {'0': 'entailment', '1': 'neutral', '2': 'contradiction'}        # where a file has MNLI's labels as numbers


def load_table(label, source):
    """The rows, as dicts, of a .json, .jsonl or .parquet file, or of the hub's (repository, configuration, split).
    Labels that the hub keeps as numbers with names, in the column `label`, come by name. Raises ValueError."""
    try:
        if isinstance(source, pathlib.Path) and source.suffix != '.parquet':
            text = source.read_text(encoding='utf-8-sig')
            rows = json.loads(text) if source.suffix == '.json' else [
                json.loads(line) for line in text.split('\n') if line.strip()]
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError('not a list of objects')
            return rows
        import datasets
        import huggingface_hub
        huggingface_hub.utils.logging.set_verbosity_error()     # the one line below says what its retries would
        if isinstance(source, pathlib.Path):
            table = datasets.load_dataset('parquet', data_files=str(source), split='train')
        else:
            repository, configuration, split = source
            table = datasets.load_dataset(repository, configuration, split=split)
        names = getattr(table.features.get(label), 'names', None)
        table = table.remove_columns([column for column in table.column_names if column == 'allProofs'])    # long
        return [{**row, label: names[row[label]]} if names and row[label] in range(len(names)) else row
                for row in table]
    except Exception as error:      # the hub's library raises what it likes, and a file may hold anything
        wanted = (f'{source}: expected rows of JSON (.jsonl: one object a line, .json: a list) or a whole .parquet file'
                  if isinstance(source, pathlib.Path) else
                  f'{source[0]} from the hub: give --input=FOLDER with its splits as .jsonl, .json or .parquet files')
        raise ValueError(f'cannot read {wanted} ({type(error).__name__}: {str(error)[:200]})') from None


def find_splits(task, folder):
    """A folder's files by split: [TASK_]train and [TASK_]validation, whole or in the hub's numbered parts."""
    found = {}
    for file in sorted(folder.iterdir()):
        if match := re.fullmatch(rf'((?:{task}_)?(train|validation)(?:_matched)?)(?:-\d+-of-\d+)?(\.jsonl?|\.parquet)',
                                 file.name):
            found.setdefault(match[2], {}).setdefault((match[1], match[3]), []).append(file)
    for split in ('train', 'validation'):
        if len(found.get(split, {})) != 1:
            names = [file.name for files in found.get(split, {}).values() for file in files]
            raise ValueError(f'--input={folder} holds {" and ".join(names) or f"no {split} split"}: expected one of '
                             f'{split}.jsonl, .json, .parquet or {task}_{split}.jsonl, .json, .parquet')
    return {split: next(iter(files.values())) for split, files in found.items()}


def read_example(task, split, i, row):
    """A source's row as one of ours. Raises ValueError."""
    (context, question, label), where = SOURCES[task]['columns'], f'row {i + 1} of {split}'
    if lacking := [column for column in (context, question, label) if column not in row]:
        raise ValueError(f'{where} has no column {", ".join(lacking)}: expected {context}, {question} and {label}, got '
                         f'{", ".join(row)} (without the {context} a model would see the question alone)')
    for column in (context, question):
        if not isinstance(row[column], str) or not row[column].strip():
            raise ValueError(f'{where} has an empty {column}: {row[column]!r} (without the {context} a model would see '
                             'the question alone)')
    name = str(row[label])
    if task == 'mnli':
        name = GLUE.get(name, name)
    if name not in LABELS[task]:
        raise ValueError(f'{where} has the {label} {row[label]!r}: expected {", ".join(LABELS[task])}'
                         + ' (-1 marks the test split, which has none)' * (name == '-1'))
    depth = row.get('QDep_computed') if row.get('QDep') is None else row['QDep']
    try:
        depth = None if depth is None else int(depth)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f'{where} has the depth {depth!r}: expected a whole number, or null') from None
    return dict(id=str(row.get('id', f'{split}_{i}')), context=row[context].strip(), question=row[question].strip(),
                label=LABELS[task].index(name), depth=depth)


def write_examples(data_dir, name, task, examples, source, **more):
    """Writes train.jsonl, validation.jsonl and meta.json; says how many contexts are in both splits. Returns meta."""
    for split in ('train', 'validation'):
        if not examples[split]:
            raise ValueError(f'{source} leaves the {split} split empty: give more rows, or a folder with both splits')
    texts = (TEMPLATES[task].format(**row) for row in examples['train'])
    words = ['<unk>', '<pad>', '<begin>'] + sorted({word for text in texts for word in split_words(text)})
    labels = {split: [sum(row['label'] == label for row in rows) for label in range(3)]
              for split, rows in examples.items()}
    contexts = [{row['context'] for row in rows} for rows in examples.values()]
    in_both = len(set.intersection(*contexts))
    print(f'{in_both} of {len(contexts[1])} validation contexts are also in the training split')
    with staged(data_dir, name) as staging:
        for split, rows in examples.items():
            with open(staging / f'{split}.jsonl', 'w', encoding='utf-8') as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
        counts = {split: len(rows) for split, rows in examples.items()}
        return write_meta(
            staging, name, get_tokenizer('words', words), counts, source, task=task, template=TEMPLATES[task],
            labels=LABELS[task], label_counts=labels, contexts_in_both=in_both, words=words,
            majority={split: round(max(n) / sum(n), 4) for split, n in labels.items()}, **more)


def make_examples(task, data_dir, name, source='', val_frac=0.0, seed=1):
    """Writes proofwriter or mnli from a folder with both splits, from one file, whose contexts the seed parts (val_frac
    of them, by default a tenth, validate), or from the hub. Returns meta. Raises ValueError."""
    label, path, more = SOURCES[task]['columns'][2], pathlib.Path(source), {}
    if not source:
        repository, configuration = SOURCES[task]['hub']
        tables = {split: load_table(label, (repository, configuration, theirs))
                  for split, theirs in SOURCES[task]['splits'].items()}
    elif path.is_dir():
        tables = {split: [row for file in files for row in load_table(label, file)]
                  for split, files in find_splits(task, path).items()}
    elif path.is_file() and path.suffix in ('.json', '.jsonl', '.parquet'):
        tables = {'the file': load_table(label, path)}
    else:
        raise ValueError(f'--input={source}: expected a .jsonl, .json or .parquet file, or a folder of such files with '
                         'a train and a validation split')
    examples = {split: [read_example(task, split, i, row) for i, row in enumerate(rows)]
                for split, rows in tables.items()}
    if 'the file' in examples:
        contexts = list(dict.fromkeys(row['context'] for row in examples['the file']))
        n_val = round((val_frac or 0.1) * len(contexts))
        held_out = set(subset(contexts, n_val, seed)) if n_val else set()
        examples = {split: [row for row in examples['the file'] if (row['context'] in held_out) == validates]
                    for split, validates in dict(train=False, validation=True).items()}
        print(f"{source} has no splits: the seed {seed} keeps {n_val} of its {len(contexts)} contexts for validation")
        more = dict(seed=seed)
    return write_examples(data_dir, name, task, dict(train=examples['train'], validation=examples['validation']),
                          str(source) or SOURCES[task]['hub'][0], **more)


def load_examples(data_dir, name):
    """Returns ({'train': rows, 'validation': rows}, meta), each row {id, context, question, label, depth}.
    Raises FileNotFoundError or ValueError."""
    folder = pathlib.Path(data_dir, name)
    if not (folder / 'meta.json').is_file():
        command = name if name in TASKS else f'TASK --input=FILE_OR_FOLDER --name={name}'
        where = '' if str(data_dir) == DEFAULTS['data_dir'] else f' --data_dir={data_dir}'
        raise FileNotFoundError(f'no dataset in {folder}: make it with `python prepare.py {command}{where}`')
    try:
        meta = read_meta(folder)
        if 'template' not in meta:
            raise ValueError(f'it holds text, not examples: expected {", ".join(TEMPLATES)}')
        if meta['template'] not in TEMPLATES.values() or not {'<unk>', '<pad>', '<begin>'} <= set(meta['words']):
            raise ValueError('meta.json: template or words are not those that prepare.py writes')
        examples = {}
        for split in ('train', 'validation'):
            lines = (folder / f'{split}.jsonl').read_text(encoding='utf-8').split('\n')
            rows = examples[split] = [json.loads(line) for line in lines if line]
            if len(rows) != meta['counts'][split]:
                raise ValueError(f"{split}.jsonl holds {len(rows)} examples, not {meta['counts'][split]}")
            if not rows:
                raise ValueError(f'{split}.jsonl is empty')
            for row in rows:
                label = row['label']
                if type(label) is not int or not 0 <= label <= 2 or not row['context'] or not row['question'] or (
                        'depth' not in row):
                    raise ValueError(f'{split}.jsonl: {row} is no example')
        return examples, meta
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f'{folder} is damaged, make it again with prepare.py ({error})') from None


def subset(rows, n, seed):
    """n of the rows, drawn by the seed without replacement, in their order; all for n=0 or where there are no more."""
    if not 0 < n < len(rows):
        return rows
    return [rows[i] for i in sorted(np.random.RandomState(seed).permutation(len(rows))[:n])]


def encode_example(tokenizer, row, template, max_tokens):
    """Ids of begin and the row's text, tokenised as one and cut from the left, behind begin, to max_tokens (paper B,
    section 4.2). Raises ValueError where the question alone does not fit."""
    question = template.partition('{context}')[2].lstrip().format(**row)
    needed = 1 + len(tokenizer.encode(question))
    if needed > max_tokens:
        raise ValueError(f'max_tokens={max_tokens} cannot hold the question {row["question"][:60]!r} of {row["id"]}: '
                         f'expected at least {needed}')
    ids = tokenizer.encode(template.format(**row))
    return [tokenizer.begin] + ids[max(0, len(ids) - max_tokens + 1):]


def collate(ids, pad, side='right'):
    """Lists of ids -> (ids_BS int64, mask_BS bool, true where a token is real), padded on `side` to the longest."""
    S = max(map(len, ids))
    ids_BS, mask_BS = torch.full((len(ids), S), pad), torch.zeros(len(ids), S, dtype=torch.bool)
    for b, row in enumerate(ids):
        place = slice(0, len(row)) if side == 'right' else slice(S - len(row), S)
        ids_BS[b, place], mask_BS[b, place] = torch.tensor(row), True
    return ids_BS, mask_BS


# ---- rulebase: small theories, and questions that they prove, disprove or leave open

PEOPLE = 'Anne Bob Dave Erin Fiona Gary'.split()
PROPERTIES = 'big blue cold green kind nice quiet red rough round smart young'.split()


def draw(pick, options, n):
    """n of the options, without replacement."""
    options = list(options)
    return [options.pop(pick(range(len(options)))) for _ in range(n)]


def draw_theory(pick, depth):
    """(people, facts, rules) in which a proof of `depth` steps is likely. Facts are statements (who, property, holds),
    rules pairs (conditions, conclusion) of statements, where who is None for whoever a rule is applied to.

    Both people have as many facts, so that none looks like the one to ask about. A property is affirmed or denied
    throughout the theory, but for one mention in twenty: else most theories would contradict themselves.
    """
    def percent(share):
        return pick(range(100)) < share

    people, n_rules, n_facts = draw(pick, PEOPLE, 2), depth + percent(10), 1 + percent(10)
    properties = draw(pick, PROPERTIES, 3 + n_rules)
    usual = {name: pick([True, False]) for name in properties}
    claim = lambda name: (name, usual[name] != percent(5))
    facts = [(who, *claim(name)) for who in people for name in draw(pick, properties[:3], n_facts)]
    rules, last = [], pick(facts)[1:]
    for _ in range(n_rules):        # most rules start where the one before ended
        conditions = [last if percent(80) else claim(pick(properties))]
        if percent(20):
            more = pick(facts)[1:] if percent(70) else claim(pick(properties))
            conditions += [more] * (more[0] != conditions[0][0])
        last = claim(pick([name for name in properties if name not in [condition[0] for condition in conditions]]))
        who, whom = [pick(people), pick(people)] if percent(10) else [None, None]
        rules.append(([(who, *condition) for condition in conditions], (whom, *last)))
    return people, facts, rules


def forward_chain(people, facts, rules):
    """All that follows, {(who, property): (holds, depth)}, or None where a statement and its negation both do.

    Open world: what does not follow is unknown, and a negated condition needs the negation. depth: how many rules stand
    above each other in the shortest proof, 0 for a fact (ProofWriter's QDep).
    """
    known = {(who, name): (holds, 0) for who, name, holds in facts}
    for depth in itertools.count(1):
        new = {}
        for conditions, (whom, what, so) in rules:
            for person in people:
                if all(known.get((who or person, name), (None,))[0] == holds for who, name, holds in conditions):
                    atom = whom or person, what
                    if known.get(atom, new.get(atom, (so,)))[0] != so:
                        return None
                    if atom not in known:
                        new[atom] = so, depth
        if not new:
            return known
        known |= new


def say(who, name, holds):
    return f'{who} is {name}' if holds else f'{who} is not {name}'


def say_rule(conditions, conclusion):
    said = [say(who or ('it' if i else 'something'), *rest) for i, (who, *rest) in enumerate(conditions)]
    return f"If {' and '.join(said)} then {say(conclusion[0] or 'it', *conclusion[1:])}."


def draw_example(pick, label, depth):
    """(theory as a set of sentences, context, question). False and True come with a shortest proof of `depth` steps;
    Unknown asks of one person what such a proof shows of the other alone or, one time in four, of a property that the
    theory leaves out. A quarter of the questions is negated, whatever the label: questions alone tell nothing, and
    theories no more than that a False plain question tends to come with more denials (half would end that, and would
    make a small model learn several times as slowly)."""
    denied = pick([False, False, False, True])
    while True:
        people, facts, rules = draw_theory(pick, depth)
        known = forward_chain(people, facts, rules)
        atoms = [(who, name) for (who, name), (_, steps) in (known or {}).items()
                 if steps == depth and any((other, name) not in known for other in people)]
        if not atoms:
            continue
        sentences = [say(*fact) + '.' for fact in draw(pick, facts, len(facts))]
        sentences += [say_rule(*rule) for rule in draw(pick, rules, len(rules))]
        context, (who, name) = ' '.join(sentences), pick(atoms)
        if label == 2:
            who = next(other for other in people if (other, name) not in known)
            name = pick([name, name, name, pick([left for left in PROPERTIES if left not in split_words(context)])])
        elif (known[who, name][0] != denied) != bool(label):
            continue
        return frozenset(sentences), context, say(who, name, not denied)


def make_rulebase(data_dir, name='rulebase', seed=1, n_train=20_000, n_val=2_000, max_depth=3, balance='1,1,1'):
    """Writes theories of two people with one to four facts and no more than max_depth + 1 rules, one question each.
    balance: parts of False, True and Unknown; depths 0 to max_depth are as frequent among the first two (Unknown has
    none: null). Both splits have no theory in common, whatever its order. Returns meta. Raises ValueError."""
    parts = [int(part) if part.isdecimal() else -1 for part in balance.split(',')]
    if len(parts) != 3 or min(parts) < 0 or not sum(parts):
        raise ValueError(f'balance={balance}: expected parts of False, True and Unknown, whole numbers as in 1,1,1')
    if n_train < 1 or n_val < 1 or not 0 <= max_depth <= 5:
        raise ValueError(f'n_train={n_train}, n_val={n_val}, max_depth={max_depth}: expected at least one example a '
                         'split and depths from 0 to 5')
    examples, taken = {}, set()
    for split, n in dict(train=n_train, validation=n_val).items():
        pick, rows, theories = picker(seed, split), [], set()
        ends = [round(n * sum(parts[:label]) / sum(parts)) for label in range(4)]
        for label in range(3):
            for i in range(ends[label + 1] - ends[label]):
                depth = i % (max_depth + 1)
                theory, context, question = draw_example(pick, label, depth)
                while theory in taken:
                    theory, context, question = draw_example(pick, label, depth)
                theories.add(theory)
                rows.append(dict(context=context, question=question, label=label, depth=None if label == 2 else depth))
        examples[split] = [dict(id=f'{split}_{i}', **row) for i, row in enumerate(draw(pick, rows, n))]
        taken |= theories
    return write_examples(data_dir, name, 'rulebase', examples, 'generated', seed=seed, max_depth=max_depth,
                          balance=balance)


# ---- evaluation sets: read where they are, nothing is written

def read_texts(path, repository, configs, split, columns):
    """The rows, as dicts of the text in `columns`, of a .jsonl file, or without one of the hub's repository, its
    configurations (None: all) one after another. Raises ValueError."""
    try:
        if path:
            rows = [json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').split('\n')
                    if line.strip()]
        else:
            import datasets
            import huggingface_hub
            huggingface_hub.utils.logging.set_verbosity_error()     # the one line below says what its retries would
            rows = [row for config in configs or datasets.get_dataset_config_names(repository)
                    for row in datasets.load_dataset(repository, config, split=split)]
        rows = [{column: row[column] for column in columns} for row in rows]
        if not rows or not all(isinstance(text, str) and text.strip() for row in rows for text in row.values()):
            raise ValueError('a text is missing' if rows else 'it is empty')
        return rows
    except Exception as error:      # the hub's library raises what it likes, and a file may hold anything
        how = ', one JSON object a line' if path else '; without network give a .jsonl file (evaluate.py --help)'
        raise ValueError(f'cannot read {path or repository}: expected rows with {", ".join(columns)}{how} '
                         f'({type(error).__name__}: {str(error)[:200]})') from None


def load_lambada(path=''):
    """The passages of LAMBADA's test set in OpenAI's form (5,153), whose last word is to be guessed; `path` is a .jsonl
    file with `text`, '' the hub. Raises ValueError."""
    return [row['text'] for row in read_texts(path, 'EleutherAI/lambada_openai', ['default'], 'test', ['text'])]


def load_blimp(path=''):
    """BLiMP's minimal pairs (67 paradigms of 1,000), dicts family (the paradigm), phenomenon (one of 12), good, bad;
    `path` is a .jsonl file in BLiMP's columns, '' the hub. Raises ValueError."""
    columns = ['UID', 'linguistics_term', 'sentence_good', 'sentence_bad']
    # the files part two paradigms from argument structure, where BLiMP's paper counts them (Warstadt et al. 2020)
    return [dict(family=row['UID'], good=row['sentence_good'], bad=row['sentence_bad'],
                 phenomenon=row['linguistics_term'].replace('s-selection', 'argument_structure'))
            for row in read_texts(path, 'nyu-mll/blimp', None, 'train', columns)]


def make(c):
    """Writes the dataset that the settings ask for. Returns meta."""
    name = c.name or c.task
    if c.task == 'licensing':
        name = c.name or 'licensing' + '_shuffled' * c.shuffled + '_long' * c.long_memory
        return make_licensing(c.data_dir, name, c.seed, c.n_tokens, c.shuffled, c.long_memory)
    if c.task == 'text':
        return make_text(c.data_dir, name, c.input, c.val, c.val_frac, c.tokenizer, c.num_threads)
    if c.task == 'rulebase':
        return make_rulebase(c.data_dir, name, c.seed, c.n_train, c.n_val, c.max_depth, c.balance)
    if c.task in SOURCES:
        return make_examples(c.task, c.data_dir, name, c.input, c.val_frac, c.seed)
    return make_openwebtext(c.data_dir, name, c.input, c.repository, c.revision, c.val_frac, c.tokenizer, c.seed,
                            c.num_threads)


def main(argv=None):
    c = SimpleNamespace(**runtime.configure(__file__, DEFAULTS, choices=dict(tokenizer=['gpt2', 'bytes']), argv=argv,
                                            positional='task'))
    if c.task not in TASKS:
        runtime.fail(f"prepare what? expected {', '.join(TASKS)}, got {c.task!r}")
    if not 0 <= c.val_frac < 1:
        runtime.fail(f'val_frac={c.val_frac}: expected a share from 0 to 1')
    runtime.check_numbers(vars(c), positive=(), not_negative=('num_threads',))
    with runtime.interruptible('nothing was changed'):
        try:
            meta = make(c)
        except (ValueError, OSError) as error:
            runtime.fail(error)
    runtime.result(**{key: value for key, value in meta.items() if key != 'words'})


if __name__ == '__main__':
    main()
