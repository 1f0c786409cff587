"""Times scores of keys in codes next to PyTorch's table gather and next to f16 keys that are read, and encoding next to the
prefill attention of as many tokens; checks scores against decoded keys in f32, and codes against all centroids.

usage: torch-coded-keys.py [NAME=]LIBRARY... [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md); rows are those of the last one.
"""
import argparse
import ctypes
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from measuring import Sampler, captured, current_stream, integers_of, libraries_of, machine_of, pointers_of, timed

BLOCK, KV_HEADS, QUERY_HEADS, HEAD_DIM, CENTROIDS, BITS = 64, 8, 32, 128, 8192, 13
PARTS = 256  # of ranges of scores
TAU = 0.9


class Keys:
    """`tokens` keys of one layer, dense [kvHead * block, token, dim] and in codes."""

    def __init__(self, library, tokens, sub_dim):
        self.tokens, self.sub_dim, self.groups = tokens, sub_dim, HEAD_DIM // sub_dim
        self.blocks = tokens // BLOCK
        count = KV_HEADS * self.blocks
        # Centroids as close to each other as the keys' density makes them.
        spread = ((sub_dim + 2) / sub_dim) ** 0.5
        self.centroids = (torch.randn(KV_HEADS, 1, CENTROIDS, sub_dim, device='cuda') * spread).half()
        self.keys = torch.randn(count, BLOCK, HEAD_DIM, device='cuda', dtype=torch.float16)
        code_bytes = count * BLOCK * self.groups * BITS // 8
        # The codes of all blocks, and then 8 bytes of each.
        self.pool = torch.full((code_bytes + 8 * count,), 0xa5, device='cuda', dtype=torch.uint8)
        self.codes = self.pool[:code_bytes].view(count, -1)
        self.order = torch.arange(count, device='cuda', dtype=torch.int32)
        self.heads = (self.order // self.blocks).int()
        bytes_of_index = library.kv_centroid_index_bytes(integers_of([CENTROIDS, sub_dim]))
        host, index = self.centroids.cpu(), torch.zeros(KV_HEADS, bytes_of_index, dtype=torch.uint8)
        library.kv_index_centroids(integers_of([CENTROIDS, sub_dim, KV_HEADS]), pointers_of([host, index]))
        self.index = index.cuda()
        self.sizes = [KV_HEADS, HEAD_DIM, sub_dim, CENTROIDS, BITS]

    def encode(self, library):
        tensors = [self.pool, self.centroids, self.keys, self.index, self.order, self.order, self.heads]
        assert library.kv_encode_keys(integers_of([*self.sizes, len(self.order)]), pointers_of(tensors), current_stream()) == 0

    def nearest(self, head, rows):
        """The codes [token, group] of some dense rows [token, dim] of a kv head, by comparing all centroids as encode-keys does."""
        x = rows.float().view(-1, 1, self.sub_dim)
        distance = 0
        for d in range(self.sub_dim):
            distance = distance + (x[..., d] - self.centroids[head, 0, :, d].float()) ** 2
        # argmin does not say which of equal ones it takes.
        least = distance.amin(1, keepdim=True)
        return (distance == least).int().argmax(1).view(-1, self.groups)

    def unpacked(self, blocks):
        """The codes [block, token, group] of coded blocks."""
        words = blocks.view(torch.int32).view(-1, self.groups // 16, BITS, 8, 4).long() & 0xffffffff
        words = torch.cat((words, torch.zeros_like(words[:, :, :1])), dim=2)
        place = torch.arange(32, device='cuda')
        bit = place * BITS
        both = words[:, :, bit // 32] | words[:, :, bit // 32 + 1] << 32
        codes = both >> (bit % 32).view(1, 1, 32, 1, 1) & (2 ** BITS - 1)
        # [block, chunk, tile, t, g, octet, quad] to [block, tile, octet, t, chunk, quad, g]
        codes = codes.view(-1, self.groups // 16, 2, 4, 4, 8, 4).permute(0, 2, 5, 3, 1, 6, 4)
        return codes.reshape(len(blocks), BLOCK, self.groups)

    def check_codes(self):
        chosen = torch.randint(0, KV_HEADS * self.blocks, (12,)).tolist()
        wrong = 0
        for block in chosen:
            codes = self.unpacked(self.codes[block:block + 1])[0]
            wrong += (codes != self.nearest(block // self.blocks, self.keys[block])).sum().item()
        return wrong


class Scores:
    """A row's scores with all keys, and the choice of tokens by them."""

    def __init__(self, keys):
        self.keys = keys
        self.query = torch.randn(QUERY_HEADS, HEAD_DIM, device='cuda', dtype=torch.float16)
        self.scores = torch.full((QUERY_HEADS, keys.tokens), float('nan'), device='cuda')
        table = torch.randperm(KV_HEADS * keys.blocks, device='cuda', dtype=torch.int32)
        # Blocks lie anywhere in the pool.
        keys.codes[table.long()] = keys.codes.clone()
        self.tensors = [keys.pool, keys.centroids, self.query, self.scores, table,
                        torch.full((KV_HEADS,), keys.tokens, device='cuda', dtype=torch.int32),
                        torch.zeros(1, device='cuda', dtype=torch.int32), torch.tensor([0, 1], device='cuda', dtype=torch.int32)]
        self.ranges = torch.full((QUERY_HEADS, PARTS, 2), float('nan'), device='cuda')
        self.sizes = integers_of([*keys.sizes, QUERY_HEADS, keys.blocks, 0])

    def run(self, library):
        assert library.kv_coded_key_scores(self.sizes, pointers_of(self.tensors), ctypes.c_float(HEAD_DIM ** -0.5), current_stream()) == 0

    def run_and_choose(self, library):
        """Scores of a spread with which lists have about 5 % of the tokens, and the lists, on the device."""
        scale = ctypes.c_float(3.5 * HEAD_DIM ** -0.5)
        sizes = integers_of([*self.keys.sizes, QUERY_HEADS, self.keys.blocks, PARTS])
        assert library.kv_coded_key_scores(sizes, pointers_of([*self.tensors, self.ranges]), scale, current_stream()) == 0
        assert library.kv_select_by_mass(self.list_sizes, pointers_of(self.list_tensors), ctypes.c_double(TAU), current_stream()) == 0

    def make_lists(self):
        tokens, capacity, blocks = self.keys.tokens, self.keys.tokens // 10, KV_HEADS * self.keys.blocks
        self.counts = torch.empty(KV_HEADS, device='cuda', dtype=torch.int32)
        self.list_tensors = [self.scores, torch.zeros(QUERY_HEADS, device='cuda'), *self.tensors[4:],
                             torch.empty(KV_HEADS, capacity, device='cuda', dtype=torch.int32),
                             torch.empty(KV_HEADS, capacity, QUERY_HEADS // KV_HEADS, device='cuda'), self.counts,
                             torch.empty(QUERY_HEADS, device='cuda'), self.ranges]
        self.list_sizes = integers_of([1, QUERY_HEADS, KV_HEADS, tokens, self.keys.blocks, blocks, capacity, PARTS])

    def sort(self):
        """PyTorch's choice: a sort of all shares of a head."""
        shares, order = torch.softmax(3.5 * self.scores, dim=-1).sort(dim=-1, descending=True)
        taken = shares.cumsum(dim=-1) - shares < TAU
        return torch.zeros_like(taken).scatter_(1, order, taken)

    def codes(self):
        """[kvHead, group, token], as int64: what PyTorch gathers with."""
        keys = self.keys
        table = self.tensors[4].long().view(KV_HEADS, keys.blocks)
        all_codes = torch.empty(KV_HEADS, keys.groups, keys.tokens, device='cuda', dtype=torch.int64)
        for head in range(KV_HEADS):
            for part in torch.arange(keys.blocks, device='cuda').split(1024):
                codes = keys.unpacked(keys.codes[table[head, part]]).view(-1, keys.groups)
                all_codes[head, :, part[0] * BLOCK:(part[-1] + 1) * BLOCK] = codes.t()
        return all_codes

    def gather(self, codes):
        """Equation 3 as a PyTorch user would write it: a table for each query head, f16, and a gather."""
        keys, heads = self.keys, QUERY_HEADS // KV_HEADS
        for head in range(KV_HEADS):
            for query in range(head * heads, (head + 1) * heads):
                table = self.query[query].view(keys.groups, keys.sub_dim) @ keys.centroids[head, 0].t()
                torch.sum(torch.gather(table, 1, codes[head]), 0, dtype=torch.float32, out=self.gathered[query])

    def error(self, codes):
        """Largest, relative to the largest score, against decoded keys in f32."""
        worst, heads = 0.0, QUERY_HEADS // KV_HEADS
        for head in range(KV_HEADS):
            for tokens in torch.arange(self.keys.tokens, device='cuda').split(65536):
                decoded = self.keys.centroids[head, 0].float()[codes[head][:, tokens].t()].reshape(len(tokens), HEAD_DIM)
                own = slice(head * heads, (head + 1) * heads)
                exact = self.query[own].float() @ decoded.t() * HEAD_DIM ** -0.5
                given = self.scores[own, tokens[0]:tokens[-1] + 1]
                assert not given.isnan().any()
                worst = max(worst, ((given - exact).abs().max() / exact.abs().max()).item())
        return worst


def row_of(measure, shapes, result, reference, machine, target, **more):
    summary, clock, watts = result
    rounded = lambda each: {name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()}
    return dict(measure=measure, shapes=shapes, device='cuda', kind='measured', unit='ms', better='lower', result=rounded(summary),
                reference=dict(name=reference[0], **rounded(reference[1][0])), date=time.strftime('%Y-%m-%d'), machine=machine,
                clockMegahertz=clock, watts=watts, target=dict(atMost=target), **more)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--tokens', type=int, default=1 << 20)
    parser.add_argument('--json')
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    libraries = libraries_of(options.libraries)
    for library in libraries.values():
        library.kv_centroid_index_bytes.restype = ctypes.c_int64
    last = list(libraries.values())[-1]
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    machine, rows = machine_of(sampler.handle), []
    shapes = dict(queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, centroids=CENTROIDS, bits=BITS, dtype='float16')
    for sub_dim, target, with_lists in ((2, 0.32, 0.48), (4, 0.28, 0.44)):
        keys = Keys(last, options.tokens, sub_dim)
        keys.encode(last)
        torch.cuda.synchronize()
        wrong = keys.check_codes()
        scores = Scores(keys)
        codes = scores.codes()
        scores.gathered = torch.empty(QUERY_HEADS, keys.tokens, device='cuda')
        dense = keys.keys.view(KV_HEADS, keys.tokens, HEAD_DIM)
        queries = scores.query.view(KV_HEADS, -1, HEAD_DIM)
        functions = {name: captured(lambda library=library: scores.run(library), 10) for name, library in libraries.items()}
        scores.make_lists()
        functions |= {f'{name}, lists': captured(lambda library=library: scores.run_and_choose(library), 10)
                      for name, library in libraries.items()}
        functions['f16'] = captured(lambda: torch.matmul(dense, queries.transpose(1, 2)), 10)
        results = timed(functions, options.rounds, sampler, 1)
        results = {name: ({key: value / 10 if key != 'samples' else value for key, value in each[0].items()}, *each[1:])
                   for name, each in results.items()}
        results |= timed({'gather': lambda: scores.gather(codes)}, 3, sampler, 1)
        results |= timed({'gather and sort': lambda: (scores.gather(codes), scores.sort())}, 3, sampler, 1)
        scores.run_and_choose(last)
        chosen = round(scores.counts.sum().item() / KV_HEADS / keys.tokens, 4)
        for name, library in libraries.items():
            scores.scores.fill_(float('nan'))
            scores.run(library)
            print(f'{keys.groups} groups, {name}: {results[name][0]["median"]:.4f} ms [{results[name][0]["low"]:.4f}] '
                  f'{results[name][1]} MHz, error {scores.error(codes):.1e}; '
                  f'with lists {results[f"{name}, lists"][0]["median"]:.4f} ms', flush=True)
        print(f'  f16 keys {results["f16"][0]["median"]:.4f}, gather {results["gather"][0]["median"]:.3f} ms, '
              f'{wrong} wrong codes', flush=True)
        moved = keys.codes.numel() + 4 * scores.scores.numel()
        rows.append(row_of(f'scores of {keys.tokens} tokens in codes, {keys.groups} groups', dict(keys=keys.tokens, groups=keys.groups, **shapes),
                           results[list(libraries)[-1]], ('PyTorch gather', results['gather']), machine, target,
                           relativeError=scores.error(codes), denseMilliseconds=round(results['f16'][0]['median'], 4),
                           gigabytesPerSecond=round(moved / results[list(libraries)[-1]][0]['median'] / 1e6, 1)))
        rows.append(row_of(f'scores of {keys.tokens} tokens in codes, {keys.groups} groups, and lists, in one graph',
                           dict(keys=keys.tokens, groups=keys.groups, tau=TAU, chosen=chosen, **shapes),
                           results[f'{list(libraries)[-1]}, lists'], ('PyTorch gather and sort', results['gather and sort']), machine, with_lists))
        del keys, scores, codes, dense, functions
        torch.cuda.empty_cache()
    query = torch.randn(1, QUERY_HEADS, 32768, HEAD_DIM, device='cuda', dtype=torch.float16)
    key = torch.randn(1, KV_HEADS, 32768, HEAD_DIM, device='cuda', dtype=torch.float16)

    def attend():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    for sub_dim in (2, 4):
        keys = Keys(last, 32768, sub_dim)
        functions = {name: lambda library=library: keys.encode(library) for name, library in libraries.items()}
        results = timed(functions | {'attention': attend}, options.rounds, sampler, 3)
        wrong = keys.check_codes()
        for name in libraries:
            print(f'encoding, {keys.groups} groups, {name}: {results[name][0]["median"]:.4f} ms, {wrong} wrong; '
                  f'attention {results["attention"][0]["median"]:.2f}', flush=True)
        rows.append(row_of(f'encoding 32768 tokens, {keys.groups} groups', dict(keys=32768, groups=keys.groups, **shapes),
                           results[list(libraries)[-1]], ('cuDNN, prefill attention', results['attention']), machine, 0.6, wrongCodes=wrong))
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Keys in codes on the GPU', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
