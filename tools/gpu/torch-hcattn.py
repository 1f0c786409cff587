"""Times decode attention over quantized blocks next to our dense decode and PyTorch's scaled_dot_product_attention
(cuDNN), interleaved in one process; checks the results against cuDNN on what the codes stand for.

usage: torch-hcattn.py LIBRARY [--rounds N] [--json FILE]

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
GROUP = 32


def rotation_signs(dims):
    word = lambda number: number & 0xffffffff
    value = word((torch.arange(dims, dtype=torch.int64) + 1) * 0x9e3779b1)
    value = word((value ^ value >> 15) * 0x85ebca6b)
    value = word((value ^ value >> 13) * 0xc2b2ae35)
    return (1 - 2 * ((value ^ value >> 16) & 1)).float().cuda()


def hadamard(rows):
    """H rows / sqrt(n), n the dims: a power of two here."""
    shape, stride = rows.shape, 1
    while stride < shape[-1]:
        pairs = rows.view(-1, 2, stride)
        rows = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1).view(shape)
        stride *= 2
    return rows * shape[-1] ** -0.5


SCALES = ((torch.arange(0xf8, dtype=torch.int32) << 7).to(torch.int16).view(torch.float16).float() / 16).cuda()


def quantized(blocks, bits):
    """Blocks [block, token, dim] in codes: the pool u8 [block, byte], and what the codes stand for, rotated back."""
    count, tokens, dims = blocks.shape
    signs = rotation_signs(dims)
    groups = hadamard(blocks.float() * signs).view(count, tokens, dims // GROUP, GROUP)
    most = 127 if bits == 8 else 8
    codes_of_scales = torch.searchsorted(SCALES, groups.abs().amax(-1).contiguous() / most).clamp(max=0xf7)
    steps = SCALES[codes_of_scales].unsqueeze(-1)
    if bits == 8:
        codes = (groups / steps).round().clamp(-127, 127)
        numbers = codes * steps
        stored = codes.to(torch.int8).view(torch.uint8)
    else:
        codes = (groups / steps + 8).floor().clamp(0, 15)
        numbers = (codes - 7.5) * steps
        nibbles = codes.to(torch.uint8)
        stored = nibbles[..., :16] | nibbles[..., 16:] << 4
    pool = torch.cat((stored.reshape(count, -1), codes_of_scales.to(torch.uint8).reshape(count, -1)), dim=1)
    return pool.contiguous(), (hadamard(numbers.view(count, tokens, dims)) * signs).to(blocks.dtype)


class QuantizedProblem:
    """Decode over a problem's keys and values in codes."""

    def __init__(self, library, problem, key_bits, value_bits):
        self.library, self.problem = library, problem
        self.output = torch.full_like(problem.output, float('nan'))
        pools, self.inputs = [], []
        table = problem.tensors[5].long()
        for blocks, shape, bits in ((problem.tensors[3], problem.key.shape, key_bits),
                                    (problem.tensors[4], problem.value.shape, value_bits)):
            parts = [quantized(part, bits) for part in blocks.split(4096)]
            pools.append(torch.cat([pool for pool, _ in parts]))
            numbers = torch.cat([numbers for _, numbers in parts])
            self.inputs.append(numbers[table].view(shape))
        self.tensors = [problem.packed_query, self.output, None, *pools, *problem.tensors[5:]]
        self.sizes = integers_of([*problem.sizes, key_bits, value_bits])
        self.bytes = sum(pool.numel() for pool in pools) + 4 * problem.query.numel()

    def run(self):
        status = self.library.kv_decode_quantized(self.sizes, pointers_of(self.tensors),
                                                  ctypes.c_float(self.problem.head_dim ** -0.5), current_stream())
        assert status == 0

    def error(self):
        """Relative, against cuDNN on the numbers that the codes stand for."""
        with attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            reference = attention.functional.scaled_dot_product_attention(self.problem.query, *self.inputs, enable_gqa=True)
        reference = reference.transpose(1, 2).reshape(self.output.shape).float()
        self.run()
        self.inputs = None
        return ((self.output.float() - reference).norm() / reference.norm()).item()


CASES = {'INT8': (8, 8, {'atMost': 0.135}), 'INT8, values INT4': (8, 4, None), 'INT4': (4, 4, {'atMost': 0.09})}


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
    machine, date = machine_of(sampler.handle), time.strftime('%Y-%m-%d')
    for batch, keys, head_dim in ((8, 32768, 128), (1, 131072, 128), (1, 32768, 128), (8, 32768, 64)):
        problem = attention.Problem(True, batch, keys, head_dim, torch.float16, False)
        coded, errors = {}, {}
        for name, (key_bits, value_bits, _) in CASES.items():
            coded[name] = QuantizedProblem(library, problem, key_bits, value_bits)
            errors[name] = coded[name].error()
        functions = {name: each.run for name, each in coded.items()}
        functions['dense'] = lambda: problem.ours(library)
        functions['cudnn'] = lambda: problem.torch(SDPBackend.CUDNN_ATTENTION)
        results = timed_in_graphs(functions, options.rounds, sampler, 20)
        best = min(('PyTorch sdpa-cudnn', results['cudnn'][0]), ('our dense decode attention', results['dense'][0]),
                   key=lambda each: each[1]['median'])
        for name, each in coded.items():
            summary, clock, watts = results[name]
            row = dict(measure=f'decode {batch}x{keys}, heads of {head_dim}, {name}',
                       shapes=dict(batch=batch, keys=keys, queryHeads=attention.QUERY_HEADS,
                                   kvHeads=attention.KV_HEADS, headDim=head_dim, dtype='float16'),
                       device='cuda', kind='measured', unit='ms', better='lower', result=summary,
                       reference=dict(name=best[0], **best[1]), date=date, machine=machine,
                       gigabytesPerSecond=round(each.bytes / summary['median'] / 1e6, 1), clockMegahertz=clock,
                       watts=watts, relativeError=errors[name], denseMilliseconds=results['dense'][0]['median'])
            if CASES[name][2] and (batch, keys, head_dim) == (8, 32768, 128):
                row['target'] = CASES[name][2]
            rows.append(row)
            print(f"{row['measure']:48s} {summary['median']:.4f} ms [{summary['low']:.4f}..{summary['high']:.4f}] "
                  f"{row['gigabytesPerSecond']} GB/s {clock} MHz {watts} W, dense {row['denseMilliseconds']}, "
                  f"cudnn {results['cudnn'][0]['median']}, error {errors[name]:.2e}", flush=True)
        del problem, coded, functions
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Attention over quantized blocks on the GPU', 'rows': rows}, file, indent=1,
                      ensure_ascii=False)


main()
