"""Times our attention kernels next to PyTorch's scaled_dot_product_attention (cuDNN and FLASH), interleaved in one
process, and checks them against each other.

usage: torch-attention.py LIBRARY [NAME=LIBRARY ...] [--rounds N] [--only TEXT] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md), of which several builds may take turns. Every row of the JSON holds
the median and the spread over the rounds, and the clock and power while that kernel ran.
"""
import argparse
import ctypes
import json
import statistics
import time

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import Sampler, captured, current_stream, integers_of, libraries_of, machine_of, pointers_of, time_once

QUERY_HEADS, KV_HEADS, BLOCK_TOKENS = 32, 8, 64
BACKENDS = {'sdpa-cudnn': SDPBackend.CUDNN_ATTENTION, 'sdpa-flash': SDPBackend.FLASH_ATTENTION}


class Problem:
    # `run_blocks`: so many blocks of a head lie one behind the other; the runs are in random order.
    def __init__(self, decode, batch, keys, head_dim, dtype, causal, run_blocks=1):
        self.decode, self.batch, self.keys, self.head_dim, self.causal = decode, batch, keys, head_dim, causal
        self.dtype = dtype
        self.queries = 1 if decode else keys
        random = lambda heads, tokens: torch.randn(batch, heads, tokens, head_dim, device='cuda', dtype=dtype)
        self.query, self.key, self.value = random(QUERY_HEADS, self.queries), random(KV_HEADS, keys), random(KV_HEADS, keys)
        blocks = batch * KV_HEADS * keys // BLOCK_TOKENS
        runs = torch.randperm(blocks // run_blocks, device='cuda') * run_blocks
        table = (runs[:, None] + torch.arange(run_blocks, device='cuda')).flatten()
        paged = lambda tensor: torch.empty_like(tensor).view(blocks, BLOCK_TOKENS, head_dim).index_copy_(
            0, table, tensor.view(blocks, BLOCK_TOKENS, head_dim))
        int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        rows = batch * self.queries
        self.packed_query = self.query.transpose(1, 2).contiguous().view(rows, QUERY_HEADS, head_dim)
        self.output = torch.full_like(self.packed_query, float('nan'))
        self.tensors = [self.packed_query, self.output, None, paged(self.key), paged(self.value), table.to(torch.int32),
                        int32([keys] * batch * KV_HEADS), int32(list(range(batch))),
                        int32([entry * self.queries for entry in range(batch + 1)])]
        workspace, counters = (torch.zeros(size << 20, device='cuda', dtype=torch.uint8) for size in (64, 1))
        self.tensors += [workspace, counters]
        self.sizes = integers_of([decode, rows, batch, QUERY_HEADS, KV_HEADS, head_dim, BLOCK_TOKENS,
                                  keys // BLOCK_TOKENS, causal, dtype == torch.bfloat16, blocks])

    def ours(self, library):
        status = library.kv_attention(self.sizes, pointers_of(self.tensors), ctypes.c_float(self.head_dim ** -0.5), current_stream())
        assert status == 0

    def torch(self, backend):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(self.query, self.key, self.value,
                                                           is_causal=self.causal and not self.decode, enable_gqa=True)

    def flops(self):
        return 4 * self.queries * self.keys * self.head_dim * QUERY_HEADS * self.batch / (
            2 if self.causal and not self.decode else 1)

    def bytes(self):
        return (2 * self.key.numel() + 2 * self.query.numel()) * 2


def measure(problem, label, libraries, rounds, sampler):
    functions = {name: (lambda library=library: problem.ours(library)) for name, library in libraries.items()}
    functions.update({name: (lambda backend=backend: problem.torch(backend)) for name, backend in BACKENDS.items()})
    reference = problem.torch(SDPBackend.CUDNN_ATTENTION).transpose(1, 2).reshape(problem.output.shape).float()
    errors = {}
    for name in libraries:
        problem.output.fill_(float('nan'))
        functions[name]()
        difference = (problem.output.float() - reference).norm() / reference.norm()
        errors[name] = difference.item()
    del reference
    times = {name: [] for name in functions}
    spans = {name: [] for name in functions}
    repeats = max(1, min(20, int(20 / time_once(functions[next(iter(functions))], 1))))
    calls = 1
    if problem.decode:
        functions = {name: captured(function, repeats) for name, function in functions.items()}
        calls, repeats = repeats, 1
    for round_number in range(rounds):
        order = list(functions.items())
        shift = round_number % len(order)
        for name, function in order[shift:] + order[:shift]:
            begun = time.time()
            times[name].append(time_once(function, repeats) / calls)
            spans[name].append((begun, time.time()))
    rows = []
    for name, values in times.items():
        seconds = statistics.median(values) / 1e3
        readings = [sampler.between(*span) for span in spans[name]]
        seen = [reading for reading in readings if reading[0] is not None]
        clock, watts = (statistics.median(r[index] for r in seen) if seen else None for index in (0, 1))
        row = dict(operation='decode-attention' if problem.decode else 'prefill-attention', case=label, kernel=name,
                   batch=problem.batch, keys=problem.keys, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS,
                   headDim=problem.head_dim, dtype=str(problem.dtype)[6:], causal=problem.causal,
                   milliseconds=round(seconds * 1e3, 4), fastest=round(min(values), 4), slowest=round(max(values), 4),
                   rounds=rounds, repeats=repeats * calls, teraflops=round(problem.flops() / seconds / 1e12, 1),
                   gigabytesPerSecond=round(problem.bytes() / seconds / 1e9, 1), clockMegahertz=clock,
                   watts=watts, relativeError=errors.get(name))
        rows.append(row)
        print(f"{label:38s} {name:12s} {row['milliseconds']:9.4f} ms [{row['fastest']:.4f}..{row['slowest']:.4f}] "
              f"{row['teraflops']:7.1f} TFLOP/s {row['gigabytesPerSecond']:7.1f} GB/s {row['clockMegahertz']} MHz "
              f"{row['watts']} W error {row['relativeError']}", flush=True)
    return rows


TARGETS = {
    'prefill 8x32768': {'ratio': 1}, 'prefill 1x131072': {'atMost': 240},
    'decode 8x32768': {'atMost': 0.241}, 'decode 1x131072': {'atMost': 0.125}, 'decode 8x32768 d64': {'atMost': 0.122},
    'decode 1x32768': {'ratio': 1}, 'decode 8x4096': {'ratio': 1}, 'decode 8x32768 bf16': {'ratio': 1},
    'decode 8x32768, blocks of prompts': {'ratio': 1}, 'decode 1x131072, blocks of prompts': {'ratio': 1},
    'decode 8x4096, blocks of prompts': {'ratio': 1}, 'decode 8x32768 bf16, blocks of prompts': {'ratio': 1},
    'decode 8x32768 d64, blocks of prompts': {'ratio': 1},
}


def comparisons(rows, machine, date):
    """Rows as docs/benchmarks/ keeps them (tools/bench/README.md): the kernel named kv against the faster SDPA."""
    summary = lambda row: dict(median=row['milliseconds'], low=row['fastest'], high=row['slowest'], samples=row['rounds'])
    shapes = ('batch', 'keys', 'queryHeads', 'kvHeads', 'headDim', 'dtype', 'causal')
    kept = []
    for case in dict.fromkeys(row['case'] for row in rows):
        ours, *others = sorted((row for row in rows if row['case'] == case), key=lambda row: row['kernel'] != 'kv')
        best = min(others, key=lambda row: row['milliseconds'])
        row = dict(measure=case, shapes={name: ours[name] for name in shapes}, device='cuda',
                   kind='measured', unit='ms', better='lower', result=summary(ours),
                   reference=dict(name=f"PyTorch {best['kernel']}", **summary(best)), date=date, machine=machine)
        row.update({name: ours[name] for name in ('teraflops', 'gigabytesPerSecond', 'clockMegahertz', 'watts',
                                                  'relativeError')})
        kept.append(row | ({'target': TARGETS[case]} if case in TARGETS else {}))
    return {'title': 'Attention on the GPU against PyTorch', 'rows': kept}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--only', default='')
    parser.add_argument('--json')
    options = parser.parse_args()
    libraries = libraries_of(options.libraries)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    half, bfloat = torch.float16, torch.bfloat16
    prompt = 512 // BLOCK_TOKENS  # a runner reads a prompt 512 tokens at a time, and gives each head blocks that follow each other
    cases = {
        'prefill 8x4096': (False, 8, 4096, 128, half, True),
        'prefill 8x32768': (False, 8, 32768, 128, half, True),
        'prefill 1x32768': (False, 1, 32768, 128, half, True),
        'prefill 1x131072': (False, 1, 131072, 128, half, True),
        'prefill 8x32768 bf16': (False, 8, 32768, 128, bfloat, True),
        'prefill 8x32768 all keys': (False, 8, 32768, 128, half, False),
        'prefill 8x32768 d64': (False, 8, 32768, 64, half, True),
        'decode 8x32768': (True, 8, 32768, 128, half, True),
        'decode 1x131072': (True, 1, 131072, 128, half, True),
        'decode 1x32768': (True, 1, 32768, 128, half, True),
        'decode 8x4096': (True, 8, 4096, 128, half, True),
        'decode 8x32768 bf16': (True, 8, 32768, 128, bfloat, True),
        'decode 8x32768 d64': (True, 8, 32768, 64, half, True),
        'decode 8x32768, blocks of prompts': (True, 8, 32768, 128, half, True, prompt),
        'decode 1x131072, blocks of prompts': (True, 1, 131072, 128, half, True, prompt),
        'decode 8x4096, blocks of prompts': (True, 8, 4096, 128, half, True, prompt),
        'decode 8x32768 bf16, blocks of prompts': (True, 8, 32768, 128, bfloat, True, prompt),
        'decode 8x32768 d64, blocks of prompts': (True, 8, 32768, 64, half, True, prompt),
    }
    rows = []
    for label, arguments in cases.items():
        if options.only and not any(text in label for text in options.only.split(',')):
            continue
        rows += measure(Problem(*arguments), label, libraries, options.rounds, sampler)
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, 'w') as file:
                date = time.strftime('%Y-%m-%d')
                json.dump(comparisons(rows, machine_of(sampler.handle), date), file, indent=1, ensure_ascii=False)


if __name__ == '__main__':
    main()
