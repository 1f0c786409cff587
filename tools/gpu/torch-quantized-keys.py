"""Times scores of keys in integer codes next to f16 keys that are read, and checks them against what the codes stand for.

usage: torch-quantized-keys.py [NAME=]LIBRARY... [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md); rows are those of the last one.
"""
import argparse
import ctypes
import json
import time

import torch

from measuring import Sampler, captured, current_stream, integers_of, libraries_of, machine_of, pointers_of, timed

BLOCK, KV_HEADS, QUERY_HEADS, HEAD_DIM, GROUP = 64, 8, 32, 128, 32
# Of the bytes read and the scores written, at 4.6 TB/s.
LIMITS = {8: 0.270, 4: 0.153, 3: 0.124, 2: 0.095}


class Keys:
    """A million keys of one layer in random codes, and a row of queries."""

    def __init__(self, tokens, bits, rotated):
        self.tokens, self.bits, self.rotated, self.blocks = tokens, bits, rotated, tokens // BLOCK
        count = KV_HEADS * self.blocks
        self.code_bytes = BLOCK * HEAD_DIM * bits // 8
        codes = torch.randint(0, 256, (count, self.code_bytes), device='cuda', dtype=torch.uint8)
        if bits == 8:
            codes[codes == 128] = 0
        scales = torch.randint(0x50, 0x90, (count, BLOCK * HEAD_DIM // GROUP), device='cuda', dtype=torch.uint8)
        self.keys = torch.cat((codes, scales), dim=1)
        self.query = torch.randn(QUERY_HEADS, HEAD_DIM, device='cuda', dtype=torch.float16)
        self.scores = torch.full((QUERY_HEADS, tokens), float('nan'), device='cuda')
        self.table = torch.randperm(count, device='cuda', dtype=torch.int32)
        self.tensors = [self.keys, self.query, self.scores, self.table,
                        torch.full((KV_HEADS,), tokens, device='cuda', dtype=torch.int32),
                        torch.zeros(1, device='cuda', dtype=torch.int32), torch.tensor([0, 1], device='cuda', dtype=torch.int32)]

    def run(self, library):
        sizes = integers_of([KV_HEADS, HEAD_DIM, self.bits, self.rotated, QUERY_HEADS, self.blocks])
        assert library.kv_quantized_key_scores(sizes, pointers_of(self.tensors), ctypes.c_float(HEAD_DIM ** -0.5), current_stream()) == 0

    def decoded(self, blocks):
        """What the codes of some blocks stand for, f32 [token, dim]."""
        codes = blocks[:, :self.code_bytes]
        scales = (blocks[:, self.code_bytes:].to(torch.int16) << 7).view(torch.float16).float() / 16
        if self.bits == 8:
            steps = codes.view(torch.int8).float()
        elif self.bits == 4:
            codes = codes.reshape(-1, HEAD_DIM // 32, 16)
            steps = torch.stack((codes & 15, codes >> 4), dim=2).float() - 7.5
        else:
            lower = codes[:, :BLOCK * HEAD_DIM // 4].reshape(-1, HEAD_DIM // 64, 16)
            steps = torch.stack([lower >> 2 * i & 3 for i in range(4)], dim=2)
            if self.bits == 3:
                upper = codes[:, BLOCK * HEAD_DIM // 4:].reshape(-1, HEAD_DIM // 64, 8)
                bits = torch.stack([torch.cat((upper >> i & 1, upper >> i + 4 & 1), dim=2) for i in range(4)], dim=2)
                steps = steps | bits << 2
            steps = steps.float() - (3.5 if self.bits == 3 else 1.5)
        return (steps.reshape(-1, HEAD_DIM // GROUP, GROUP) * scales.reshape(-1, HEAD_DIM // GROUP, 1)).view(-1, HEAD_DIM)

    def rotated_query(self):
        if not self.rotated:
            return self.query.float()
        signs = torch.tensor([-1.0 if negates(dim) else 1.0 for dim in range(HEAD_DIM)], device='cuda')
        row = self.query.double() * signs
        stride = 1
        while stride < HEAD_DIM:
            row = row.view(QUERY_HEADS, -1, 2, stride)
            row = torch.stack((row[:, :, 0] + row[:, :, 1], row[:, :, 0] - row[:, :, 1]), dim=2).reshape(QUERY_HEADS, HEAD_DIM)
            stride *= 2
        return (row / HEAD_DIM ** 0.5).float()

    def error(self):
        """Largest, relative to the largest score, against decoded keys in f32."""
        worst, heads, query = 0.0, QUERY_HEADS // KV_HEADS, self.rotated_query()
        table = self.table.long().view(KV_HEADS, self.blocks)
        for head in range(KV_HEADS):
            for part in torch.arange(self.blocks, device='cuda').split(1024):
                own = slice(head * heads, (head + 1) * heads)
                exact = query[own] @ self.decoded(self.keys[table[head, part]]).t() * HEAD_DIM ** -0.5
                given = self.scores[own, part[0] * BLOCK:(part[-1] + 1) * BLOCK]
                assert not given.isnan().any()
                worst = max(worst, ((given - exact).abs().max() / exact.abs().max()).item())
        return worst


def negates(dim):
    """rotation_negates of quantized-blocks.h."""
    hashed = (dim + 1) * 0x9e3779b1 & 0xffffffff
    hashed = (hashed ^ hashed >> 15) * 0x85ebca6b & 0xffffffff
    hashed = (hashed ^ hashed >> 13) * 0xc2b2ae35 & 0xffffffff
    return (hashed ^ hashed >> 16) & 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--tokens', type=int, default=1 << 20)
    parser.add_argument('--json')
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    libraries = libraries_of(options.libraries)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    machine, rows = machine_of(sampler.handle), []
    dense = torch.randn(KV_HEADS, options.tokens, HEAD_DIM, device='cuda', dtype=torch.float16)
    rounded = lambda each: {name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()}
    for bits, rotated in ((8, True), (4, True), (3, True), (2, True), (4, False)):
        keys = Keys(options.tokens, bits, rotated)
        queries = keys.query.view(KV_HEADS, -1, HEAD_DIM)
        functions = {name: captured(lambda library=library: keys.run(library), 10) for name, library in libraries.items()}
        functions['f16'] = captured(lambda: torch.matmul(dense, queries.transpose(1, 2)), 10)
        results = timed(functions, options.rounds, sampler, 1)
        results = {name: ({key: value / 10 if key != 'samples' else value for key, value in each[0].items()}, *each[1:])
                   for name, each in results.items()}
        kind = f'{bits} bits, {"rotated" if rotated else "plain"}'
        for name, library in libraries.items():
            keys.scores.fill_(float('nan'))
            keys.run(library)
            error = keys.error()
            print(f'{kind}, {name}: {results[name][0]["median"]:.4f} ms [{results[name][0]["low"]:.4f}] {results[name][1]} MHz, '
                  f'error {error:.1e}; f16 keys {results["f16"][0]["median"]:.4f}; limit {LIMITS[bits]}', flush=True)
        summary, clock, watts = results[list(libraries)[-1]]
        shapes = dict(queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, keys=options.tokens, bits=bits, rotated=rotated, dtype='float16')
        rows.append(dict(measure=f'scores of 1M keys in integer codes, {kind}', shapes=shapes, device='cuda', kind='measured', unit='ms',
                         better='lower', result=rounded(summary), reference=dict(name='PyTorch, f16 keys (matmul)', **rounded(results['f16'][0])),
                         date=time.strftime('%Y-%m-%d'), machine=machine, clockMegahertz=clock, watts=watts, error=error))
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Keys in integer codes on the GPU', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
