"""Times the estimate of Sparse Skeleton, the selection of key blocks and block-sparse attention over them next to our
dense attention, interleaved in one process.

usage: torch-skeleton.py LIBRARY [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md). A layer has 32 query heads and 8 kv heads of 128 dims in f16.
"""
import argparse
import ctypes
import importlib
import json
import time

import torch

from measuring import Sampler, libraries_of, machine_of, pointers_of, timed

block_sparse = importlib.import_module('torch-block-sparse')
QUERY_HEADS, KV_HEADS, HEAD_DIM = block_sparse.QUERY_HEADS, block_sparse.KV_HEADS, block_sparse.HEAD_DIM
QUERY_TILE, KEY_BLOCK = block_sparse.QUERY_TILE, block_sparse.KEY_BLOCK
PAIRS, SAMPLES, SINKS, DIAGONAL = HEAD_DIM // 2, 80 * HEAD_DIM, 1, 100
COEFFICIENTS = 2 * PAIRS + HEAD_DIM
STATE = KV_HEADS * (3 * HEAD_DIM + HEAD_DIM ** 2 + COEFFICIENTS ** 2) + QUERY_HEADS * COEFFICIENTS


class Skeleton:
    """A prompt of one layer, in steps of `rows`."""

    def __init__(self, library, problem, rows, budget):
        self.library, self.problem, self.rows, self.budget = library, problem, rows, budget
        tokens = problem.tokens
        floats = lambda: torch.full((QUERY_HEADS * tokens,), float('nan'), device='cuda')
        self.slash, self.vertical, self.horizontal = floats(), floats(), floats()
        self.state = torch.zeros(STATE, device='cuda', dtype=torch.float64)
        self.frequencies = 5e5 ** (-torch.arange(PAIRS, device='cuda', dtype=torch.float32) / PAIRS)
        int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        self.ends = range(rows, tokens + 1, rows)
        self.counts = [int32([end] * KV_HEADS) for end in self.ends]
        self.start = int32([0, rows])
        self.listed = torch.zeros(QUERY_HEADS, rows // QUERY_TILE, tokens // KEY_BLOCK, device='cuda', dtype=torch.int32)
        self.listed_counts = torch.zeros(QUERY_HEADS, rows // QUERY_TILE, device='cuda', dtype=torch.int32)

    def call(self, function, sizes, tensors, number):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert function((ctypes.c_int64 * len(sizes))(*sizes), pointers_of(tensors), number, stream) == 0

    def estimate(self, select=True):
        table, slots = self.problem.tensors[5], self.problem.tensors[7]
        for end, counts in zip(self.ends, self.counts):
            sizes = [self.rows, end, end - self.rows, QUERY_HEADS, KV_HEADS, HEAD_DIM, *self.problem.sizes[6:8],
                     self.problem.sizes[10], PAIRS, SAMPLES, SINKS, DIAGONAL]
            tensors = [self.problem.packed_query[end - self.rows:end], self.problem.tensors[3], table, counts, slots,
                       self.start, self.frequencies, self.state, self.slash, self.vertical, self.horizontal]
            self.call(self.library.kv_decompose_attention, sizes, tensors, ctypes.c_float(HEAD_DIM ** -0.5))
            if select:
                self.call(self.library.kv_select_key_blocks,
                          [self.rows, end, QUERY_HEADS, SINKS, DIAGONAL, self.listed.shape[2]],
                          [self.slash, self.vertical, self.horizontal, self.listed, self.listed_counts],
                          ctypes.c_double(self.budget))

    def attend(self):
        self.estimate()
        self.problem.sparse(self.library, self.listed, self.listed_counts)

    def density(self):
        seen = block_sparse.causal_blocks(self.problem.tokens).sum() * QUERY_HEADS
        return float(self.listed_counts.sum() / seen)


def measure(library, tokens, budget, label, steps, targets, rounds, sampler, stamp):
    problem = block_sparse.Problem(tokens)
    whole = Skeleton(library, problem, tokens, budget)
    functions = {'estimate': lambda: whole.estimate(select=False), 'estimate and selection': whole.estimate,
                 'estimate, selection and attention': whole.attend, 'dense': lambda: problem.dense(library)}
    if steps > 1:
        parts = Skeleton(library, problem, tokens // steps, budget)
        functions[f'estimate and selection in {steps} steps'] = parts.estimate
    times = timed(functions, rounds, sampler, 3)
    assert bool(torch.isfinite(whole.horizontal).all()), 'a horizontal part is not finite'
    whole.estimate()
    shapes = dict(tokens=tokens, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, dtype='float16',
                  density=round(whole.density(), 4))
    kept = []
    for name, (result, clock, watts) in times.items():
        if name == 'dense':
            continue
        row = dict(measure=f'{label}: {name}', shapes=shapes, device='cuda', kind='measured', unit='ms', better='lower',
                   result=result, **stamp, clockMegahertz=clock, watts=watts)
        if name == 'estimate, selection and attention':
            row['reference'] = dict(name='our dense attention', **times['dense'][0])
        if name in targets:
            row['target'] = targets[name]
        kept.append(row)
        reference = row.get('reference')
        print(row['measure'], round(result['median'], 3), 'ms',
              f"{reference['median'] / result['median']:.2f}x of {reference['median']:.3f}" if reference else '', shapes['density'],
              clock, watts, flush=True)
    return kept


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json')
    options = parser.parse_args()
    library = libraries_of([options.library])['kv']
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    stamp = dict(date=time.strftime('%Y-%m-%d'), machine=machine_of(sampler.handle))
    rows = []
    for tokens, budget, label, steps, targets in (
            (16384, 0.1, '16K, 90 % sparse', 1, {'estimate, selection and attention': {'ratio': 2.5}}),
            (131072, 0.03, '128K, 97 % sparse', 16,
             {'estimate and selection': {'atMost': 2.2}, 'estimate and selection in 16 steps': {'atMost': 4},
              'estimate, selection and attention': {'ratio': 21}})):
        rows += measure(library, tokens, budget, label, steps, targets, options.rounds, sampler, stamp)
        if options.json:
            with open(options.json, 'w') as file:
                json.dump({'title': "The skeleton's estimate on the GPU", 'rows': rows}, file, indent=1, ensure_ascii=False)


if __name__ == '__main__':
    main()
