"""Times the estimates of block scores of all presets next to our dense attention, interleaved in one process.

usage: torch-block-scores.py LIBRARY [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md). A layer has 32 query heads and 8 kv heads of 128 dims in f16.
"""
import argparse
import ctypes
import importlib
import json
import time

import torch

from measuring import Sampler, current_stream, integers_of, libraries_of, machine_of, pointers_of, timed

block_sparse = importlib.import_module('torch-block-sparse')
QUERY_HEADS, KV_HEADS, HEAD_DIM = block_sparse.QUERY_HEADS, block_sparse.KV_HEADS, block_sparse.HEAD_DIM
QUERY_TILE, KEY_BLOCK = block_sparse.QUERY_TILE, block_sparse.KEY_BLOCK
# As in native/tests/cuda/kernels/block-scores.test.cc.
ESTIMATES = ['clustered', 'pooled', 'antidiagonal, stride 8', 'antidiagonal, stride 16', 'vertical-slash']
CLUSTERED = 0
TOKENS, STEPS = 131072, 16


class Prompt:
    """A prompt of one layer, in steps of `rows`."""

    def __init__(self, library, problem, rows):
        self.library, self.problem, self.rows = library, problem, rows
        int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        self.ends = range(rows, problem.tokens + 1, rows)
        self.counts = [int32([end] * KV_HEADS) for end in self.ends]
        self.start = int32([0, rows])
        self.scores = torch.empty(QUERY_HEADS, rows // QUERY_TILE, problem.tokens // KEY_BLOCK, device='cuda')

    def estimate(self, number):
        table, slots = self.problem.tensors[5], self.problem.tensors[7]
        stream = current_stream()
        for end, counts in zip(self.ends, self.counts):
            sizes = [number, self.rows, end, QUERY_HEADS, KV_HEADS, HEAD_DIM, *self.problem.sizes[6:8], self.problem.sizes[10]]
            tensors = [self.problem.packed_query[end - self.rows:end], self.problem.tensors[3], table, counts, slots, self.start,
                       self.scores]
            assert self.library.kv_block_scores(integers_of(sizes), pointers_of(tensors),
                                                ctypes.c_float(HEAD_DIM ** -0.5), stream) == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json')
    options = parser.parse_args()
    library = libraries_of([options.library])['kv']
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    problem = block_sparse.Problem(TOKENS)
    whole, parts = Prompt(library, problem, TOKENS), Prompt(library, problem, TOKENS // STEPS)
    functions = {'dense': lambda: problem.dense(library)}
    for number, name in enumerate(ESTIMATES):
        functions[name] = lambda number=number: whole.estimate(number)
        functions[f'{name}, in {STEPS} steps'] = lambda number=number: parts.estimate(number)
    results = timed(functions, options.rounds, sampler, 1)
    whole.estimate(CLUSTERED)
    shares = whole.scores.exp().sum(-1)
    assert bool(((shares - 1).abs() < 1e-3).all()), 'shares of a tile do not add up to one'
    stamp = dict(date=time.strftime('%Y-%m-%d'), machine=machine_of(sampler.handle))
    shapes = dict(tokens=TOKENS, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, dtype='float16')
    dense = results['dense'][0]
    rows = []
    for name, (result, clock, watts) in results.items():
        print(name, round(result['median'], 3), 'ms', f"{dense['median'] / result['median']:.1f}x", clock, watts, flush=True)
        if name == 'dense':
            continue
        row = dict(measure=f'block scores of 128K: {name}', shapes=shapes, device='cuda', kind='measured', unit='ms', better='lower',
                   result=result, reference=dict(name='our dense attention', **dense), **stamp, clockMegahertz=clock, watts=watts)
        rows.append(row)
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Estimates of block scores on the GPU', 'rows': rows}, file, indent=1, ensure_ascii=False)


if __name__ == '__main__':
    main()
