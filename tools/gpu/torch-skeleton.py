"""Times Sparse Skeleton's estimate of a layer, the selection of blocks and attention over them, interleaved with dense
attention in one process.

usage: torch-skeleton.py LIBRARY [--rounds N] [--only TEXT] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md). A layer has 32 query heads and 8 kv heads of 128 dims in f16.
"""
import argparse
import ctypes
import importlib
import json
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import Sampler, current_stream, integers_of, libraries_of, machine_of, pointers_of, time_once, timed

block_sparse = importlib.import_module('torch-block-sparse')
QUERY_HEADS, KV_HEADS, HEAD_DIM = block_sparse.QUERY_HEADS, block_sparse.KV_HEADS, block_sparse.HEAD_DIM
QUERY_TILE, KEY_BLOCK = block_sparse.QUERY_TILE, block_sparse.KEY_BLOCK
PAIRS, SAMPLES, SINKS, DIAGONAL = HEAD_DIM // 2, 80 * HEAD_DIM, 1, 100
COEFFICIENTS = 2 * PAIRS + HEAD_DIM
STATE = KV_HEADS * (3 * HEAD_DIM + HEAD_DIM ** 2 + COEFFICIENTS ** 2) + QUERY_HEADS * COEFFICIENTS
ESTIMATE, SELECTION, ALL = 'estimate', 'estimate and selection', 'estimate, selection and attention'
DENSE, FLASH = 'our dense attention', 'PyTorch sdpa-flash'
# A step for which skeletonPrefill has no budget to go by counts on this share of the blocks (block-sparse-prefill.ts).
USUAL_SHARE = 0.25


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
        stream = current_stream()
        assert function(integers_of(sizes), pointers_of(tensors), number, stream) == 0

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

    def check(self):
        """Rows of the output are those of float64 over the listed blocks."""
        output = self.problem.results(self.attend)
        assert bool(torch.isfinite(self.horizontal).all()), 'a horizontal part is not finite'
        errors = block_sparse.exact_errors(self.problem, self.listed, self.listed_counts, output)
        assert max(errors) < 1e-2, f'attention is off by {errors}'


@dataclass
class Case:
    """Prompts of one length, of which this share of the blocks is computed, and what is timed of them."""
    label: str
    budget: float
    # Of the parts that are timed: what they are to reach.
    targets: dict = field(default_factory=lambda: {ALL: None})
    steps: int = 1
    rival: str = DENSE


def quarter(length):
    return Case(f'{length}, 25 % computed', USUAL_SHARE, {ALL: {'ratio': 0.98}})


def flat(length):
    return Case(f'{length}, flat attention', 1, {ALL: {'ratio': 0.9}})


# Shorter prompts than the first are computed densely, without a budget those below 32K (estimated-cost.ts).
CASES = {
    12288: [quarter('12K')],
    16384: [Case('16K, 90 % sparse', 0.1, {ESTIMATE: None, SELECTION: None, ALL: {'ratio': 2.5}}),
            quarter('16K')],
    32768: [quarter('32K'), flat('32K')],
    131072: [Case('128K, 97 % sparse', 0.03, {ESTIMATE: None, SELECTION: {'atMost': 2.2}, ALL: {'ratio': 21}}),
             Case('128K, 97 % sparse, in 16 steps', 0.03, {SELECTION: {'atMost': 4}}, steps=16),
             Case('128K, 4.5 % computed', 0.045, {ALL: {'ratio': 31}}, rival=FLASH),
             quarter('128K'), flat('128K')],
    1048576: [Case('1M, 99.5 % sparse', 0.005, {ESTIMATE: None, SELECTION: None, ALL: {'ratio': 120}})],
}
# From this length on dense attention takes seconds, and runs once.
TIMED_ONCE = 1048576


def flash(problem):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(problem.query, problem.key, problem.value, is_causal=True, enable_gqa=True)


def measure(library, tokens, cases, rounds, sampler, stamp):
    problem = block_sparse.Problem(tokens)
    rivals = {DENSE: lambda: problem.dense(library)}
    if any(case.rival == FLASH for case in cases):
        rivals[FLASH] = lambda: flash(problem)
    functions, densities = {}, {}
    for case in cases:
        skeleton = Skeleton(library, problem, tokens // case.steps, case.budget)
        if case.steps == 1:
            skeleton.check()
            densities[case.label] = round(skeleton.density(), 4)
        parts = {ESTIMATE: lambda of=skeleton: of.estimate(select=False), SELECTION: skeleton.estimate, ALL: skeleton.attend}
        functions.update({(case.label, part): parts[part] for part in case.targets})
    if tokens < TIMED_ONCE:
        times = timed(functions | rivals, rounds, sampler, 3)
    else:
        once = time_once(rivals[DENSE], 1)
        times = timed(functions, rounds, sampler, 3)
        times[DENSE] = dict(median=once, low=once, high=once, samples=1), None, None
    rows = []
    for case in cases:
        shapes = dict(tokens=tokens, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, dtype='float16',
                      density=densities.get(case.label, case.budget))
        for part, target in case.targets.items():
            result, clock, watts = times[case.label, part]
            row = dict(measure=f'{case.label}: {part}', shapes=shapes, device='cuda', kind='measured', unit='ms', better='lower',
                       result=result, **stamp, clockMegahertz=clock, watts=watts)
            if part == ALL:
                row['reference'] = dict(name=case.rival, **times[case.rival][0])
            if target is not None:
                row['target'] = target
            rows.append(row)
            reference = row.get('reference')
            print(row['measure'], round(result['median'], 3), 'ms',
                  f"{reference['median'] / result['median']:.2f}x of {reference['median']:.3f}" if reference else '',
                  shapes['density'], clock, watts, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--only', default='')
    parser.add_argument('--json')
    options = parser.parse_args()
    library = libraries_of([options.library])['kv']
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    stamp = dict(date=time.strftime('%Y-%m-%d'), machine=machine_of(sampler.handle))
    rows = []
    for tokens, cases in CASES.items():
        chosen = [case for case in cases if any(text in case.label for text in options.only.split(','))]
        if not chosen:
            continue
        rows += measure(library, tokens, chosen, options.rounds, sampler, stamp)
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, 'w') as file:
                json.dump({'title': "The skeleton's estimate on the GPU", 'rows': rows}, file, indent=1, ensure_ascii=False)


if __name__ == '__main__':
    main()
