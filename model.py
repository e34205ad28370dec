"""The models. Paper A: a GPT (GPT-2's architecture) whose feed-forward layers may compute explicit fuzzy logic.
Paper B: a classifier, Llama with a logic stream beside its layers.

    FFN        gelu, relu, four gated kinds and nc, with or without quantifiers; all with the GELU layer's parameters
    GPT        token and position embeddings, n_layer blocks of attention and FFN (pre-norm), tied head
    Llama      RMSNorm, RoPE, grouped-query attention, SwiGLU; load_llama reads the files of HF and of Meta
    Classifier Llama, LogicStream and Fusion, whose last real token goes to a head of three labels

        tokens -> layer 1 -> layer 2 ... layer n -> norm -> H_last ----------------------+-> RMSNorm -> head
                     | H_1      | H_2       | H_n                                        |
           L_0 -> step 1 --> step 2 ...  step n --------> L_last -> W_f -> times alpha --+   Fusion

        step t       cross-attention from L_{t-1} into H_t, then a LogicLayer (logic.py) or, in a control, a NoGateLayer

Axes: B batch, T or S sequence, D model width, F hidden units of an FFN, L logic width, V vocabulary, h heads.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from logic import LogicLayer, RMSNorm, and_not
from quantifier import Quantifier

# what a gated kind does with its two projections a and b; each has two thirds of the GELU layer's hidden units
GATED = dict(
    glu=lambda a, b: a.sigmoid() * b,
    swiglu=lambda a, b: F.silu(a) * b,
    bilinear=lambda a, b: a * b,
    sigbilinear=lambda a, b: a.sigmoid() * b.sigmoid(),
)
POINTWISE = dict(gelu=F.gelu, relu=F.relu)
FFN_KINDS = (*POINTWISE, *GATED, 'nc')
SOFT_GATE = 0.9     # a Boolean unit is a soft gate where one operand explains so much of its variance


def squared_correlation(x_NF, y_NF):
    """R^2 of each column of y explained by that of x, [F]; 1 where y stands still."""
    x_NF, y_NF = x_NF - x_NF.mean(0), y_NF - y_NF.mean(0)
    variance = y_NF.square().sum(0)
    explained = (x_NF * y_NF).sum(0).square() / (x_NF.square().sum(0) * variance).clamp_min(1e-30)
    return torch.where(variance > 1e-12 * len(y_NF), explained, 1.0)


class FFN(nn.Module):
    """[B,T,D] -> [B,T,D] through about d_ff hidden units, with the parameter count of the GELU layer of width d_ff.

    The kind nc (negation-capable, paper A) keeps the GELU layer's two matrices and gives its hidden units a new
    meaning. They are a named partition, `units`: name -> slice of the hidden units.

        pre-activation   gelu part | a         | b         | q
        hidden unit      gelu      | and: A*B  | and_not:  | exists: decayed_max(Q), proportion: decayed_mean(Q)
                                   |           | A*(1-B)   |                             A, B, Q = sigmoid(a, b, q)

    A share bool_frac of the units is Boolean (and, and_not, exists, proportion), of which quant_frac are quantifiers if
    quant is on. Only the decays of those, one a unit, go beyond the GELU layer's parameters.

    bound_write passes what the layer writes to the residual stream through tanh; highway adds a linear path D -> D
    beside it, outside the parameter match (paper A, section 8: remedies against divergence). op_init='zero' starts the
    Boolean units' write weights at zero, so the layer begins as its GELU part. quant_form: 'corrected' or 'printed',
    see quantifier.decayed_mean.
    """

    def __init__(self, kind, d, d_ff, bool_frac=0.25, quant=False, quant_frac=0.5, quant_form='corrected',
                 bound_write=False, highway=False, op_init='normal'):
        super().__init__()
        if kind not in FFN_KINDS:
            raise ValueError(f'unknown ffn {kind!r}: expected one of {", ".join(FFN_KINDS)}')
        if quant and kind != 'nc':
            raise ValueError(f'quant=on needs ffn=nc (quantifiers replace Boolean units), got ffn={kind}')
        if not (0 <= bool_frac <= 1 and 0 <= quant_frac <= 1):
            raise ValueError(f'bool_frac and quant_frac are shares from 0 to 1, got {bool_frac} and {quant_frac}')
        self.kind, self.op_init = kind, op_init
        self.quantifier = None
        if kind == 'nc':
            n_quant = round(quant_frac * bool_frac * d_ff) if quant else 0
            n_pairs = round((bool_frac * d_ff - n_quant) / 2)
            n_gelu = d_ff - 2 * n_pairs - n_quant
            if n_gelu < 0:
                raise ValueError(f'an all-Boolean FFN needs an even number of paired units, got d_ff={d_ff}')
            self.splits = [n_gelu, n_pairs, n_pairs, n_quant]                      # pre-activations: gelu, a, b, q
            n_up, sizes = d_ff, {'gelu': n_gelu, 'and': n_pairs, 'and_not': n_pairs}
            if n_quant:
                self.quantifier = Quantifier(n_quant, corrected=quant_form == 'corrected')
                sizes |= {'exists': self.quantifier.n_exists, 'proportion': n_quant - self.quantifier.n_exists}
        elif kind in GATED:
            n_hidden = max(1, round(d_ff * (2 * d + 1) / (3 * d + 2)))   # (3D+2) n = (2D+1) d_ff: about 2/3 d_ff
            n_up, sizes = 2 * n_hidden, {kind: n_hidden}
        else:
            n_up, sizes = d_ff, {kind: d_ff}
        self.units, end = {}, 0
        for name, size in sizes.items():
            self.units[name] = slice(end, end + size)
            end += size
        self.up = nn.Linear(d, n_up)
        self.down = nn.Linear(end, d)
        self.highway = nn.Linear(d, d, bias=False) if highway else None
        self.bound_write = bound_write

    def forward(self, x_BTD, state=None):
        """state: a dict that carries the quantifiers from call to call in generation; None otherwise."""
        write_BTD = self.down(self.hidden(self.up(x_BTD), state))
        if self.bound_write:
            write_BTD = write_BTD.tanh()
        return write_BTD if self.highway is None else write_BTD + self.highway(x_BTD)

    def hidden(self, pre_BTF, state=None):
        """The hidden units [B,T,F] from the pre-activations."""
        if self.kind in POINTWISE:
            return POINTWISE[self.kind](pre_BTF)
        if self.kind in GATED:
            return GATED[self.kind](*pre_BTF.chunk(2, dim=-1))
        gelu, a, b, q = pre_BTF.split(self.splits, dim=-1)         # one split, whose gradient is one concatenation
        A, B = a.sigmoid(), b.sigmoid()
        parts = [F.gelu(gelu), A * B, and_not(A, B)]
        if self.quantifier:
            units, last = self.quantifier(q.float().sigmoid(), (state or {}).get('quantifier'))
            parts.append(units.to(pre_BTF.dtype))
            if state is not None:
                state['quantifier'] = last
        return torch.cat(parts, dim=-1)

    def memberships(self, x_BTD):
        """What the Boolean units are made of, in [0,1]: name ('a', 'b', 'q') -> [B,T,n]. Empty for kinds without."""
        if self.kind != 'nc':
            return {}
        _, a, b, q = self.up(x_BTD).split(self.splits, dim=-1)
        return {'a': a.sigmoid(), 'b': b.sigmoid(), 'q': q.sigmoid()}

    def saturation(self, x_BTD):
        """Share of memberships within 0.05 of 0 or 1, where their gradient dies: the mean over the operands a and b and
        the quantified q, as a 0-d tensor. None without Boolean units."""
        shares = [((m < 0.05) | (m > 0.95)).float().mean() for m in self.memberships(x_BTD).values() if m.size(-1)]
        return torch.stack(shares).mean() if shares else None

    def operand_r2(self, x_BTD):
        """How far each operand alone explains each and, and_not unit over the tokens x_BTD: [2, 2 n], the squared
        correlation of the unit with its A and with its B. A unit that stands still has 1."""
        operands = self.memberships(x_BTD)
        A, B = operands['a'].flatten(0, -2).double(), operands['b'].flatten(0, -2).double()         # [tokens, n]
        return torch.stack([torch.cat([squared_correlation(operand, unit) for unit in (A * B, and_not(A, B))])
                            for operand in (A, B)])

    def single_operand_r2(self, x_BTD):
        """How far one operand explains each and, and_not unit, [2 n]: the larger of operand_r2 (paper A: a soft gate).
        Where B stands still it is 1, for then the unit is a multiple of A; for independent fair bits A and B it is 1/3.
        """
        return self.operand_r2(x_BTD).amax(dim=0)

    def two_operand_share(self, x_BTD):
        """Share of the and, and_not units that truly use two operands: neither explains 90% of the unit's variance."""
        return (self.single_operand_r2(x_BTD) < SOFT_GATE).double().mean()

    def init_weights(self, std, residual_std):
        """Normal weights, zero biases; what writes to the residual stream is scaled down by depth (GPT-2)."""
        nn.init.normal_(self.up.weight, std=std)
        nn.init.normal_(self.down.weight, std=residual_std)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)
        if self.highway is not None:
            nn.init.normal_(self.highway.weight, std=residual_std)
        if self.kind == 'nc' and self.op_init == 'zero':
            nn.init.zeros_(self.down.weight[:, self.units['gelu'].stop:])


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, d, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x_BTD, state=None):
        """state: a dict that keeps keys and values from call to call in generation; None otherwise."""
        B, T, D = x_BTD.shape
        heads = (B, T, self.n_head, D // self.n_head)
        q, k, v = (z.view(heads).transpose(1, 2) for z in self.qkv(x_BTD).chunk(3, dim=-1))      # [B,h,T,D/h]
        if state is not None:
            if 'keys' in state:
                assert T == 1, 'after the prompt, one token at a time'
                k, v = torch.cat([state['keys'], k], dim=2), torch.cat([state['values'], v], dim=2)
            state['keys'], state['values'] = k, v
        y_BhTd = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.out(y_BhTd.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, d, n_head, ffn):
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(d), Attention(d, n_head)
        self.norm_ffn, self.ffn = nn.LayerNorm(d), ffn

    def forward(self, x_BTD, state=None):
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), state)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD), state)


