"""Times decode over 2:4 sparse caches next to our dense decode and PyTorch's scaled_dot_product_attention (cuDNN), and
compression, interleaved in one process; checks the results against cuDNN on keys and values that torch pruned.

usage: torch-hierasparse.py LIBRARY [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md).
"""
import argparse
import ctypes
import importlib
import json
import time

import torch
from torch.nn.attention import SDPBackend

from measuring import Sampler, current_stream, integers_of, machine_of, pointers_of, timed_in_graphs

attention = importlib.import_module('torch-attention')
BLOCK = attention.BLOCK_TOKENS


def int32(values):
    return torch.tensor(values, device='cuda', dtype=torch.int32)


def pruned(tensor, axis):
    """The two of largest magnitude of each four neighbours along an axis, of equal ones the first; zeros elsewhere."""
    groups = tensor.transpose(axis, -1)
    groups = groups.reshape(*groups.shape[:-1], -1, 4)
    order = groups.abs().float().sort(dim=-1, descending=True, stable=True).indices[..., :2]
    kept = torch.zeros_like(groups).scatter_(-1, order, groups.gather(-1, order))
    return kept.flatten(-2).transpose(axis, -1).contiguous()


class Cache:
    """One operand's pools and index map, of which the share of least loss of each head is pruned."""

    def __init__(self, library, dense, blocks_by_place, values, share):
        heads, width = blocks_by_place.shape
        head_dim = dense.shape[-1]
        self.library, self.dense, self.values = library, dense.clone() if 0 < share < 1 else dense, values
        self.first_table = blocks_by_place.to(torch.int32).contiguous()
        self.tables = [self.first_table.clone()]
        count = round(share * width)
        sparse_blocks = max(1, heads * count)
        self.non_zeros = torch.full((sparse_blocks, 32 * head_dim), float('nan'), device='cuda', dtype=dense.dtype)
        self.metadata = torch.zeros(sparse_blocks, 2 * head_dim, device='cuda', dtype=torch.int32)
        self.ids = torch.randperm(sparse_blocks, device='cuda').to(torch.int32)
        freed = blocks_by_place.sort(dim=1).values[:, width - count].tolist() if count else [0] * heads
        self.prunings = int32([[row, 0, width, count, row * count, freed[row]] for row in range(heads)])
        self.workspace = torch.zeros(6 * width * heads, device='cuda', dtype=torch.int32)
        self.counters = torch.zeros(heads, device='cuda', dtype=torch.int32)
        self.fault = torch.zeros(64, device='cuda', dtype=torch.uint8)
        self.sizes = integers_of([values, head_dim, dense.dtype == torch.bfloat16, dense.shape[0],
                                  sparse_blocks, width, heads, 1, heads, width, sparse_blocks])
        if count:
            self.compress(0)
            torch.cuda.synchronize()
            assert not self.fault.any()

    def compress(self, table):
        tensors = [self.dense, self.non_zeros, self.metadata, self.tables[table], self.prunings, self.ids,
                   self.workspace, self.counters, self.fault]
        status = self.library.kv_compress(self.sizes, pointers_of(tensors), current_stream())
        assert status == 0

    def bytes(self):
        """What compressing everything reads and writes."""
        return (self.dense.numel() + self.non_zeros.numel()) * 2 + self.metadata.numel() * 4


class Problem24:
    """Decode over a problem's keys and values with shares of sparse blocks."""

    def __init__(self, library, problem, key_share, value_share):
        self.library, self.problem = library, problem
        dense_keys, dense_values, table = problem.tensors[3:6]
        places = table.view(problem.batch * attention.KV_HEADS, -1)
        self.keys = Cache(library, dense_keys, places, False, key_share)
        self.value_cache = Cache(library, dense_values, places, True, value_share)
        self.output = torch.full_like(problem.output, float('nan'))
        workspace, counters = (torch.zeros(size << 20, device='cuda', dtype=torch.uint8) for size in (64, 1))
        keys, values = self.keys, self.value_cache
        self.tensors = [problem.packed_query, self.output, keys.dense, values.dense, keys.tables[0], values.tables[0],
                        keys.non_zeros, keys.metadata, values.non_zeros, values.metadata, *problem.tensors[6:9],
                        workspace, counters]
        self.sizes = [problem.batch, attention.QUERY_HEADS, attention.KV_HEADS, problem.head_dim, places.shape[1],
                      problem.dtype == torch.bfloat16, dense_keys.shape[0],
                      max(keys.non_zeros.shape[0], values.non_zeros.shape[0])]
        sparse = [(cache.tables[0] < 0).sum().item() for cache in (keys, values)]
        self.bytes = problem.bytes() - sum(sparse) * BLOCK * problem.head_dim * 2 * 7 // 16

    def run(self, ampere=False):
        sizes = integers_of([*self.sizes, ampere])
        status = self.library.kv_decode_24(sizes, pointers_of(self.tensors),
                                              ctypes.c_float(self.problem.head_dim ** -0.5), current_stream())
        assert status == 0

    def error(self, ampere=False):
        """Relative, against cuDNN on the keys and values that torch prunes where the maps say sparse."""
        problem = self.problem
        shape = problem.key.shape
        blocked = lambda tensor: tensor.view(-1, BLOCK, problem.head_dim)
        inputs = []
        for cache, tensor, axis in ((self.keys, problem.key, -1), (self.value_cache, problem.value, -2)):
            whole = blocked(tensor)
            sparse = (cache.tables[0].flatten() < 0).view(-1, 1, 1)
            inputs.append(torch.where(sparse, pruned(whole, axis), whole).view(shape))
        with attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            reference = attention.functional.scaled_dot_product_attention(problem.query, *inputs, enable_gqa=True)
        reference = reference.transpose(1, 2).reshape(self.output.shape).float()
        self.output.fill_(float('nan'))
        self.run(ampere)
        return ((self.output.float() - reference).norm() / reference.norm()).item()


