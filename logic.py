"""Fuzzy logic on tensors in [0,1]: the connectives of both papers (product t-norm; paper A, section 1; paper B, eq 13).

    a  b | a and b   a or b    not a   a and not b
         | a*b       a+b-ab    1-a     a*(1-b)
    -----+------------------------------------------
    0  0 | 0         0         1       0
    0  1 | 0         1         1       0
    1  0 | 0         1         0       1
    1  1 | 1         1         0       0

At 0 and 1 they are Boolean logic; in between they are smooth, stay in [0,1] and are monotone in each argument (falling
where it is negated). A feature direction has no "not", but a membership does: 1 - a is as positive as a. That is why
operands are bounded.

Below the connectives is paper B's routed layer, which sends features into 3G gates, G each of AND, OR and NOT, over
small causal windows or, a union of the papers, over what paper A's quantifiers say of all earlier tokens. Axes: B
batch, S sequence, L logic width, G gates of a family, J = 3G routed channels, C window.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from quantifier import Quantifier, decayed_max, decayed_sum


def fuzzy_and(x, dim=-1):
    """Product of memberships along dim, which is removed (paper B, eq 13)."""
    return x.prod(dim)


def fuzzy_or(x, dim=-1):
    """1 - prod(1 - x) along dim, which is removed: De Morgan's dual of fuzzy_and (paper B, eq 13)."""
    return 1 - (1 - x).prod(dim)


def fuzzy_not(x):
    """1 - x, elementwise (paper B, eq 13)."""
    return 1 - x