# the settings of a run that make its GPT, beside the vocabulary
MODEL_KEYS = ('block_size', 'n_layer', 'n_head', 'n_embd', 'ffn', 'bool_frac', 'quant', 'quant_frac', 'quant_form',
              'bound_write', 'highway', 'op_init')


class GPT(nn.Module):
    """GPT-2 with a choice of feed-forward layer (paper A, section 6): n_layer pre-norm blocks, learned positions, tied
    head.

    ffn and the options after it go to every FFN. The embedding is padded to a multiple of 64 rows, which GPUs multiply
    faster; logits are cut to the vocabulary. ValueError where the shapes do not fit.
    """

    def __init__(self, vocab_size, block_size=1024, n_layer=12, n_head=12, n_embd=768, ffn='gelu', **ffn_options):
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f'n_embd must be divisible by n_head, got {n_embd} and {n_head}')
        self.vocab_size, self.block_size, self.n_layer = vocab_size, block_size, n_layer
        self.tokens = nn.Embedding(-(-vocab_size // 64) * 64, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(
            Block(n_embd, n_head, FFN(ffn, n_embd, 4 * n_embd, **ffn_options)) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, self.tokens.num_embeddings, bias=False)
        self.head.weight = self.tokens.weight
        self.init_weights()

    def init_weights(self):
        """GPT-2's scales. 0.02 everywhere, so that logits start small and the loss at ln V; each of the 2 n_layer
        writes to the residual stream divided by their number's root, so that the stream's variance does not grow with
        depth.
        """
        std, residual_std = 0.02, 0.02 / math.sqrt(2 * self.n_layer)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=std)
        for block in self.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=std)
            nn.init.normal_(block.attn.out.weight, std=residual_std)
            nn.init.zeros_(block.attn.qkv.bias)
            nn.init.zeros_(block.attn.out.bias)
            block.ffn.init_weights(std, residual_std)

    def forward(self, ids_BT, targets_BT=None, states=None):
        """Token ids -> logits [B,T,V]; with targets -> the mean cross-entropy in nats, computed in fp32.

        states: a list of dicts, one a block, that carry keys, values and quantifiers from call to call in generation.
        """
        T = ids_BT.size(1)
        start = states[0]['keys'].size(2) if states and states[0] else 0
        assert start + T <= self.block_size, f'{start + T} tokens in a context of {self.block_size}'
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(start, start + T, device=ids_BT.device))
        for block, state in zip(self.blocks, states or [None] * self.n_layer):
            x_BTD = block(x_BTD, state)
        logits_BTV = self.head(self.norm(x_BTD))[..., :self.vocab_size]
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def generate(self, ids_BT, n, temperature=1.0, top_k=0, generator=None):
        """ids_BT followed by n sampled tokens, [B,T+n]. Temperature 0 takes the likeliest token; top_k=0 keeps all.

        Inside the context each step feeds one token and carries the states. Past it the last block_size tokens are read
        anew.
        """
        states = [{} for _ in self.blocks]
        new_BT = ids_BT
        for _ in range(n):
            if ids_BT.size(1) <= self.block_size:
                logits_BV = self(new_BT, states=states)[:, -1].float()
            else:
                logits_BV = self(ids_BT[:, -self.block_size:])[:, -1].float()
            if top_k:
                kth = logits_BV.topk(min(top_k, self.vocab_size)).values[:, -1:]
                logits_BV = logits_BV.masked_fill(logits_BV < kth, -math.inf)
            if temperature == 0:
                new_BT = logits_BV.argmax(-1, keepdim=True)
            else:
                new_BT = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            ids_BT = torch.cat([ids_BT, new_BT], dim=1)
        return ids_BT

    def num_params(self):
        """All parameters, the tied matrix once and without its padding."""
        padding = (self.tokens.num_embeddings - self.vocab_size) * self.tokens.embedding_dim
        return sum(p.numel() for p in self.parameters()) - padding

    def flops_per_token(self):
        """Floating-point operations of one training token: 6 a weight that multiplies (the head too), and attention
        (PaLM, appendix B)."""
        matmul = self.num_params() - self.positions.weight.numel()
        return 6 * matmul + 12 * self.n_layer * self.tokens.embedding_dim * self.block_size

    def quantifier_units(self):
        """Every quantifier unit, layer by layer: dict of 1-d tensors layer, half_life (tokens), write_norm (of its
        column of `down`) and exists (bool; the others are proportion units). None without quantifiers.
        """
        rows = []
        for layer, ffn in enumerate(block.ffn for block in self.blocks):
            if ffn.quantifier:
                half_life = ffn.quantifier.half_life()
                norm = ffn.down.weight.detach()[:, ffn.units['and_not'].stop:].norm(dim=0).to(half_life)
                exists = torch.arange(len(half_life), device=norm.device) < ffn.quantifier.n_exists
                rows.append((torch.full_like(exists, layer, dtype=torch.long), half_life, norm, exists))
        return dict(zip(('layer', 'half_life', 'write_norm', 'exists'), map(torch.cat, zip(*rows)))) if rows else None

    def memory(self):
        """How long quantifiers remember, a dict: median half-life (tokens) of the existential units, of the fifth of
        them that writes most, and of the proportion units; and latches, units of either sort with a half-life beyond
        the context. Empty without quantifiers.
        """
        units = self.quantifier_units()
        if units is None:
            return {}
        exists, half_life = units['exists'], units['half_life']
        top = units['write_norm'][exists].topk(max(1, int(exists.sum()) // 5)).indices
        return dict(half_life_median=half_life[exists].median().item(),
                    half_life_median_top=half_life[exists][top].median().item(),
                    half_life_median_proportion=half_life[~exists].median().item() if (~exists).any() else None,
                    latches=int((half_life > self.block_size).sum()))


def param_groups(model, weight_decay, decay_lr_mult):
    """Optimizer groups, each parameter in exactly one: matrices with weight decay; biases and norms without; the
    quantifiers' decays without, at decay_lr_mult times the learning rate. Each group names its multiplier in 'lr_mult'.
    """
    named = dict(model.named_parameters())
    decays = [p for name, p in named.items() if name.endswith('quantifier.decay')]
    matrices = [p for name, p in named.items() if p.dim() >= 2]
    vectors = [p for name, p in named.items() if p.dim() < 2 and not name.endswith('quantifier.decay')]
    assert len(decays) + len(matrices) + len(vectors) == len(named)
    return [dict(params=matrices, weight_decay=weight_decay, lr_mult=1.0),
            dict(params=vectors, weight_decay=0.0, lr_mult=1.0),
            dict(params=decays, weight_decay=0.0, lr_mult=decay_lr_mult)]


# ---- Llama: the backbone of paper B

class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions, where n_head // n_kv_head queries share a key and a value."""

    def __init__(self, d, n_head, n_kv_head, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(d, n_head * head_dim, bias=False)
        self.k, self.v = (nn.Linear(d, n_kv_head * head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(n_head * head_dim, d, bias=False)

    def forward(self, x_BSD, cos, sin, attend):
        """cos, sin and attend: see Llama.embed."""
        q, k, v = (z.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)                             # [B,h,S,head_dim]
                   for z in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if attend is not None:                   # fused kernels take a mask or grouped heads, not both
            k, v = (z.repeat_interleave(q.size(1) // z.size(1), dim=1) for z in (k, v))
        y_BhSd = F.scaled_dot_product_attention(q, k, v, attn_mask=attend, is_causal=attend is None,
                                                enable_gqa=q.size(1) != k.size(1))
        return self.o(y_BhSd.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """Llama's feed-forward layer (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, d, d_ff):
        super().__init__()
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def forward(self, x_BSD):
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class LlamaLayer(nn.Module):
    def __init__(self, d, d_ff, n_head, n_kv_head, head_dim, norm_eps):
        super().__init__()
        self.norm_attn, self.attn = RMSNorm(d, norm_eps), GroupedAttention(d, n_head, n_kv_head, head_dim)
        self.norm_ffn, self.ffn = RMSNorm(d, norm_eps), SwiGLU(d, d_ff)

    def forward(self, x_BSD, cos, sin, attend):
        x_BSD = x_BSD + self.attn(self.norm_attn(x_BSD), cos, sin, attend)
        return x_BSD + self.ffn(self.norm_ffn(x_BSD))


def rope_frequencies(head_dim, theta, scaling=None, device=None):
    """Radians per token of each pair of a head's channels, [head_dim/2] in fp32 (RoFormer, section 3.2).

    scaling (llama3) stretches a context of original_max_position_embeddings tokens: pairs that turn more than
    high_freq_factor times in it stay, those that turn less than low_freq_factor times are slowed by factor, and in
    between the two are mixed. Its keys: factor and these three.
    """
    frequencies = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling['original_max_position_embeddings'] * frequencies / (2 * math.pi)
    low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling['factor'] + kept * frequencies


def rotate(x, cos, sin):
    """Turns channels i and i + head_dim/2 of each head as a pair (HF's layout; Meta's files pair 2i and 2i+1)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Llama(nn.Module):
    """Llama 3 (arXiv 2407.21783): pre-norm layers of RMSNorm, rotary grouped-query attention and SwiGLU, no biases.

    head_dim defaults to d / n_head. rope_scaling: None or a dict, see rope_frequencies. tied: embedding and output head
    share their weights. head=False builds no output head. ValueError where the heads do not fit.
    """

    def __init__(self, vocab_size, d, d_ff, n_layer, n_head, n_kv_head, head_dim=None, rope_theta=500000.0,
                 rope_scaling=None, norm_eps=1e-5, tied=False, head=True):
        super().__init__()
        if n_head % n_kv_head or not head_dim and d % n_head:
            raise ValueError(f'the number of heads must divide the width, and the number of key-value heads that of '
                             f'heads: got a width of {d}, {n_head} heads and {n_kv_head} key-value heads')
        self.head_dim = head_dim or d // n_head
        if self.head_dim % 2:
            raise ValueError(f'rotary positions turn pairs of channels: head_dim must be even, got {self.head_dim}')
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.tokens = nn.Embedding(vocab_size, d)
        self.layers = nn.ModuleList(
            LlamaLayer(d, d_ff, n_head, n_kv_head, self.head_dim, norm_eps) for _ in range(n_layer))
        self.norm = RMSNorm(d, norm_eps)
        self.head = nn.Linear(d, vocab_size, bias=False) if head else None
        if head and tied:
            self.head.weight = self.tokens.weight
        self.init_weights()

    def init_weights(self):
        """For training from scratch: 1/sqrt(D), which keeps the variance of what passes a matrix, and for each of the
        2 n_layer writes to the residual stream that divided by their number's root."""
        std = self.tokens.embedding_dim ** -0.5
        residual_std = std / math.sqrt(2 * max(1, len(self.layers)))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=residual_std if name.endswith(('.o.weight', '.down.weight')) else std)

    def embed(self, ids_BS, mask_BS=None):
        """Token ids -> h [B,S,D] and the context that every layer takes, (cos, sin, attend).

        mask_BS: 1 or true where a token is real. Positions count real tokens from 0. cos and sin: [B,1,S,head_dim/2],
        [1,1,S,head_dim/2] without a mask, in h's dtype. attend: [B,1,S,S], true where a query may see a key, or None
        where that is plain causality. Padding on the right needs no mask: real tokens do not look there.
        """
        h_BSD = self.tokens(ids_BS)
        S, attend = ids_BS.size(1), None
        position = torch.arange(S, device=ids_BS.device)[None]
        if mask_BS is not None:
            real_BS = mask_BS.bool()
            position = (real_BS.cumsum(1) - 1).clamp(min=0)
            own = torch.eye(S, dtype=torch.bool, device=ids_BS.device)   # padding sees itself: no row without a key
            attend = (own.new_ones(S, S).tril() & real_BS[:, None] | own)[:, None]
        # frequencies are no buffer: casting the model to bf16 would round them
        frequencies = rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling, ids_BS.device)
        angle = position[:, None, :, None].float() * frequencies
        return h_BSD, (angle.cos().to(h_BSD.dtype), angle.sin().to(h_BSD.dtype), attend)

    def forward(self, ids_BS, mask_BS=None):
        """Token ids -> logits [B,S,V]. mask_BS: see embed."""
        h_BSD, context = self.embed(ids_BS, mask_BS)
        for layer in self.layers:
            h_BSD = layer(h_BSD, *context)
        return self.head(self.norm(h_BSD))


# the parts of a tensor's name that differ from ours, in HF's files and in Meta's
PARTS = dict(embed_tokens='tokens', input_layernorm='norm_attn', self_attn='attn', q_proj='q', k_proj='k', v_proj='v',
             o_proj='o', post_attention_layernorm='norm_ffn', mlp='ffn', gate_proj='gate', up_proj='up',
             down_proj='down', lm_head='head',
             tok_embeddings='tokens', attention_norm='norm_attn', attention='attn', wq='q', wk='k', wv='v', wo='o',
             ffn_norm='norm_ffn', feed_forward='ffn', w1='gate', w3='up', w2='down', output='head')


def load_llama(path, dtype=torch.bfloat16, device='cpu', head=False, rope_factor=8.0):
    """The Llama in a folder: HF's (config.json, safetensors in one file or in shards) or Meta's (params.json,
    consolidated.00.pth). Without head the file's output head is left out.

    Each tensor goes from the disk to its place, one at a time, so no second copy is ever held. rope_factor: what Meta's
    params.json does not say where it asks for scaled rotary positions (8 for Llama 3.1, 32 for 3.2). Raises ValueError
    or FileNotFoundError, one line each.
    """
    folder, head_name = Path(path), 'head.weight'
    meta = not (folder / 'config.json').is_file()
    files, settings = meta_files(folder) if meta else hf_files(folder)
    where, shapes = {}, {}                                                     # by our names
    for file in files:
        for name, shape in stored(file).items():
            ours = '.'.join(PARTS.get(part, part) for part in name.removeprefix('model.').split('.'))
            if ours in where:
                raise ValueError(f'{file} holds {name}, and so does {where[ours][0].name}: expected each tensor once')
            if not ours.endswith(('rope.freqs', 'rotary_emb.inv_freq')):       # the config says them exactly
                where[ours], shapes[ours] = (file, name), shape
    try:
        options = meta_options(settings, shapes, rope_factor) if meta else hf_options(settings)
        with torch.device('meta'):
            model = Llama(**options, head=head)
    except KeyError as error:
        raise ValueError(f'{folder} does not say {error}: expected the whole folder of a Llama') from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f'{folder} is no Llama that this model can hold: {error}') from None

    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}          # a tied head is no name
    if head_name not in wanted:
        shapes.pop(head_name, None)
    for name in [*wanted, *shapes]:
        there, here = shapes.get(name, 'absent'), wanted.get(name, 'absent')
        if there != here:
            file, theirs = where.get(name, (folder, name))
            raise ValueError(f'{file} does not fit its configuration: {theirs} is {there}, expected {here}')
    for name in sorted(wanted, key=lambda name: -math.prod(wanted[name])):     # largest first: the last decide the peak
        tensor, module = stored(*where[name]), model.get_submodule(name.removesuffix('.weight'))
        if meta and name.endswith(('.q.weight', '.k.weight')):                 # rows 2i and 2i+1 become i and i + half
            tensor = tensor.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        module.weight = nn.Parameter(tensor.to(device, dtype, copy=True))
    if head and options['tied']:
        model.head.weight = model.tokens.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return model


def stored(file, name=None):
    """{name: shape} of a .safetensors or .pth file, or the tensor of that name, on the CPU: a view of the file, which
    stays mapped as long as the tensor lives."""
    from safetensors import safe_open
    try:
        if file.suffix == '.pth':
            tensors = torch.load(file, map_location='cpu', mmap=True, weights_only=True)
            return tensors[name] if name else {str(name): tuple(tensor.shape) for name, tensor in tensors.items()}
        with safe_open(file, 'pt') as tensors:
            return tensors.get_tensor(name) if name else {
                name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except FileNotFoundError:
        raise FileNotFoundError(f'{file} is missing: expected all files of the model, download it again') from None
    except Exception as error:          # of many kinds; torch's own texts advise to trust the file
        raise ValueError(f'{file} is cut short or damaged ({type(error).__name__}): download it again') from None


def read_json(file):
    """The object in a .json file; null counts as absent."""
    try:
        return {key: value for key, value in json.loads(file.read_text(encoding='utf-8')).items() if value is not None}
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f'no Llama in {file.parent}: expected a folder of HF (config.json and safetensors) or '
                                'of Meta (params.json and consolidated.00.pth)') from None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f'{file} is no JSON object ({type(error).__name__}): download it again') from None


def hf_files(folder):
    """The weight files of an HF folder and its configuration."""
    settings, index = read_json(folder / 'config.json'), folder / 'model.safetensors.index.json'
    if not index.is_file():
        return [folder / 'model.safetensors'], settings
    names = read_json(index).get('weight_map')
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f'{index} is damaged: expected weight_map, from tensors to files; download it again')
    return [folder / name for name in sorted(set(names.values()))], settings


def meta_files(folder):
    """The weight file of Meta's folder and its configuration."""
    settings, files = read_json(folder / 'params.json'), sorted(folder.glob('consolidated.*.pth'))
    if len(files) > 1:
        raise ValueError(f'{folder} holds a model cut in {len(files)} for as many GPUs: expected consolidated.00.pth '
                         'alone; take the HF folder of that model instead')
    return [folder / 'consolidated.00.pth'], settings


def hf_options(config):
    """HF's configuration as options of Llama, in the classic style (rope_theta, rope_scaling) or the newer one
    (rope_parameters). KeyError for what is missing, ValueError for what this Llama cannot do."""
    for key, absent, value in (('model_type', None, 'llama'), ('hidden_act', 'silu', 'silu'),
                               ('attention_bias', False, False), ('mlp_bias', False, False)):
        if config.get(key, absent) != value:
            raise ValueError(f'{key} is {config.get(key)!r}, expected {value!r}')
    rope = {**config, **config.get('rope_scaling', {}), **config.get('rope_parameters', {})}
    kind, scaling = rope.get('rope_type', rope.get('type', 'default')), None
    if kind == 'llama3':
        scaling = {key: float(rope[key]) for key in ('factor', 'low_freq_factor', 'high_freq_factor',
                                                     'original_max_position_embeddings')}
    elif kind != 'default':
        raise ValueError(f'rope_type is {kind!r}, expected llama3 or default')
    return dict(vocab_size=config['vocab_size'], d=config['hidden_size'], d_ff=config['intermediate_size'],
                n_layer=config['num_hidden_layers'], n_head=config['num_attention_heads'],
                n_kv_head=config.get('num_key_value_heads', config['num_attention_heads']),
                head_dim=config.get('head_dim'), rope_theta=float(rope['rope_theta']), rope_scaling=scaling,
                norm_eps=float(config['rms_norm_eps']), tied=config.get('tie_word_embeddings', False))


def meta_options(params, shapes, rope_factor):
    """Meta's params.json as options of Llama. shapes: of the tensors, by our names; they say the FFN's width, which the
    file gives as a rule, the vocabulary, and by the head's absence that it is tied. KeyError for what is missing."""
    scaling = dict(factor=rope_factor, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    return dict(vocab_size=shapes['tokens.weight'][0], d=params['dim'], d_ff=shapes['layers.0.ffn.gate.weight'][0],
                n_layer=params['n_layers'], n_head=params['n_heads'],
                n_kv_head=params.get('n_kv_heads', params['n_heads']), rope_theta=float(params['rope_theta']),
                rope_scaling=scaling if params.get('use_scaled_rope') else None, norm_eps=float(params['norm_eps']),
                tied='head.weight' not in shapes)


# ---- paper B: the logic stream beside Llama, and the classifier

# Classifier's choices by name
CHOICES = dict(branch=('none', 'nogate', 'routed'), axis=('inter', 'intra', 'quant'), gate_mode=('soft', 'ste'),
               control=('paper', 'matched'), residual=('state', 'attended'), logic_dtype=('same', 'float32'))

# what a model of the comparison changes in Classifier's defaults, which are inter8
VARIANTS = dict(
    # the paper's eight
    baseline=dict(branch='none'),
    nogate=dict(branch='nogate', cross_attn=False),
    intra8=dict(axis='intra'),
    inter8=dict(),
    inter8_alpha01=dict(alpha=0.1),
    inter8_learned=dict(learn_alpha=True),
    inter16=dict(gates=16),
    inter8_noxattn=dict(cross_attn=False),
    # ours
    matched=dict(branch='nogate', cross_attn=False, control='matched'),    # inter8_noxattn but for what is in the layer
    nogate_xattn=dict(branch='nogate'),               # the cell the paper did not run: its control with cross-attention
    scaled=dict(route_scale=True),
    ste=dict(route_scale=True, gate_mode='ste'),      # scaled with hard gates, which fire or do not
    quant=dict(axis='quant'),                         # both papers: a gate reads all earlier tokens, fading, not one
    inter8_fp32=dict(logic_dtype='float32'),          # inter8 itself where the backbone is in fp32
)


class CrossAttention(nn.Module):
    """The logic state attends to the backbone's hidden states (paper B, eq 5): padding is no key. Not causal, and need
    not be: nothing is generated, the one prediction comes after the last token, so none is ahead of what it may see.
    """

    def __init__(self, d_logic, d, n_head=4):
        super().__init__()
        if d_logic % n_head:
            raise ValueError(f'd_logic must be divisible by n_head_logic, got {d_logic} and {n_head}')
        self.n_head = n_head
        self.norm = RMSNorm(d_logic)
        self.q, self.k, self.v = nn.Linear(d_logic, d_logic), nn.Linear(d, d_logic), nn.Linear(d, d_logic)
        self.out = nn.Linear(d_logic, d_logic)

    def forward(self, state_BSL, h_BSD, mask_BS):
        """L_{t-1} [B,S,L] and H_t [B,S,D] -> the attended state [B,S,L]. mask_BS: true where a token is real."""
        q, k, v = (z.unflatten(-1, (self.n_head, -1)).transpose(1, 2)                               # [B,h,S,L/h]
                   for z in (self.q(self.norm(state_BSL)), self.k(h_BSD), self.v(h_BSD)))
        y_BhSl = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BS[:, None, None])
        return state_BSL + self.out(y_BhSl.transpose(1, 2).flatten(-2))


class NoGateLayer(nn.Module):
    """An MLP in LogicLayer's place: the control without routing and gates.

    control 'paper': two hidden layers of 29 units at L = 256, 78% of the routed layer's parameters (the paper gives no
    rule; elsewhere the width goes with L). 'matched': one hidden layer, of the width that comes closest to the routed
    layer's parameters.
    """

    def __init__(self, d_logic=256, n_gates=8, window=2, control='paper', residual='attended'):
        super().__init__()
        self.residual = residual
        if control == 'paper':
            n = max(1, round(29 * d_logic / 256))
            sizes = (d_logic, n, n, d_logic)
        else:      # both have 3L in norms and last bias; then the MLP (2L+1) n, the routed layer 6G (L+1) + G (C+2) L
            n = round(n_gates * (6 * (d_logic + 1) + (window + 2) * d_logic) / (2 * d_logic + 1))
            sizes = (d_logic, n, d_logic)
        linears = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
        self.mlp = nn.Sequential(*(module for linear in linears for module in (linear, nn.GELU())))[:-1]
        self.norm = nn.LayerNorm(d_logic)

    def forward(self, attended_BSL, state_BSL, mask_BS):
        """As LogicLayer.forward, without statistics."""
        base_BSL = state_BSL if self.residual == 'state' else attended_BSL
        return self.norm(base_BSL + self.mlp(attended_BSL)), {}


class LogicStream(nn.Module):
    """States L_t [B,S,L] beside the backbone's layers (paper B, eqs 2 to 17), one step a layer.

    layer(): builds what follows the attention, a LogicLayer or a NoGateLayer. unused=True builds the cross-attention
    without ever calling it, as the paper's control does, for counting.
    """

    def __init__(self, d, n_layer, layer, cross_attn=True, d_logic=256, n_head=4, unused=False):
        super().__init__()
        self.project = nn.Linear(d, d_logic)                                   # one for all layers
        self.layers = nn.ModuleList(layer() for _ in range(n_layer))
        attentions = [CrossAttention(d_logic, d, n_head) for _ in range(n_layer if cross_attn or unused else 0)]
        self.attentions = nn.ModuleList(attentions if cross_attn else [])
        self.unused = nn.ModuleList([] if cross_attn else attentions)

    def step(self, t, state_BSL, h_BSD, mask_BS):
        """L_{t-1} (None before the first layer) and layer t's output H_t [B,S,D] -> (L_t, the layer's stats).

        L_0 is W H_1 with the projection W, so that without cross-attention the first step reads 2 W H_1.
        """
        h_BSD = h_BSD.to(self.project.weight.dtype)
        if state_BSL is None:
            state_BSL = self.project(h_BSD)                                    # L_0
        if self.attentions:
            attended_BSL = self.attentions[t](state_BSL, h_BSD, mask_BS)       # eqs 3, 5
        else:
            attended_BSL = self.project(h_BSD) + state_BSL
        return self.layers[t](attended_BSL, state_BSL, mask_BS)


class Fusion(nn.Module):
    """H_last + alpha W_f L_last (paper B, eq 4), alpha of shape (1,), a buffer unless learned.

    mlp=True, the paper's control: in W_f's place an MLP of 2L hidden units that sees H_last as well.
    """

    def __init__(self, d, d_logic=256, alpha=0.01, learn_alpha=False, mlp=False):
        super().__init__()
        self.mlp = mlp
        if mlp:
            self.write = nn.Sequential(nn.Linear(d + d_logic, 2 * d_logic), nn.GELU(), nn.Linear(2 * d_logic, d))
        else:
            self.write = nn.Linear(d_logic, d)
        alpha = torch.full((1,), float(alpha))
        if learn_alpha:
            self.alpha = nn.Parameter(alpha)
        else:
            self.register_buffer('alpha', alpha)

    def forward(self, h_BD, state_BL):
        return h_BD + self.alpha * self.write(torch.cat([h_BD, state_BL], dim=-1) if self.mlp else state_BL)


class Classifier(nn.Module):
    """Paper B's model: Llama (built without its output head), a logic stream beside it and a head of three labels.

    branch 'none' is a linear head on the last token; 'nogate' and 'routed' add stream, fusion and an RMSNorm before the
    head. control='paper' gives nogate the paper's control (see NoGateLayer and Fusion); 'matched' one that has routed's
    fusion and parameters. cross_attn=False: the stream reads a projection of H_t instead. axis to route_scale: see
    LogicLayer. logic_dtype='float32' keeps all modules but the backbone in fp32; 'same' gives them its dtype, but for
    the quantifiers' rates, which bf16 would freeze. unused: see LogicStream. checkpointing recomputes each layer and
    each logic step in the backward pass. All modules but the backbone start as torch initialises them. ValueError for
    an unknown choice.
    """

    def __init__(self, llama, branch='routed', axis='inter', gates=8, window=2, tau=1.0, cross_attn=True,
                 alpha=0.01, learn_alpha=False, gate_mode='soft', control='paper', residual='attended',
                 route_scale=False, logic_dtype='same', d_logic=256, n_head_logic=4, unused=False,
                 checkpointing=False):
        super().__init__()
        given = locals()
        for key, choices in CHOICES.items():
            if given[key] not in choices:
                raise ValueError(f'unknown {key} {given[key]!r}: expected one of {", ".join(choices)}')
        if min(gates, window, tau) <= 0:
            raise ValueError(f'gates, window and tau must be positive, got {gates}, {window} and {tau}')
        self.llama, self.checkpointing = llama, checkpointing
        self.stream = self.fusion = self.norm = None
        d, embedding = llama.tokens.embedding_dim, llama.tokens.weight
        if branch != 'none':
            def layer():
                if branch == 'routed':
                    return LogicLayer(d_logic, gates, window, axis, tau, gate_mode, residual, route_scale)
                return NoGateLayer(d_logic, gates, window, control, residual)

            mlp = branch == 'nogate' and control == 'paper'
            self.stream = LogicStream(d, len(llama.layers), layer, cross_attn, d_logic, n_head_logic, unused and mlp)
            self.fusion = Fusion(d, d_logic, alpha, learn_alpha, mlp)
            self.norm = RMSNorm(d)
        self.head = nn.Linear(d, 3)
        for module in self.children():
            if module is not llama:
                module.to(embedding.device, torch.float32 if logic_dtype == 'float32' else embedding.dtype)
        for name, p in self.named_parameters():
            if name.endswith('.decay'):                  # starts at 4.6, where bf16 is spaced by 0.03
                p.data = p.data.float()

    def forward(self, ids_BS, mask_BS, labels_B=None):
        """Token ids and a mask, true or 1 where a token is real -> (logits [B,3] in fp32, stats); with labels
        -> (mean cross-entropy in nats, stats). Padding may be on either side; each row needs a real token.

        stats, detached, over real tokens: entropy and fired (means over layers) and routing [n_layer,3G] if routed (see
        LogicLayer), alpha [0-d] unless the branch is none.
        """
        mask_BS = mask_BS.bool()
        h_BSD, context = self.llama.embed(ids_BS, mask_BS)
        state_BSL, layer_stats = None, []

        def run(function, *inputs):
            if not self.checkpointing:
                return function(*inputs)
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)    # nothing is random

        for t, layer in enumerate(self.llama.layers):
            h_BSD = run(layer, h_BSD, *context)
            if self.stream is not None:                 # apart: else the layer's last product would be computed again
                state_BSL, stats = run(self.stream.step, t, state_BSL, h_BSD, mask_BS)
                layer_stats.append(stats)
        # final norm, fusion and head treat each token by itself, so only the last real one goes through them
        rows = torch.arange(len(ids_BS), device=ids_BS.device)
        last_B = (mask_BS * torch.arange(ids_BS.size(1), device=ids_BS.device)).argmax(1)
        x_BD = self.llama.norm(h_BSD[rows, last_B])                                                 # H_last
        stats = {}
        if self.stream is not None:
            x_BD = self.norm(self.fusion(x_BD, state_BSL[rows, last_B]))                            # eq 4
            stats['alpha'] = self.fusion.alpha.detach().float().mean()
            if layer_stats[0]:
                stats |= {key: torch.stack([row[key] for row in layer_stats]) for key in layer_stats[0]}
                stats |= {key: stats[key].mean() for key in ('entropy', 'fired')}
        logits_BN = self.head(x_BD.to(self.head.weight.dtype)).float()
        return (logits_BN if labels_B is None else F.cross_entropy(logits_BN, labels_B)), stats

    def num_params(self):
        """(trainable, used in forward): the paper's control builds cross-attention that it never calls."""
        trainable = sum(p.numel() for p in self.parameters())
        unused = sum(p.numel() for p in self.stream.unused.parameters()) if self.stream else 0
        return trainable, trainable - unused