DECODE_CASES = {'S_K = S_V = 1': (1, 1, {'atMost': 0.14}), 'S_V = 1': (0, 1, {'atMost': 0.192}),
                'S_K = S_V = 0.5': (0.5, 0.5, {'atMost': 0.193})}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--json')
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    rows = []
    common = dict(device='cuda', kind='measured', unit='ms', better='lower', date=time.strftime('%Y-%m-%d'),
                  machine=machine_of(sampler.handle))

    def add(measure, shapes, result, bytes_moved, reference=None, **rest):
        summary, clock, watts = result
        rate = round(bytes_moved / summary['median'] / 1e6, 1)
        row = dict(measure=measure, shapes=shapes, **common, result=summary)
        if reference:
            row['reference'] = dict(name=reference[0], **reference[1][0])
        rows.append(row | dict(gigabytesPerSecond=rate, clockMegahertz=clock, watts=watts, **rest))
        print(f"{measure:40s} {summary['median']:.4f} ms [{summary['low']:.4f}..{summary['high']:.4f}] {rate} GB/s "
              f"{clock} MHz {watts} W {reference and reference[1][0]['median']} {rest}", flush=True)

    for batch, keys in ((8, 32768), (1, 131072), (1, 32768)):
        problem = attention.Problem(True, batch, keys, 128, torch.float16, True)
        mixed = {name: Problem24(library, problem, *shares[:2]) for name, shares in DECODE_CASES.items()}
        functions = {name: each.run for name, each in mixed.items()}
        functions['dense'] = lambda: problem.ours(library)
        functions['cudnn'] = lambda: problem.torch(SDPBackend.CUDNN_ATTENTION)
        errors = {name: (each.error(), each.error(True)) for name, each in mixed.items()}
        results = timed_in_graphs(functions, options.rounds, sampler, 20)
        shapes = dict(batch=batch, keys=keys, queryHeads=attention.QUERY_HEADS, kvHeads=attention.KV_HEADS, headDim=128,
                      dtype='float16')
        best = min(('PyTorch sdpa-cudnn', results['cudnn']), ('dense decode-attention', results['dense']),
                   key=lambda each: each[1][0]['median'])
        for name, each in mixed.items():
            target = {'target': DECODE_CASES[name][2]} if (batch, keys) == (8, 32768) else {}
            add(f'decode {batch}x{keys} {name}', shapes, results[name], each.bytes, best,
                relativeError=errors[name][0], relativeErrorAmpere=errors[name][1],
                denseMilliseconds=results['dense'][0]['median'], **target)
        if (batch, keys) == (8, 32768):
            whole = mixed['S_K = S_V = 1']
            calls = 10
            for name, cache in (('keys', whole.keys), ('values', whole.value_cache)):
                cache.tables += [cache.first_table.clone() for _ in range(calls + 1)]
                turn = iter(range(1, calls + 2))
                destination = torch.empty_like(cache.dense)

                def restore():
                    for table in cache.tables[1:]:
                        table.copy_(cache.first_table)

                functions = {'compress': lambda: cache.compress(next(turn)),
                             'copy': lambda: torch.neg(cache.dense, out=destination)}
                measured = timed_in_graphs(functions, options.rounds, sampler, calls, restore)
                assert not cache.fault.any()
                add(f'compress {name} {batch}x{keys}', shapes, measured['compress'], cache.bytes(),
                    ('reading and writing the dense pool', measured['copy']), target={'atMost': 0.22})
        del problem, mixed, functions
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': '2:4 sparse caches on the GPU', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
