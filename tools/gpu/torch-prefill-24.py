"""Times prefill attention over dense and 2:4 blocks next to dense attention: PyTorch's (cuDNN) and our own kernel, interleaved
in one process, and checks it against cuDNN's result on the pruned keys and values.

usage: torch-prefill-24.py LIBRARY [NAME=LIBRARY ...] [--rounds N] [--only TEXT] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md), of which several builds may take turns; the first one is also timed
with dense blocks. Rates count the products of dense attention, whatever was pruned.
"""
import argparse
import ctypes
import importlib
import json
import statistics
import time

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import Sampler, current_stream, integers_of, libraries_of, machine_of, pointers_of

attention = importlib.import_module('torch-attention')
QUERY_HEADS, KV_HEADS, TOKENS = attention.QUERY_HEADS, attention.KV_HEADS, attention.BLOCK_TOKENS


def keep_two_of_four(x):
    """x [..., 4 * n] -> which elements are kept, and the lower and the higher index kept of each four [..., n]."""
    size = x.unflatten(-1, (-1, 4)).abs()
    rank = torch.stack([sum(((size[..., j] > size[..., i]) | ((size[..., j] == size[..., i]) & (j < i))).to(torch.int8)
                            for j in range(4)) for i in range(4)], -1)
    kept = rank < 2
    low = torch.where(kept[..., 0], 0, torch.where(kept[..., 1], 1, 2))
    high = torch.where(kept[..., 3], 3, torch.where(kept[..., 2], 2, 1))
    return kept.flatten(-2), low, high


def compress(x):
    """x [block, line, 4 * n] -> the same with two of four set to zero, non-zeros [block, line, 2 * n], and meta16
    [block, line, n / 4]."""
    kept, low, high = keep_two_of_four(x)
    fours = x.unflatten(-1, (-1, 4))
    non_zeros = torch.cat([fours.gather(-1, low[..., None]), fours.gather(-1, high[..., None])], -1).flatten(-2)
    nibbles = (high << 2 | low).unflatten(-1, (-1, 4)).to(torch.int32)
    meta16 = sum(nibbles[..., j] << 4 * j for j in range(4))
    return x * kept, non_zeros, meta16


def swizzle(rows, pattern):
    """rows [..., row, dim] with 16-byte chunk c of row r moved to c ^ pattern[r]."""
    chunks = rows.unflatten(-1, (-1, 8))
    places = torch.arange(chunks.shape[-2], device=rows.device) ^ pattern[:, None]
    return chunks.gather(-2, places[..., None].expand(chunks.shape)).flatten(-2)


def words(meta16):
    """meta16 [block, 16 * tile, 4 * r] -> [block, tile, lane, r] as blocks-24.h lays them out."""
    tiles = meta16.unflatten(-1, (-1, 4)).unflatten(1, (-1, 2, 8)).to(torch.int64)
    pairs = tiles[:, :, 0] | tiles[:, :, 1] << 16  # [block, tile, g, r, c]
    pairs = torch.where(pairs >= 1 << 31, pairs - (1 << 32), pairs)
    return pairs.transpose(-1, -2).to(torch.int32).contiguous()


