"""What the scans, the FFN kinds and the logic stream cost, in time and memory. A benchmark: pytest does not collect it.

    python tests/bench.py --scan      the parallel scans against a loop over the tokens
    python tests/bench.py --lm        training steps of nc, without and with quantifiers, against gelu
    python tests/bench.py --cls       forward and backward of each variant of the classifier against baseline, at the
                                      shape of the layers of Llama 3.1 8B and 3.2 1B
    python tests/bench.py --parity    64 models of the parity probe as one against one by one

Each prints a table and writes results/bench_NAME.json; the last line is the same as JSON. On CUDA GPT and the scans are
compiled, the models trained in bf16. What is compared is interleaved in one process, a round of each after the other,
so that a slower minute slows all of them. Ratios are medians over the rounds.
"""

import os
import platform
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import parity
import train_cls
from model import GPT, VARIANTS, Classifier, Llama, param_groups
from quantifier import decayed_max, decayed_mean
from runtime import check_results, configure, fail, launch, precision, result, write_json
from train_lm import PRESETS, peak_flops

DEFAULTS = dict(
    scan=False,           # the quantifiers' scans against a loop over the tokens
    lm=False,             # training steps of the language model
    cls=False,            # forward and backward of the classifier
    layers=1,             # of the classifier's backbone
    parity=False,         # many small models as one
    repeats=0,            # rounds; 0: 15 for the scans, 20 for the tiny GPT, 5 for GPT-2 small, 15 for the classifier
                          # on CUDA and 3 elsewhere, 3 for parity
    device='auto',        # cpu, cuda or mps; auto takes what is there
)


# ---- measuring

def seconds(function, device):
    if device.type == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rounds(functions, repeats, device):
    """dict of functions -> dict of their times, one a round. A first round, which compiles and warms up, is not
    counted."""
    times = {name: [] for name in functions}
    for i in tqdm(range(repeats + 1), unit='round', dynamic_ncols=True):
        for name, function in functions.items():
            took = seconds(function, device)
            if i:
                times[name].append(took)
    return times


def ratio(times, others):
    """Median over the rounds of times / others: both of a round met the same conditions."""
    return statistics.median(a / b for a, b in zip(times, others))


def peak_memory(function, device):
    """Bytes that function holds beyond those held before it, at its worst moment.

    On the CPU every allocation and release that torch's allocator reports to the profiler, summed in the order of time:
    inner buffers of operators count as well. On CUDA the allocator's own high-water mark.
    """
    if device.type == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device):
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.machine()
    return dict(device=f'{device.type} ({name})', cpus=os.cpu_count(), threads=torch.get_num_threads(),
                torch=torch.__version__)


