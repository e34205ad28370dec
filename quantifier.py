"""Fuzzy quantifiers along the sequence (paper A, section 9): has it happened, and how often, lately?

A membership m_t in [0,1] says how far token t has some property. Two quantifiers carry it forward, each fading at its
own rate:

    existential   E_t = max(m_t, gamma * E_{t-1})              a soft "exists": the strongest m so far, fading
    proportion    P_t = (1 - lam) * m_t + lam * P_{t-1}        a soft "how often", as printed
                  P_t = sum_k lam^k m_{t-k} / sum_k lam^k      corrected: a weighted mean from the first token on

At a rate of 1 nothing is forgotten: E is the running maximum and the corrected P the running mean (the printed P is 0).
At a rate of 0 both are m_t. An example, gamma = lam = 0.5:

    m                 0     1     0     0     1
    E                 0     1   0.5  0.25     1
    P as printed      0   0.5  0.25 0.125 0.563
    P corrected       0 0.667 0.286 0.133 0.581

Both recurrences are associative, so a scan evaluates them in 2 log2(T) steps rather than T: combine the tokens in
pairs, scan the pairs (half as long, the rate squared), and fill in the tokens between. Axes: B batch, T sequence, C
channels (one quantifier each).
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def scan(x_BTC, rate, combine):
    """All states y_t of y_t = combine(y_{t-1}, x_t, rate), y_0 = x_0, in O(T) work and O(log T) depth.

    The rate is [C], or [B,T,C] where it changes along the sequence: rate[:, t] takes y_{t-1} to t.
    """
    T = x_BTC.size(1)
    if T == 1:
        return x_BTC
    at = (lambda tokens: rate) if rate.dim() == 1 else (lambda tokens: rate[:, tokens])
    first, second, rest = slice(0, T - 1, 2), slice(1, None, 2), slice(2, None, 2)
    # y_1, y_3, ... from the pairs of tokens (0,1), (2,3), ...
    odd = scan(combine(x_BTC[:, first], x_BTC[:, second], at(second)), at(first) * at(second), combine)
    y_BTC = torch.empty_like(x_BTC)
    y_BTC[:, 0], y_BTC[:, second] = x_BTC[:, 0], odd
    del odd                                                                  # half the input's size, now held twice
    y_BTC[:, rest] = combine(y_BTC[:, 1:T - 1:2], x_BTC[:, rest], at(rest))  # y_2, y_4, ...
    return y_BTC


def fading_max(earlier, later, rate):
    return torch.maximum(later, earlier * rate)


def fading_sum(earlier, later, rate):
    return torch.addcmul(later, earlier, rate)


class FadingScan(torch.autograd.Function):
    """The scan with a backward pass that keeps only its input and output, whatever the depth.

    With y_t = x_t + rate * y_{t-1} the gradient runs the same recurrence from the end: G_t = g_t + rate * G_{t+1}, dx_t
    = G_t, drate = sum_t G_t * y_{t-1}. Under the maximum the rate counts only where the state was carried (y_t > x_t),
    and G_t reaches x_t only where it was not: at a tie the most recent maximiser takes it all.
    """

    @staticmethod
    def forward(ctx, x_BTC, rate_C, combine):
        y_BTC = scan(x_BTC, rate_C, combine)
        ctx.combine = combine
        ctx.save_for_backward(x_BTC, rate_C, y_BTC)
        return y_BTC

    @staticmethod
    def backward(ctx, g_BTC):
        x_BTC, rate_C, y_BTC = ctx.saved_tensors
        if ctx.combine is fading_sum:
            G_BTC = scan(g_BTC.flip(1), rate_C, fading_sum).flip(1)
            return G_BTC, (G_BTC[:, 1:] * y_BTC[:, :-1]).sum((0, 1)), None
        carried = y_BTC > x_BTC
        # backwards in time, what takes G_{t+1} to t is the rate that took y_t to t+1
        rate_BTC = F.pad(torch.where(carried[:, 1:], rate_C, 0), (0, 0, 0, 1)).flip(1)
        G_BTC = scan(g_BTC.flip(1), rate_BTC, fading_sum).flip(1)
        drate_C = torch.where(carried[:, 1:], G_BTC[:, 1:] * y_BTC[:, :-1], 0).sum((0, 1))
        return G_BTC.masked_fill(carried, 0), drate_C, None


def at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def fading_scan(x_BTC, rate_C, combine, before_BC=None):
    x_BTC, rate_C = at_least_fp32(x_BTC), at_least_fp32(rate_C)
    if before_BC is None:
        return FadingScan.apply(x_BTC, rate_C, combine)
    x_BTC = torch.cat([before_BC[:, None], x_BTC], dim=1)      # the state that earlier tokens left is one more token
    return FadingScan.apply(x_BTC, rate_C, combine)[:, 1:]


def decayed_max(m_BTC, gamma_C, before_BC=None):
    """E_t = max(m_t, gamma * E_{t-1}): has it happened, fading (paper A, section 9, reported).

    m_BTC: memberships in [0,1], [B,T,C]. gamma_C: rates in [0,1], [C]. Returns E, [B,T,C], in fp32 at least whatever
    autocast says; differentiable in both. before_BC: the state that earlier tokens left, E[:, -1], so that a sequence
    can be fed in parts or, for generation, token by token; at the start there is none.
    """
    return fading_scan(m_BTC, gamma_C, fading_max, before_BC)


def decayed_sum(m_BTC, lam_C, before_BC=None):
    """S_t = m_t + lam * S_{t-1}, of which both proportions are made. Shapes, dtype and `before` as in decayed_max."""
    return fading_scan(m_BTC, lam_C, fading_sum, before_BC)


def decayed_mean(m_BTC, lam_C, corrected=True):
    """How often, lately (paper A, section 9, reported). Shapes and dtype as in decayed_max.

    corrected=False: P_t = (1-lam) * m_t + lam * P_{t-1} with P_{-1} = 0, as printed: near lam = 1 both it and its
    gradient are scaled down by 1-lam. corrected=True: sum(lam^k m_{t-k}) / sum(lam^k), which is the exact running
    proportion at lam = 1.
    """
    return proportion(decayed_sum(m_BTC, lam_C), decayed_sum(torch.ones_like(m_BTC[:1]), lam_C), lam_C, corrected)


def proportion(S, N, lam_C, corrected):
    """P from S = sum(lam^k m_{t-k}) and the total weight N = sum(lam^k)."""
    return S * N.reciprocal() if corrected else (1 - lam_C) * S


class Quantifier(nn.Module):
    """n units over n memberships: the first half existential, the rest proportion, one learned rate each (paper A,
    section 9).

    A rate is sigmoid(decay), inside (0,1). It starts at 0.99, a half-life of 69 tokens: the sticky end, so that
    forgetting is learned.
    """

    sticky = 0.99

    def __init__(self, n, corrected=True):
        super().__init__()
        self.n_exists, self.corrected = (n + 1) // 2, corrected
        self.decay = nn.Parameter(torch.full((n,), math.log(self.sticky / (1 - self.sticky))))

    def forward(self, m_BTn, state=None):
        """Memberships [B,T,n] -> (quantified memberships [B,T,n] in fp32, state). Causal.

        The state (E, S, N), each [B,n/2] after the last token (N [1,n/2]), is what the next tokens need; see
        decayed_max.
        """
        E, S, N = state or (None, None, None)
        halves = [self.n_exists, len(self.decay) - self.n_exists]
        gamma, lam = self.decay.float().sigmoid().split(halves)
        m_exists, m_often = m_BTn.split(halves, dim=-1)
        E = decayed_max(m_exists, gamma, E)
        S = decayed_sum(m_often, lam, S)
        N = decayed_sum(torch.ones_like(m_often[:1]), lam, N)
        units_BTn = torch.cat([E, proportion(S, N, lam, self.corrected)], dim=-1)
        return units_BTn, (E[:, -1], S[:, -1], N[:, -1])

    def half_life(self):
        """Tokens after which a unit has forgotten half, ln 0.5 / ln rate, [n]. A latch is a unit whose half-life
        exceeds the context."""
        return math.log(0.5) / F.logsigmoid(self.decay.detach().double())
