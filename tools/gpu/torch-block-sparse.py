"""Times block-sparse attention next to PyTorch's flex_attention on the same lists, and next to our dense attention,
interleaved in one process, and checks them against each other.

usage: torch-block-sparse.py LIBRARY [NAME=LIBRARY ...] [--rounds N] [--only TEXT] [--tokens N] [--autotune] [--no-flex]
                             [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md), of which several builds may take turns. With --autotune
flex_attention is compiled as max-autotune, which takes half a minute.
"""
import argparse
import ctypes
import json
import time

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from measuring import Sampler, current_stream, integers_of, libraries_of, machine_of, pointers_of, time_once, timed

QUERY_HEADS, KV_HEADS, HEAD_DIM, QUERY_TILE, KEY_BLOCK = 32, 8, 128, 128, 64


def causal_blocks(tokens):
    """[tile, block]: the blocks that a tile of rows sees."""
    tiles, blocks = (torch.arange(tokens // size, device='cuda') for size in (QUERY_TILE, KEY_BLOCK))
    return blocks[None, :] * KEY_BLOCK < (tiles[:, None] + 1) * QUERY_TILE


def random_mask(tokens, density):
    """[head, tile, block]: the first block, those of the diagonal, and as many random ones as make up the density."""
    seen = causal_blocks(tokens)
    tile = torch.arange(seen.shape[0], device='cuda')
    mask = torch.rand(QUERY_HEADS, *seen.shape, device='cuda') < density - 3 * len(tile) / float(seen.sum())
    for block in (torch.zeros_like(tile), 2 * tile, 2 * tile + 1):
        mask[:, tile, block] = True
    return mask & seen


def lines_mask(tokens, density):
    """[head, tile, block]: the first block, those of the diagonal, and vertical lines and lines along the diagonal, of a
    number that differs from head to head, as make up the density."""
    seen = causal_blocks(tokens)
    tile, block = (torch.arange(size, device='cuda') for size in seen.shape)
    lag = (2 * tile[:, None] + 1 - block[None, :]).clamp(min=0)
    vertical, along = torch.rand(2, QUERY_HEADS, len(block), device='cuda')
    vertical[:, 0] = along[:, :2] = 0
    weight = 0.5 + torch.arange(QUERY_HEADS, device='cuda')[:, None] / (QUERY_HEADS - 1)

    def drawn(share):
        taken = zip(vertical < share * weight, along < share * weight)
        return torch.stack([(columns[None, :] | lags[lag]) & seen for columns, lags in taken])

    low, high = 0.0, density
    for _ in range(16):
        share = (low + high) / 2
        low, high = (share, high) if drawn(share).sum() < density * QUERY_HEADS * seen.sum() else (low, share)
    return drawn(high)


def lists_of(mask):
    """The ascending lists of a mask [..., block], padded, and their lengths."""
    counts = mask.sum(-1, dtype=torch.int32)
    order = torch.argsort(mask.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return order[..., :max(1, int(counts.max()))].contiguous(), counts


class Problem:
    def __init__(self, tokens):
        self.tokens = tokens
        random = lambda heads: torch.randn(1, heads, tokens, HEAD_DIM, device='cuda', dtype=torch.float16)
        self.query, self.key, self.value = random(QUERY_HEADS), random(KV_HEADS), random(KV_HEADS)
        blocks = KV_HEADS * tokens // KEY_BLOCK
        table = torch.randperm(blocks, device='cuda')
        paged = lambda tensor: torch.empty_like(tensor).view(blocks, KEY_BLOCK, HEAD_DIM).index_copy_(
            0, table, tensor.view(blocks, KEY_BLOCK, HEAD_DIM))
        int32 = lambda values: torch.tensor(values, device='cuda', dtype=torch.int32)
        self.packed_query = self.query.transpose(1, 2).contiguous().view(tokens, QUERY_HEADS, HEAD_DIM)
        self.output = torch.full_like(self.packed_query, float('nan'))
        self.log_sum_exp = torch.full((tokens, QUERY_HEADS), float('nan'), device='cuda')
        workspace = torch.zeros(64 << 20, device='cuda', dtype=torch.uint8)
        self.tensors = [self.packed_query, self.output, self.log_sum_exp, paged(self.key), paged(self.value),
                        table.to(torch.int32), int32([tokens] * KV_HEADS), int32([0]), int32([0, tokens]), workspace, None]
        self.sizes = [0, tokens, 1, QUERY_HEADS, KV_HEADS, HEAD_DIM, KEY_BLOCK, tokens // KEY_BLOCK, 1, 0, blocks]

    def call(self, function, sizes, tensors):
        status = function(integers_of(sizes), pointers_of(tensors), ctypes.c_float(HEAD_DIM ** -0.5), current_stream())
        assert status == 0

    def dense(self, library):
        self.call(library.kv_attention, self.sizes, self.tensors)

    def sparse(self, library, listed, counts):
        self.call(library.kv_block_sparse_attention, [*self.sizes, counts.shape[1], listed.shape[2]],
                  [*self.tensors, listed, counts])

    def results(self, function):
        self.output.fill_(float('nan'))
        self.log_sum_exp.fill_(float('nan'))
        function()
        return self.output.clone(), self.log_sum_exp.clone()


def causal(batch, head, query, key):
    return query >= key


def flex_of(problem, mask, compiled):
    """flex_attention over the mask; only blocks at the diagonal are masked inside."""
    tiles, blocks = mask.shape[1:]
    whole = (torch.arange(blocks, device='cuda')[None, :] + 1) * KEY_BLOCK <= (
        torch.arange(tiles, device='cuda')[:, None] * QUERY_TILE + 1)
    pad = lambda listed: torch.nn.functional.pad(listed, (0, blocks - listed.shape[-1]))
    lists = []
    for part in (mask & ~whole, mask & whole):
        listed, counts = lists_of(part)
        lists += [counts[None], pad(listed)[None]]
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(QUERY_TILE, KEY_BLOCK),
                                          mask_mod=causal, seq_lengths=(problem.tokens, problem.tokens))
    return lambda: compiled(problem.query, problem.key, problem.value, block_mask=block_mask, enable_gqa=True)


def exact_errors(problem, listed, counts, results, rows=24):
    """The largest difference from float64, of outputs and of log-sum-exps, over random rows."""
    output, lse = results
    errors = [0.0, 0.0]
    for _ in range(rows):
        row, head = int(torch.randint(problem.tokens, ())), int(torch.randint(QUERY_HEADS, ()))
        blocks = listed[head, row // QUERY_TILE, :int(counts[head, row // QUERY_TILE])].long()
        keys = (blocks[:, None] * KEY_BLOCK + torch.arange(KEY_BLOCK, device='cuda')).flatten()
        keys = keys[keys <= row]
        kv_head = head // (QUERY_HEADS // KV_HEADS)
        scores = problem.key[0, kv_head, keys].double() @ problem.query[0, head, row].double() * HEAD_DIM ** -0.5
        exact = scores.softmax(0) @ problem.value[0, kv_head, keys].double()
        errors[0] = max(errors[0], float((output[row, head].double() - exact).abs().max()))
        errors[1] = max(errors[1], float((lse[row, head].double() - scores.logsumexp(0)).abs()))
    return errors


def measure(label, problem, mask, libraries, compiled, rounds, sampler):
    listed, counts = lists_of(mask)
    density = float(counts.sum() / (causal_blocks(problem.tokens).sum() * QUERY_HEADS))
    functions, details = {}, {}
    for name, library in libraries.items():
        functions[name] = lambda library=library: problem.sparse(library, listed, counts)
        results = problem.results(functions[name])
        details[name] = exact_errors(problem, listed, counts, results)
        if density == 1:
            functions[f'{name} dense'] = lambda library=library: problem.dense(library)
            same = [torch.equal(one, other) for one, other in zip(results, problem.results(functions[f'{name} dense']))]
            assert all(same), f'{label}: {name} has other bits than dense attention'
    if compiled is not None:
        functions['flex'] = flex_of(problem, mask, compiled)
        output = functions['flex']()[0].transpose(0, 1)
        details['flex'] = exact_errors(problem, listed, counts, (output, results[1]))[:1]
    next(iter(functions.values()))()
    repeats = max(1, min(20, int(30 / time_once(next(iter(functions.values())), 1))))
    rows = []
    for name, (result, clock, watts) in timed(functions, rounds, sampler, repeats).items():
        flops = 4 * HEAD_DIM * QUERY_TILE * KEY_BLOCK * int(counts.sum())
        rows.append(dict(case=label, kernel=name, tokens=problem.tokens, density=round(density, 4), result=result,
                         teraflops=round(flops / result['median'] / 1e9, 1), clockMegahertz=clock, watts=watts,
                         errors=details.get(name)))
        print(' '.join(f'{key}={value}' for key, value in rows[-1].items()), flush=True)
    return rows


TARGETS = {'random 3 %': {'atMost': 7.6}, 'random 5 %': {'atMost': 12.4}, 'random 10 %': {'atMost': 24},
           'lines 3 %': {'atMost': 7.6}, 'lines 5 %': {'atMost': 12.4}, 'lines 10 %': {'atMost': 24}}


def comparisons(rows, machine, date, rival):
    """Rows as docs/benchmarks/ keeps them: the kernel named kv against flex_attention, or against dense attention."""
    kept = []
    for case in dict.fromkeys(row['case'] for row in rows):
        by_name = {row['kernel']: row for row in rows if row['case'] == case}
        ours, other = by_name['kv'], by_name.get('kv dense') or by_name.get('flex')
        shapes = dict(tokens=ours['tokens'], queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, dtype='float16',
                      density=ours['density'])
        row = dict(measure=f"block-sparse attention, {case}", shapes=shapes, device='cuda', kind='measured', unit='ms',
                   better='lower', result=ours['result'], date=date, machine=machine)
        if other is not None:
            row['reference'] = dict(name='our dense attention' if 'kv dense' in by_name else rival, **other['result'])
        if case == 'all blocks':
            row['target'] = {'ratio': 0.98}
        elif case in TARGETS and ours['tokens'] == 131072:
            row['target'] = TARGETS[case]
        row.update({name: ours[name] for name in ('teraflops', 'clockMegahertz', 'watts')})
        kept.append(row)
    return {'title': 'Block-sparse attention on the GPU', 'rows': kept}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--tokens', type=int, default=131072)
    parser.add_argument('--only', default='')
    parser.add_argument('--autotune', action='store_true')
    parser.add_argument('--no-flex', action='store_true')
    parser.add_argument('--json')
    options = parser.parse_args()
    libraries = libraries_of(options.libraries)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    mode = 'max-autotune-no-cudagraphs' if options.autotune else 'default'
    compiled = None if options.no_flex else torch.compile(flex_attention, mode=mode)
    problem = Problem(options.tokens)
    cases = {'all blocks': lambda: causal_blocks(options.tokens).expand(QUERY_HEADS, -1, -1)}
    for percent in (3, 5, 10):
        for name, mask_of in (('random', random_mask), ('lines', lines_mask)):
            cases[f'{name} {percent} %'] = lambda mask_of=mask_of, percent=percent: mask_of(options.tokens, percent / 100)
    rows = []
    for label, mask_of in cases.items():
        if options.only and not any(text in label for text in options.only.split(',')):
            continue
        rows += measure(label, problem, mask_of(), libraries, compiled if label != 'all blocks' else None, options.rounds,
                        sampler)
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, 'w') as file:
                rival = 'PyTorch flex_attention' + (', max-autotune' if options.autotune else '')
                json.dump(comparisons(rows, machine_of(sampler.handle), time.strftime('%Y-%m-%d'), rival), file, indent=1,
                          ensure_ascii=False)


if __name__ == '__main__':
    main()
