"""Times attention of a prompt that is read in chunks, each behind all that was read before it, next to one piece
(Fig. 16b of SparseServe). Layer segments read one piece.

usage: torch-prompt-chunks.py LIBRARY [--tokens N] [--rounds N] [--json FILE]
"""
import argparse
import ctypes
import json
import time

import torch

from measuring import Sampler, captured, current_stream, integers_of, libraries_of, machine_of, pointers_of, timed

HEAD_DIM, BLOCK_TOKENS = 128, 64
SHAPES = {'32/8 heads': (32, 8), '32/32 heads': (32, 32)}
CHUNKS = (512, 1024, 2048, 4096)


class Prompt:
    def __init__(self, tokens, query_heads, kv_heads):
        self.tokens, self.query_heads, self.kv_heads = tokens, query_heads, kv_heads
        random = lambda heads: torch.randn(1, heads, tokens, HEAD_DIM, device='cuda', dtype=torch.float16)
        self.query, self.key, self.value = random(query_heads), random(kv_heads), random(kv_heads)
        blocks = kv_heads * tokens // BLOCK_TOKENS
        self.table = torch.randperm(blocks, device='cuda')
        paged = lambda tensor: torch.empty_like(tensor).view(blocks, BLOCK_TOKENS, HEAD_DIM).index_copy_(
            0, self.table, tensor.view(blocks, BLOCK_TOKENS, HEAD_DIM))
        self.packed = self.query.transpose(1, 2).contiguous().view(tokens, query_heads, HEAD_DIM)
        self.output = torch.full_like(self.packed, float('nan'))
        self.int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        self.cache = [paged(self.key), paged(self.value), self.table.to(torch.int32)]
        self.work = [torch.zeros(size << 20, device='cuda', dtype=torch.uint8) for size in (64, 1)]
        self.blocks = blocks

    def ours(self, library, chunk):
        """A function that attends to all chunks in turn."""
        calls = []
        for first in range(0, self.tokens, chunk):
            end = min(first + chunk, self.tokens)
            tensors = [self.packed[first:end], self.output[first:end], None, *self.cache, self.int32([end] * self.kv_heads),
                       self.int32([0]), self.int32([0, end - first]), *self.work]
            sizes = integers_of([0, end - first, 1, self.query_heads, self.kv_heads, HEAD_DIM, BLOCK_TOKENS,
                                 self.tokens // BLOCK_TOKENS, 1, 0, self.blocks])
            calls.append((sizes, pointers_of(tensors), tensors))

        def attend():
            stream = current_stream()
            for sizes, pointers, _ in calls:
                assert library.kv_attention(sizes, pointers, ctypes.c_float(HEAD_DIM ** -0.5), stream) == 0
        return attend


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--tokens', type=int, default=32768)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json')
    options = parser.parse_args()
    (library,) = libraries_of(options.libraries).values()
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    rows = []
    for shape, heads in SHAPES.items():
        prompt = Prompt(options.tokens, *heads)
        whole = prompt.ours(library, options.tokens)
        whole()
        expected = prompt.output.clone()
        alive = [whole]  # graphs read what the functions hold
        functions = {'whole': captured(whole, 1)}
        for chunk in CHUNKS:
            attend = prompt.ours(library, chunk)
            prompt.output.fill_(float('nan'))
            attend()
            error = ((prompt.output.float() - expected.float()).norm() / expected.float().norm()).item()
            assert error < 1e-3, (chunk, error)
            alive.append(attend)
            functions[chunk] = captured(attend, 1)
        results = timed(functions, options.rounds, sampler, 2)
        for name, (result, clock, watts) in results.items():
            print(f"{shape} {name}: {result['median']:.3f} ms, {result['median'] / results['whole'][0]['median']:.3f} x, {clock} MHz, {watts} W", flush=True)
        for chunk in CHUNKS:
            result, clock, watts = results[chunk]
            rows.append(dict(
                measure=f'attention of a prompt of {options.tokens} tokens in chunks of {chunk}, {shape}',
                shapes=dict(tokens=options.tokens, queryHeads=heads[0], kvHeads=heads[1], headDim=HEAD_DIM, dtype='float16'),
                device='cuda', kind='measured', unit='ms', better='lower', result=result,
                reference=dict(name='in one piece, as in layer segments', **results['whole'][0]),
                date=time.strftime('%Y-%m-%d'), machine=machine_of(sampler.handle), clockMegahertz=clock, watts=watts))
        del prompt, functions, expected, alive
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, 'w') as file:
            json.dump(dict(rows=rows), file, indent=1, ensure_ascii=False)


if __name__ == '__main__':
    main()
