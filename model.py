"""The models. Paper A: a GPT (GPT-2's architecture) whose feed-forward layers may compute explicit fuzzy logic.

    FFN        gelu, relu, four gated kinds and nc, with or without quantifiers; all with the GELU layer's parameters
    GPT        token and position embeddings, n_layer blocks of attention and FFN (pre-norm), tied head

Axes: B batch, T sequence, D model width, F hidden units of an FFN, V vocabulary, h heads.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from logic import and_not
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
        # gelu, and, and_not, then all quantifiers; one split, whose gradient is one concatenation
        n_gelu, n_pairs = self.units['gelu'].stop, self.units['and'].stop - self.units['and'].start
        gelu, a, b, q = pre_BTF.split([n_gelu, n_pairs, n_pairs, pre_BTF.size(-1) - n_gelu - 2 * n_pairs], dim=-1)
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
        pre_BTF = self.up(x_BTD)
        rest = slice(self.units['and_not'].stop, None)
        return {'a': pre_BTF[..., self.units['and']].sigmoid(), 'b': pre_BTF[..., self.units['and_not']].sigmoid(),
                'q': pre_BTF[..., rest].sigmoid()}

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