def and_not(a, b):
    """a * (1 - b), elementwise: "a but not b", the set difference of paper A."""
    return a * (1 - b)


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, in fp32 whatever comes in, then cast back and multiplied by a learned weight."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        x_fp32 = x.float()
        return self.weight * (x_fp32 * (x_fp32.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


def causal_window(v_BSG, size, axis, fill, mask_BS=None):
    """Each element after its size-1 predecessors, oldest first, [B,S,G,C] (paper B, eq 12).

    axis 'inter': predecessors are the same gate at earlier tokens; 'intra': earlier gates of the same token. What lies
    before the start is `fill`, and so is padding (mask_BS: true where a token is real); a window never wraps round.
    """
    if mask_BS is not None:
        v_BSG = v_BSG.masked_fill(~mask_BS[..., None], fill)
    if axis == 'inter':
        return F.pad(v_BSG, (0, 0, size - 1, 0), value=fill).unfold(1, size, 1)
    return F.pad(v_BSG, (size - 1, 0), value=fill).unfold(2, size, 1)


def quantify(u_BSJ, decay_J, mask_BS):
    """What each gate's quantifier says after each token, [B,S,J]: of the real tokens up to it, at rate sigmoid(decay).

    The first half of each family's gates is decayed_max, the other half the corrected decayed_mean (paper A, section
    9); computed in fp32, returned in u's dtype. At rate 0 either is u itself.
    """
    u_BSJ, real_BS1, said = u_BSJ.masked_fill(~mask_BS[..., None], 0), mask_BS[..., None].to(u_BSJ), []
    for m_BSG, rate_G in zip(u_BSJ.chunk(3, dim=-1), decay_J.float().sigmoid().chunk(3)):           # AND, OR, NOT
        n = (len(rate_G) + 1) // 2
        gamma, lam = rate_G[:n], rate_G[n:]
        weight = decayed_sum(real_BS1.expand_as(m_BSG[..., n:]), lam)         # 1 or more from the first real token on
        said += [decayed_max(m_BSG[..., :n], gamma), decayed_sum(m_BSG[..., n:], lam) / weight.clamp(min=1)]
    return torch.cat(said, dim=-1).to(u_BSJ.dtype)


def route(logits_BSJ, tau=1.0):
    """Routing weights: softmax over all 3G channels at temperature tau (paper B, eq 7)."""
    return (logits_BSJ / tau).softmax(-1)


def straight_through(soft):
    """1 where soft >= 0.5, else 0, with the gradient of soft (paper B, eq 10)."""
    hard = (soft >= 0.5).to(soft.dtype)
    return soft + (hard - soft).detach()


def real_mean(x_BSJ, mask_BS):
    """Mean over the real tokens, [J], in fp32."""
    return (x_BSJ.float() * mask_BS[..., None]).sum((0, 1)) / mask_BS.sum()


def normalized_entropy(pi_BSJ, mask_BS):
    """Entropy of each real token's routing, averaged, over its maximum ln(3G): 1 is uniform (paper B, section 4.5)."""
    return real_mean(torch.special.entr(pi_BSJ.float()), mask_BS).sum() / math.log(pi_BSJ.size(-1))


class LogicLayer(nn.Module):
    """One layer of paper B's logic stream (eqs 6 to 17): route features into fuzzy gates, write back what these say.

    gate_mode 'soft' or 'ste' (eq 10). residual is eq 17's base: 'state', the previous state as printed, or 'attended',
    the layer's input, as the paper ran it: features then also pass by the gates. Near uniform routing pi is about 1/3G,
    so pi * s is small, AND is about 0 and 'ste' never fires; route_scale takes min(3G pi, 1) * s, which is then s.

    axis 'inter' or 'intra', see causal_window; 'quant': as 'inter', but in place of its value at the token before, a
    gate reads a quantifier over all tokens before, see quantify, whose rate it learns. ValueError for a window other
    than 2 with it.
    """

    def __init__(self, d_logic=256, n_gates=8, window=2, axis='inter', tau=1.0, gate_mode='soft', residual='attended',
                 route_scale=False):
        super().__init__()
        self.window, self.axis, self.tau, self.gate_mode = window, axis, tau, gate_mode
        self.residual, self.route_scale = residual, route_scale
        self.norm_in, self.norm_out = RMSNorm(d_logic), RMSNorm(d_logic)
        self.router = nn.Linear(d_logic, 3 * n_gates)                                               # W_r
        self.gate = nn.Linear(d_logic, 3 * n_gates)                                                 # W_g
        self.update = nn.Linear(n_gates * (window + 2), d_logic)                                    # eq 15's width
        if axis == 'quant':
            if window != 2:
                raise ValueError(f'axis=quant pairs a token with what came before it: expected window=2, got {window}')
            self.quantifier = Quantifier(3 * n_gates)                         # for its rates; see quantify

    def forward(self, attended_BSL, state_BSL, mask_BS):
        """The layer's input, the state before it and the mask (true where real) -> (state after it [B,S,L], stats).

        stats, over real tokens and detached: entropy (normalized_entropy), routing (mean pi, [3G]: AND, OR, NOT) and
        fired, the share of u that reaches 0.5.
        """
        x_BSL = self.norm_in(attended_BSL)
        pi_BSJ = route(self.router(x_BSL), self.tau)                                                # eqs 6, 7
        s_BSJ = self.gate(x_BSL).sigmoid()                                                          # eq 8
        scale_BSJ = (pi_BSJ.size(-1) * pi_BSJ).clamp(max=1) if self.route_scale else pi_BSJ
        u_BSJ = scale_BSJ * s_BSJ                                                                   # eq 9
        if self.gate_mode == 'ste':
            u_BSJ = straight_through(u_BSJ)                                                         # eq 10

        def windows(v_BSJ, size, axis):                                                             # eqs 11, 12
            # what is missing must not matter: true to AND, false to OR, and NOT of it is 0
            return [causal_window(v_BSG, size, axis, fill, mask_BS)
                    for v_BSG, fill in zip(v_BSJ.chunk(3, dim=-1), (1, 0, 1))]

        if self.axis == 'quant':
            before = windows(quantify(u_BSJ, self.quantifier.decay, mask_BS), 2, 'inter')
            # of a window over the quantifier's values the earlier one, what it said before this token
            operands = [torch.cat([q_BSGC[..., :1], u_BSGC], dim=-1)
                        for q_BSGC, u_BSGC in zip(before, windows(u_BSJ, 1, 'inter'))]
        else:
            operands = windows(u_BSJ, self.window, self.axis)
        u_and, u_or, u_not = operands                                                               # each [B,S,G,C]
        a_BSG, o_BSG, n_BSK = fuzzy_and(u_and), fuzzy_or(u_or), fuzzy_not(u_not).flatten(-2)        # eqs 13, 14
        delta_BSL = self.update(torch.cat([a_BSG, o_BSG, n_BSK], dim=-1))                           # eqs 15, 16
        base_BSL = state_BSL if self.residual == 'state' else attended_BSL
        with torch.no_grad():
            stats = dict(entropy=normalized_entropy(pi_BSJ, mask_BS), routing=real_mean(pi_BSJ, mask_BS),
                         fired=real_mean(u_BSJ >= 0.5, mask_BS).mean())
        return self.norm_out(base_BSL + delta_BSL), stats                                           # eq 17
