"""What a trained language model is measured by: the loss over fixed windows, and minimal pairs.

    mean_loss        cross-entropy over a token file, every token counted once
    pair_accuracy    how often the grammatical sentence of a pair is the likelier one (BLiMP's rule)
"""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from runtime import all_sum


def windows(tokens, block_size, most=0):
    """Starts of the windows that tile the tokens, the last target included; at most `most` of them, evenly spread (0:
    all)."""
    starts = list(range(0, len(tokens) - block_size, block_size))
    if most and len(starts) > most:
        starts = [starts[i * len(starts) // most] for i in range(most)]
    return starts


@torch.no_grad()
def mean_loss(model, batch_at, starts, batch_size, run, context):
    """Cross-entropy in nats a token over the windows at `starts`: summed, then divided by the count, over all
    processes.

    batch_at(starts) -> (ids_BT, targets_BT). run: the processes, see runtime.launch. context: the precision, see
    runtime.precision.
    """
    total = count = 0
    mine = starts[run.rank::run.world]
    for i in range(0, len(mine), batch_size):
        ids_BT, targets_BT = batch_at(mine[i:i + batch_size])
        with context:
            total += model(ids_BT, targets_BT).item() * targets_BT.numel()
        count += targets_BT.numel()
    total, count = all_sum(total, count)
    return total / count


@torch.no_grad()
def log_probs(model, sequences, device, batch_size=256):
    """Summed log-probability of each sequence of ids after its first token, in fp32, [N]. Batched by length. Of a
    sequence beyond the context, the end that fits is scored.
    """
    sequences = [ids[-model.block_size - 1:] for ids in sequences]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    scores = torch.zeros(len(sequences))
    for i in range(0, len(order), batch_size):
        rows = order[i:i + batch_size]
        padded = pad_sequence([torch.tensor(sequences[r]) for r in rows], batch_first=True, padding_value=-1)
        ids_BT, targets_BT = padded[:, :-1].clamp(min=0).to(device), padded[:, 1:].to(device)
        # padding stands at the end, where a causal model's earlier logits cannot see it
        loss_BT = F.cross_entropy(model(ids_BT).float().transpose(1, 2), targets_BT, ignore_index=-1, reduction='none')
        scores[rows] = -loss_BT.sum(1).cpu()
    return scores


def pair_accuracy(model, pairs, tokenizer, device):
    """Share of pairs whose good sentence is strictly the likelier one, by family and their mean as 'overall' (BLiMP's
    convention, ties as misses). pairs: dicts family, good, bad. Each sentence follows one end-of-text token.
    """
    encode = lambda text: [tokenizer.eot, *tokenizer.encode(text)]
    good = log_probs(model, [encode(pair['good']) for pair in pairs], device)
    bad = log_probs(model, [encode(pair['bad']) for pair in pairs], device)
    wins = {}
    for pair, win in zip(pairs, (good > bad).tolist()):
        wins.setdefault(pair['family'], []).append(win)
    accuracy = {family: sum(won) / len(won) for family, won in wins.items()}
    return accuracy | {'overall': sum(accuracy.values()) / len(accuracy)}