def table(rows):
    """A list of dicts with the same keys, printed as columns."""
    shown = lambda value: f'{value:.4g}' if isinstance(value, float) else '-' if value is None else str(value)
    cells = [list(rows[0])] + [[shown(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print('  '.join(cell.rjust(width) for cell, width in zip(row, widths)))


# ---- the scans

def loop_max(m_BTC, gamma_C):
    states = [None] * m_BTC.size(1)
    for t, m_BC in enumerate(m_BTC.unbind(1)):
        states[t] = torch.maximum(m_BC, states[t - 1] * gamma_C) if t else m_BC
    return torch.stack(states, dim=1)


def loop_sum(m_BTC, lam_C):
    states = [None] * m_BTC.size(1)
    for t, m_BC in enumerate(m_BTC.unbind(1)):
        states[t] = torch.addcmul(m_BC, states[t - 1], lam_C) if t else m_BC
    return torch.stack(states, dim=1)


def loop_corrected(m_BTC, lam_C):
    return loop_sum(m_BTC, lam_C) / loop_sum(torch.ones_like(m_BTC[:1]), lam_C)


def loop_printed(m_BTC, lam_C):
    return (1 - lam_C) * loop_sum(m_BTC, lam_C)


def printed(m_BTC, lam_C):
    return decayed_mean(m_BTC, lam_C, corrected=False)


SCANS = {'decayed_max': (decayed_max, loop_max), 'decayed_mean corrected': (decayed_mean, loop_corrected),
         'decayed_mean printed': (printed, loop_printed)}


def bench_scan(device, repeats, B=8, T=1024, C=384):
    """Forward and backward of each quantifier at the size of a GPT-2 small layer. `memory` is the peak beyond what was
    there before, in sizes of the input; it includes the result and the input's gradient, one each. `bandwidth` is the
    share of the speed of a plain copy at which the bytes that no algorithm can avoid went by: the forward reads m and
    writes the state, the backward reads the gradient and the state and writes dm; the maximum reads m once more.
    """
    m_BTC = torch.rand(B, T, C, device=device, requires_grad=True)
    rate_C = torch.full((C,), 0.99, device=device, requires_grad=True)
    g_BTC = torch.randn(B, T, C, device=device)
    size = m_BTC.numel() * m_BTC.element_size()
    block = torch.empty(2 ** 26, device=device)                # 256 MiB, beyond any cache
    copied = rounds({'copy': lambda: block.clone()}, 5, device)['copy']
    copy_speed = 2 * block.numel() * block.element_size() / min(copied)
    check = peak_memory(lambda: m_BTC.detach().clone(), device) / size
    assert abs(check - 1) < 0.01, f'a copy of the input should take its size once, measured {check:.3f} times'

    def step(function):
        def forward_and_backward():
            m_BTC.grad = rate_C.grad = None
            function(m_BTC, rate_C).backward(g_BTC)
        return forward_and_backward

    rows = []
    for name, (scan, loop) in SCANS.items():
        fast = torch.compile(scan, fullgraph=True) if device.type == 'cuda' else scan
        times = rounds({'scan': step(fast), 'loop': step(loop)}, repeats or 15, device)
        m_BTC.grad = rate_C.grad = None
        must_move = (6 if scan is decayed_max else 5) * size
        rows.append({'quantifier': name, 'scan_ms': 1e3 * statistics.median(times['scan']),
                     'loop_ms': 1e3 * statistics.median(times['loop']), 'speedup': ratio(times['loop'], times['scan']),
                     'memory': peak_memory(step(fast), device) / size,
                     'bandwidth': must_move / statistics.median(times['scan']) / copy_speed})
    print(f'forward and backward, B={B} T={T} C={C}, fp32; copy bandwidth {copy_speed / 1e9:.3g} GB/s')
    table(rows)
    return dict(shape=[B, T, C], copy_gb_per_s=copy_speed / 1e9, scans=rows)


# ---- the language model

FFNS = {'gelu': dict(ffn='gelu'), 'nc': dict(ffn='nc'), 'nc quant': dict(ffn='nc', quant=True)}
TINY = dict(vocab_size=128, **{key: PRESETS['tiny'][key] for key in ('block_size', 'n_layer', 'n_head', 'n_embd')})
SMALL = dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)


def training_step(shape, options, batch, T, device):
    """A function that trains a new model for one step: forward, backward, AdamW. And the model."""
    torch.manual_seed(0)
    model = GPT(**shape, **options).to(device)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1, 1.0), lr=1e-4, fused=True)
    compiled = torch.compile(model) if device.type == 'cuda' else model
    ids_BT = torch.randint(shape['vocab_size'], (batch, T + 1), device=device)

    def step():
        with precision(device, 'bfloat16' if device.type == 'cuda' else 'float32'):
            loss = compiled(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, model


def bench_lm(device, repeats):
    """Training steps, tiny and GPT-2 small; on a CPU the latter with one sequence of 256 tokens. MFU where the GPU's
    peak is known."""
    on_gpu = device.type == 'cuda'
    peak, rows = peak_flops(device), []
    small = (16, 1024) if on_gpu else (1, 256)
    for shape_name, shape, batch, T, default in (('tiny', TINY, 32, 64, 20), ('gpt2-small', SMALL, *small, 5)):
        steps, models = {}, {}
        for name, options in FFNS.items():
            steps[name], models[name] = training_step(shape, options, batch, T, device)
        times = rounds(steps, repeats or default, device)
        for name in FFNS:
            median = statistics.median(times[name])
            flops = models[name].flops_per_token() * batch * T / median
            rows.append({'shape': shape_name, 'ffn': name, 'batch': batch, 'tokens': T, 'step_ms': 1e3 * median,
                         'to_gelu': ratio(times[name], times['gelu']), 'tokens_per_second': batch * T / median,
                         'mfu': flops / peak if peak else None})
    print('training steps: forward, backward, AdamW; ' + ('bf16, compiled' if on_gpu else 'fp32'))
    table(rows)
    return dict(steps=rows)


# ---- the classifier

BACKBONES = {'8B': dict(d=4096, d_ff=14336, n_head=32, n_kv_head=8),
             '1B': dict(d=2048, d_ff=8192, n_head=32, n_kv_head=8)}


def classifier_steps(shape, layers, batch, T, dtype, device, vocab_size=1024):
    """{variant: (a function that computes the gradients of a step, its parameters)}, as train_cls.py does, with
    checkpointing.

    All share one backbone, so that memory holds them together. The vocabulary is small, because the embedding is no
    layer. The optimizer is left out: its time goes with the parameters, and on one layer it would hide the rest.
    """
    torch.manual_seed(0)
    llama = Llama(vocab_size, n_layer=layers, head=False, **shape).to(device, dtype)
    settings = {key: train_cls.DEFAULTS[key] for key in (*train_cls.LOGIC_KEYS, 'checkpointing')}
    config, run = dict(train_cls.DEFAULTS, micro_batch=batch), SimpleNamespace(rank=0, world=1, device=device)
    examples = [dict(ids=torch.randint(vocab_size, (T,)).tolist(), label=i % 3) for i in range(batch)]

    def stepper(model):
        def step():
            train_cls.gradients(model, model, examples, 0, config, run)
            model.zero_grad(set_to_none=True)
        return step, model.num_params()[1]
    # two are inter8 to the machine: one with another alpha and, in fp32, the one with fp32 modules
    same = {'inter8_alpha01', 'inter8_fp32' if dtype == torch.float32 else ''}
    return {name: stepper(Classifier(llama, **settings | row)) for name, row in VARIANTS.items() if name not in same}


def flops(function):
    """Operations of the matrix products in function."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def bench_cls(device, repeats, layers):
    """Gradients of each variant on the paper's batch, 30 x 250 tokens in bf16; on a CPU 1 x 64 in fp32.

    `flops_to_baseline` is what the matrix products alone should cost; one layer has a stream's first projection to
    itself, the whole model shares it between its layers. inter8_learned costs what inter8 does: how far it is from it
    is the error. `memory_mb`: what a step holds beyond weights and the optimizer's state, which are three times the
    weights; `all_memory_to_baseline` counts these too.
    """
    on_gpu, rows = device.type == 'cuda', []
    (batch, T), dtype = ((30, 250), torch.bfloat16) if on_gpu else ((1, 64), torch.float32)
    for shape_name, shape in BACKBONES.items():
        steps = classifier_steps(shape, layers, batch, T, dtype, device)
        operations, memory = {}, {}
        for name, (step, _) in tqdm(steps.items(), unit='variant', dynamic_ncols=True):
            operations[name], memory[name] = flops(step), peak_memory(step, device)
        times = rounds({name: step for name, (step, _) in steps.items()}, repeats or (15 if on_gpu else 3), device)
        whole = {name: memory[name] + 3 * dtype.itemsize * used for name, (_, used) in steps.items()}
        for name in steps:
            rows.append({'shape': shape_name, 'layers': layers, 'variant': name, 'batch': batch, 'tokens': T,
                         'step_ms': 1e3 * statistics.median(times[name]),
                         'to_baseline': ratio(times[name], times['baseline']),
                         'flops_to_baseline': operations[name] / operations['baseline'],
                         'memory_mb': memory[name] / 2 ** 20,
                         'all_memory_to_baseline': whole[name] / whole['baseline']})
    print(f'forward and backward with checkpointing; {str(dtype).removeprefix("torch.")}')
    table(rows)
    return dict(steps=rows)


# ---- the parity probe

def train_alone(config, seed, device):
    """What parity.train does to one of its models, written for one: the step at which it is right on all inputs, or -1.
    """
    torch.manual_seed(config['seed'] + seed)
    stack = parity.Stack(config, config['n']).to(device)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=config['lr'], weight_decay=config['weight_decay'])
    bits = parity.all_inputs(config['n']).to(device)
    odd, solved_at = parity.parity(bits), -1
    for step in range(config['steps'] + 1):
        if step % config['check_every'] == 0 or step == config['steps']:
            with torch.no_grad():
                if solved_at < 0 and ((stack(bits)[:, 0] > 0) == (odd > 0)).all():
                    solved_at = step
        if step < config['steps']:
            F.binary_cross_entropy_with_logits(stack(bits)[:, 0], odd).backward()
            optimizer.step()
            optimizer.zero_grad()
    return solved_at


def bench_parity(device, repeats, steps=200, n_seeds=64):
    """Training 64 models of one layer on all inputs of 6 bits, d_model and width 32: stacked against one by one.
    `_solved`: how many of either have learned it, to see that both train the same."""
    rows = []
    for ffn in parity.DEFAULTS['kinds'].split(','):
        config = parity.DEFAULTS | dict(n=6, ffn=ffn, depth=1, width=32, d_model=32, lr=0.01, steps=steps,
                                        n_seeds=n_seeds)
        solved_at = {}

        def batched():                                     # wanted: more than there are, so to the last step
            solved_at['batched'] = parity.train(config, [{}], n_seeds + 1, device)[0].tolist()

        def one_by_one():
            solved_at['one_by_one'] = [train_alone(config, seed, device) for seed in range(n_seeds)]

        times = rounds({'batched': batched, 'one_by_one': one_by_one}, repeats or 3, device)
        rows.append({'ffn': ffn, **{f'{name}_s': statistics.median(times[name]) for name in times},
                     'speedup': ratio(times['one_by_one'], times['batched']),
                     **{f'{name}_solved': sum(step >= 0 for step in solved_at[name]) for name in times}})
    print(f'{n_seeds} models, N=6, depth 1, width 32, {steps} steps on all 64 inputs; fp32')
    table(rows)
    return dict(n_seeds=n_seeds, steps=steps, kinds=rows)


BENCHES = {'scan': bench_scan, 'lm': bench_lm, 'cls': bench_cls, 'parity': bench_parity}


def main():
    config = configure(__file__, DEFAULTS)
    chosen = [name for name in BENCHES if config[name]]
    if not chosen:
        fail(f'nothing to measure: give one or more of {", ".join("--" + name for name in BENCHES)}')
    check_results()
    device, results = launch(config['device']).device, {}
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in chosen:
        more = (config['layers'],) if name == 'cls' else ()
        results[name] = dict(machine=machine(device), **BENCHES[name](device, config['repeats'], *more))
        write_json(Path('results', f'bench_{name}.json'), results[name])
    result(**results)


if __name__ == '__main__':
    main()
