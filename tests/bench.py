"""What the scans and the FFN kinds cost, in time and memory. A benchmark: pytest does not collect it.

    python tests/bench.py --scan      the parallel scans against a loop over the tokens     results/bench_scan.json
    python tests/bench.py --lm        training steps of nc, without and with quantifiers, against gelu
    results/bench_lm.json

On CUDA the models and the scans are compiled, the models trained in bf16. What is compared is interleaved in one
process, a round of each after the other, so that a slower minute slows all of them. Ratios are medians over the rounds.
Prints a table and, as the last line, the numbers as JSON.
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch.profiler import ProfilerActivity, profile

from model import GPT, param_groups
from quantifier import decayed_max, decayed_mean
from runtime import configure, fail, launch, precision, result
from train_lm import PRESETS, peak_flops

DEFAULTS = dict(
    scan=False,           # the quantifiers' scans against a loop over the tokens
    lm=False,             # training steps of the language model
    repeats=0,            # rounds of each measurement; 0: 15 for the scans, 20 for the tiny shape, 5 for GPT-2 small
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
    for i in range(repeats + 1):
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


BENCHES = {'scan': bench_scan, 'lm': bench_lm}


if __name__ == '__main__':
    config = configure(__file__, DEFAULTS)
    chosen = [name for name in BENCHES if config[name]]
    if not chosen:
        fail(f'nothing to measure: give one or more of {", ".join("--" + name for name in BENCHES)}')
    device, results = launch(config['device']).device, {}
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in chosen:
        results[name] = dict(machine=machine(device), **BENCHES[name](device, config['repeats']))
        path = ROOT / 'results' / f'bench_{name}.json'
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results[name], indent=1) + '\n')
    result(**results)