def sparse_keys(blocks):
    """[block, token, dim] -> pruned, non-zeros, metadata."""
    pruned, non_zeros, meta16 = compress(blocks)
    rows = torch.arange(TOKENS, device=blocks.device)
    return pruned, swizzle(non_zeros, rows % 8 if blocks.shape[-1] == 128 else rows // 2 % 4), words(meta16)


def sparse_values(blocks):
    pruned, non_zeros, meta16 = compress(blocks.transpose(1, 2))
    panels = non_zeros.transpose(1, 2).unflatten(-1, (-1, 64)).transpose(1, 2)  # [block, panel, kept token, dim]
    rows = torch.arange(TOKENS // 2, device=blocks.device)
    return pruned.transpose(1, 2), swizzle(panels, rows % 8).contiguous(), words(meta16)


class Problem:
    def __init__(self, batch, keys, head_dim, dtype, key_share, value_share, causal=True):
        self.batch, self.keys, self.head_dim, self.dtype, self.causal = batch, keys, head_dim, dtype, causal
        random = lambda heads: torch.randn(batch, heads, keys, head_dim, device='cuda', dtype=dtype)
        self.query, self.key, self.value = random(QUERY_HEADS), random(KV_HEADS), random(KV_HEADS)
        self.packed_query = self.query.transpose(1, 2).contiguous().view(batch * keys, QUERY_HEADS, head_dim)
        self.output = torch.full_like(self.packed_query, float('nan'))
        blocks = batch * KV_HEADS * keys // TOKENS
        int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        counts, slots = int32([keys] * batch * KV_HEADS), int32(list(range(batch)))
        starts = int32([entry * keys for entry in range(batch + 1)])
        workspace = torch.zeros(1 << 20, device='cuda', dtype=torch.uint8)

        order = torch.randperm(blocks, device='cuda')
        def store(tensor, prune, share):
            """In blocks in random order: the pruned cache, dense pool, non-zeros, metadata and index map."""
            plain = tensor.view(blocks, TOKENS, head_dim)
            sparse = torch.rand(blocks, device='cuda') < share
            pruned, non_zeros, metadata = prune(plain)
            # As native/shared/paged/block-entry.h says: kind 8 in the upper four bits.
            table = torch.where(sparse, order - 2**31, order).to(torch.int32)
            place = lambda pool: torch.empty_like(pool).index_copy_(0, order, pool)
            pruned = torch.where(sparse[:, None, None], pruned, plain).reshape(tensor.shape)
            return pruned, place(plain), place(non_zeros), place(metadata), table
        self.pruned_key, dense_keys, key_non_zeros, key_metadata, key_table = store(self.key, sparse_keys, key_share)
        self.pruned_value, dense_values, value_non_zeros, value_metadata, value_table = store(
            self.value, sparse_values, value_share)
        self.tensors = [self.packed_query, self.output, dense_keys, dense_values, key_non_zeros, key_metadata,
                        value_non_zeros, value_metadata, key_table, value_table, counts, slots, starts, workspace]
        self.sizes = integers_of([0, batch * keys, batch, QUERY_HEADS, KV_HEADS, head_dim, keys // TOKENS, causal,
                                  dtype == torch.bfloat16, blocks, blocks])
        self.dense_tensors = [self.packed_query, self.output, None, dense_keys, dense_values, order.to(torch.int32),
                              counts, slots, starts, workspace, None]
        self.dense_sizes = integers_of([0, batch * keys, batch, QUERY_HEADS, KV_HEADS, head_dim, TOKENS,
                                        keys // TOKENS, causal, dtype == torch.bfloat16, blocks])

    def mixed(self, library):
        assert library.kv_prefill_24(self.sizes, pointers_of(self.tensors), self.scale(), current_stream()) == 0

    def dense(self, library):
        assert library.kv_attention(self.dense_sizes, pointers_of(self.dense_tensors), self.scale(), current_stream()) == 0

    def scale(self):
        return ctypes.c_float(self.head_dim ** -0.5)

    def torch(self, key, value):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(self.query, key, value, is_causal=self.causal, enable_gqa=True)

    def flops(self):
        return 4 * self.keys * self.keys * self.head_dim * QUERY_HEADS * self.batch / (2 if self.causal else 1)


def take_turns(functions, rounds, sampler):
    """Times each function once in every round, the order rotated, each behind an untimed call of its own. Otherwise it
    would run at the clock that the function before it has left, which is a fifth lower behind dense attention."""
    times = {name: [] for name in functions}
    spans = {name: [] for name in functions}
    for round_number in range(rounds):
        order = list(functions.items())
        shift = round_number % len(order)
        for name, function in order[shift:] + order[:shift]:
            function()
            torch.cuda.synchronize()
            begun = time.time()
            times[name].append(attention.time_once(function, 1))
            spans[name].append((begun, time.time()))
    results = {}
    for name, values in times.items():
        seen = [reading for reading in (sampler.between(*span) for span in spans[name]) if reading[0] is not None]
        clock, watts = (statistics.median(reading[index] for reading in seen) if seen else None for index in (0, 1))
        results[name] = dict(milliseconds=round(statistics.median(values), 4), fastest=round(min(values), 4),
                             slowest=round(max(values), 4), rounds=rounds, clockMegahertz=clock, watts=watts)
    return results


def measure(problem, label, libraries, rounds, sampler):
    functions = {name: (lambda library=library: problem.mixed(library)) for name, library in libraries.items()}
    reference = problem.torch(problem.pruned_key, problem.pruned_value).transpose(1, 2).reshape(problem.output.shape)
    errors = {}
    for name, function in functions.items():
        problem.output.fill_(float('nan'))
        function()
        total, difference = 0.0, 0.0
        for got, wanted in zip(problem.output.split(1 << 16), reference.split(1 << 16)):
            difference += (got.float() - wanted.float()).square().sum().item()
            total += wanted.float().square().sum().item()
        errors[name] = (difference / total) ** 0.5
    del reference
    functions['cuDNN'] = lambda: problem.torch(problem.key, problem.value)
    functions['our dense'] = lambda: problem.dense(next(iter(libraries.values())))
    rows = []
    for name, timing in take_turns(functions, rounds, sampler).items():
        row = dict(case=label, kernel=name, batch=problem.batch, keys=problem.keys, queryHeads=QUERY_HEADS,
                   kvHeads=KV_HEADS, headDim=problem.head_dim, dtype=str(problem.dtype)[6:], **timing,
                   teraflops=round(problem.flops() / timing['milliseconds'] / 1e9, 1), relativeError=errors.get(name))
        rows.append(row)
        print(f"{label:28s} {name:12s} {row['milliseconds']:9.4f} ms [{row['fastest']:.4f}..{row['slowest']:.4f}] "
              f"{row['teraflops']:7.1f} TFLOP/s {row['clockMegahertz']} MHz {row['watts']} W error "
              f"{row['relativeError']}", flush=True)
    return rows


# Milliseconds: 780, 680 and 640 dense-equivalent TFLOP/s.
TARGETS = {
    '2:4 prefill 8x32768, sparse K and V': 90.2, '2:4 prefill 8x32768, sparse V': 103.5,
    '2:4 prefill 8x32768, half of K and V sparse': 109.9,
}


def kept_rows(rows, machine, date):
    """Rows as docs/benchmarks/ keeps them (tools/bench/README.md): the kernel named kv against cuDNN's dense one."""
    summary = lambda row: dict(median=row['milliseconds'], low=row['fastest'], high=row['slowest'], samples=row['rounds'])
    kept = []
    for case in dict.fromkeys(row['case'] for row in rows):
        by_kernel = {row['kernel']: row for row in rows if row['case'] == case}
        ours = by_kernel['kv']
        row = dict(measure=case, shapes={name: ours[name] for name in
                                         ('batch', 'keys', 'queryHeads', 'kvHeads', 'headDim', 'dtype')},
                   device='cuda', kind='measured', unit='ms', better='lower', result=summary(ours),
                   reference=dict(name='PyTorch cuDNN, dense', **summary(by_kernel['cuDNN'])), date=date,
                   machine=machine)
        row.update({name: ours[name] for name in ('teraflops', 'clockMegahertz', 'watts', 'relativeError')})
        row['ourDense'] = summary(by_kernel['our dense'])
        kept.append(row | ({'target': {'atMost': TARGETS[case]}} if case in TARGETS else {}))
    return {'title': 'Prefill attention over dense and 2:4 sparse blocks on the GPU', 'rows': kept}


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
    cases = {
        '2:4 prefill 8x32768, sparse K and V': (8, 32768, 128, half, 1, 1),
        '2:4 prefill 8x32768, sparse V': (8, 32768, 128, half, 0, 1),
        '2:4 prefill 8x32768, half of K and V sparse': (8, 32768, 128, half, 0.5, 0.5),
        '2:4 prefill 8x4096, sparse K and V': (8, 4096, 128, half, 1, 1),
        '2:4 prefill 1x131072, sparse K and V': (1, 131072, 128, half, 1, 1),
        '2:4 prefill 8x32768, sparse K and V, bf16': (8, 32768, 128, bfloat, 1, 1),
        '2:4 prefill 8x32768, sparse K and V, d64': (8, 32768, 64, half, 1, 1),
        '2:4 prefill 8x32768, sparse K and V, all keys': (8, 32768, 128, half, 1, 1, False),
    }
    rows = []
    for label, arguments in cases.items():
        if options.only and not any(label.endswith(text) for text in options.only.split(';')):
            continue
        rows += measure(Problem(*arguments), label, libraries, options.rounds, sampler)
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, 'w') as file:
                json.dump(kept_rows(rows, machine_of(sampler.handle), time.strftime('%Y-%m-%d')), file, indent=1)


main()
