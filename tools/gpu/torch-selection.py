"""Times observation scores, token selection and gathering beside SnapKV and HBW-KV as one writes them with PyTorch,
interleaved in one process, and checks them.

usage: torch-selection.py LIBRARY [--check-only] [--rounds N] [--only TEXT] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md). Checks compare random small cases of every
option with references that are written plainly, scores in float64 and selections exactly.
"""
import argparse
import ctypes
import itertools
import json
import random
import statistics
import time

import numpy
import torch
import torch.nn.functional as functional

from measuring import Sampler, captured, current_stream, integers_of, machine_of, pointers_of, time_once

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FULL, PREFIX = 0, 1
MEAN, MAXIMUM, SUM = 0, 1, 2
NO_POOLING, AVERAGE, LARGEST = 0, 1, 2


def int32(values):
    return torch.tensor(values, device='cuda', dtype=torch.int32)


class Cache:
    """Keys and values of several sequences in blocks of one pool, in random order; what holds no token is NaN."""

    def __init__(self, library, lengths, kv_heads, query_heads, dim, dtype, queries, block_tokens=64):
        self.library, self.lengths, self.kv_heads, self.query_heads = library, lengths, kv_heads, query_heads
        self.dim, self.dtype, self.queries, self.block_tokens = dim, dtype, queries, block_tokens
        batch, longest = len(lengths), max(max(row) for row in lengths)
        self.width = max(1, -(-longest // block_tokens))
        self.blocks = batch * kv_heads * self.width
        table = torch.randperm(self.blocks, device='cuda').view(batch, kv_heads, self.width)
        self.table = table.to(torch.int32)
        self.counts = int32(lengths)
        pool = lambda: torch.full((self.blocks, block_tokens, dim), float('nan'), device='cuda', dtype=dtype)
        self.key_pool, self.value_pool = pool(), pool()
        rows = lambda: [[torch.randn(n, dim, device='cuda', dtype=dtype) for n in row] for row in lengths]
        self.keys, self.values = rows(), rows()
        for pool, tensors in ((self.key_pool, self.keys), (self.value_pool, self.values)):
            for entry, head in itertools.product(range(batch), range(kv_heads)):
                for first in range(0, lengths[entry][head], block_tokens):
                    part = tensors[entry][head][first:first + block_tokens]
                    pool[table[entry, head, first // block_tokens], :part.shape[0]] = part
        self.query = torch.randn(sum(queries) + 3, query_heads, dim, device='cuda', dtype=dtype)
        self.query[sum(queries):] = float('nan')
        self.starts = int32([sum(queries[:entry]) for entry in range(batch + 1)])
        self.slots = int32(list(range(batch)))

    def score(self, scores, domain=FULL, reduction=MEAN):
        status = self.library.kv_observation_scores(
            integers_of([len(self.lengths), self.query.shape[0], self.kv_heads, self.query_heads, self.dim,
                         self.block_tokens, self.width, self.blocks, len(self.lengths), domain, reduction, scores.shape[-1],
                         DTYPES[self.dtype]]),
            pointers_of([self.starts, self.slots, self.table, self.counts, self.query, self.key_pool, scores]),
            ctypes.c_float(self.dim ** -0.5), current_stream())
        assert status == 0

    def gather(self, entry, indices, counts):
        status = self.library.kv_gather_kv(
            integers_of([self.kv_heads, self.dim, self.block_tokens, self.width, indices.shape[-1], DTYPES[self.dtype]]),
            pointers_of([self.key_pool, self.value_pool, self.table[entry], self.counts[entry], indices, counts]), current_stream())
        assert status == 0

    def held(self, pool, entry, head):
        blocks = self.table[entry, head].long()
        return pool[blocks].reshape(-1, self.dim)[:self.counts[entry, head]]


class Options:
    def __init__(self, rounds=(1, 8), overlapping=False, fill=True, sinks=0, pooling=NO_POOLING, pool_tokens=1):
        self.rounds, self.overlapping, self.fill, self.sinks = rounds, overlapping, fill, sinks
        self.pooling, self.pool_tokens = pooling, pool_tokens


def select(library, scores, rows, indices, counts, options):
    status = library.kv_select_tokens(
        integers_of([rows.shape[0], scores.shape[-1], indices.shape[-1], options.overlapping, options.fill, options.sinks,
                     options.pooling, options.pool_tokens, *options.rounds]),
        len(options.rounds), pointers_of([scores, rows, indices, counts]), current_stream())
    assert status == 0


# ---- References ----

def reference_scores(cache, entry, head, domain, reduction):
    queries, group = cache.queries[entry], cache.query_heads // cache.kv_heads
    keys = cache.keys[entry][head].double()
    prefix = max(0, keys.shape[0] - queries)
    first = sum(cache.queries[:entry])
    weights = []
    for query_head in range(head * group, (head + 1) * group):
        query = cache.query[first:first + queries, query_head].double()
        logits = query @ keys.T * cache.dim ** -0.5
        if domain == PREFIX:
            logits = logits[:, :prefix]
        else:
            position = torch.arange(keys.shape[0], device='cuda')
            last = keys.shape[0] - queries + torch.arange(queries, device='cuda')
            logits.masked_fill_(position[None] > last[:, None], float('-inf'))
        weights.append(torch.softmax(logits, dim=-1)[:, :prefix].sum(dim=0))
    stacked = torch.stack(weights)
    return stacked.amax(dim=0) if reduction == MAXIMUM else stacked.sum(dim=0) / (group if reduction == MEAN else 1)


def best_first(scores):
    return numpy.lexsort((numpy.arange(len(scores)), -scores))


def take(order, taken, quota, group_of, room):
    """Takes blocks in order while their groups have room. Returns what is left of the quota."""
    left = {}
    for block in order:
        if quota == 0:
            break
        group = group_of(int(block))
        if not taken[block] and left.get(group, room) > 0:
            left[group] = left.get(group, room) - 1
            taken[block] = True
            quota -= 1
    return quota


def take_round(order, taken, groups, quota):
    blocks = len(taken)
    groups = min(groups, blocks)
    group_of = lambda block: ((block + 1) * groups - 1) // blocks
    for room in (quota // groups, 1):
        quota = take(order, taken, quota, group_of, room)
    return take(order, taken, quota, lambda block: 0, quota)


def reference_selection(scores, prefix, window, capacity, block_tokens, options):
    scores = numpy.where(numpy.isnan(scores[:prefix]), -numpy.inf, scores[:prefix]).astype(numpy.float32)
    if options.pooling != NO_POOLING:
        average = options.pooling == AVERAGE
        pooled = numpy.full_like(scores, 0 if average else -numpy.inf)
        combine = numpy.add if average else numpy.maximum
        for offset in range(-(options.pool_tokens // 2), options.pool_tokens // 2 + 1):
            inside = slice(max(0, -offset), max(0, prefix - max(0, offset)))
            near = scores[max(0, offset):][:pooled[inside].size]
            pooled[inside] = combine(pooled[inside], near)
        scores = numpy.where(numpy.isnan(pooled), -numpy.inf, pooled)
    wanted = min(max(capacity - window, 0), prefix)
    sinks = min(options.sinks, wanted)
    scores, tokens, wanted = scores[sinks:], prefix - sinks, wanted - sinks
    kept = numpy.full(tokens, wanted == tokens)
    if 0 < wanted < tokens:
        size = min(block_tokens, wanted)
        blocks = -(-tokens // size)
        means = numpy.array([scores[b * size:(b + 1) * size].astype(numpy.float64).mean() for b in range(blocks)])
        order = best_first(means.astype(numpy.float32))
        quota, carried = min(wanted // size, blocks), 0
        taken = numpy.zeros(blocks, bool)
        for index, groups in enumerate(options.rounds):
            share = quota // len(options.rounds) + (index < quota % len(options.rounds))
            if options.overlapping:
                of_round = numpy.zeros(blocks, bool)
                take_round(order, of_round, groups, share)
                taken |= of_round
            else:
                carried = take_round(order, taken, groups, share + carried)
        kept = numpy.repeat(taken, size)[:tokens]
        if options.fill:
            rest = [i for i in best_first(scores) if not kept[i]]
            kept[rest[:wanted - kept.sum()]] = True
    chosen = sinks + numpy.nonzero(kept)[0]
    return numpy.concatenate([numpy.arange(sinks), chosen, prefix + numpy.arange(window)])


# ---- Checks ----

def check_scores(library):
    worst = 0.0
    cases = itertools.product((torch.float16, torch.bfloat16, torch.float32), (128, 64, 80), (MEAN, MAXIMUM, SUM), (FULL, PREFIX))
    for dtype, dim, reduction, domain in cases:
        kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 4, 7])
        queries = [random.choice([1, 5, 16, 32]) for _ in range(random.choice([1, 3]))]
        if random.random() < 0.2:
            queries[0] = 150
        lengths = [[max(0, n + random.randrange(-5, 700)) for _ in range(kv_heads)] for n in queries]
        cache = Cache(library, lengths, kv_heads, kv_heads * group, dim, dtype, queries, random.choice([8, 64, 128]))
        scores = torch.full((len(queries), kv_heads, max(1, max(map(max, lengths)))), float('nan'), device='cuda')
        cache.score(scores, domain, reduction)
        for entry, head in itertools.product(range(len(queries)), range(kv_heads)):
            wanted = reference_scores(cache, entry, head, domain, reduction)
            given = scores[entry, head].double()
            prefix = wanted.shape[0]
            assert given[prefix:].isnan().all(), 'wrote behind the prefix'
            if prefix == 0:
                continue
            # Logits of about 10 in f32, over up to 128 dims: errors of 2^-17, which become relative ones.
            error = ((given[:prefix] - wanted).abs() / wanted).max().item()
            worst = max(worst, error)
            assert error < 2e-4, (dtype, dim, reduction, domain, queries, lengths, group, error)
    print(f'scores: worst relative error {worst:.2e}', flush=True)


def check_selections(library, cases, most_tokens):
    for case in range(cases):
        score_tokens = random.randrange(1, most_tokens)
        options = Options([random.choice([1, 1, 2, 4, 8, 40, 300]) for _ in range(random.choice([1, 2, 3]))],
                          random.random() < 0.3, random.random() < 0.7, random.choice([0, 0, 4]),
                          random.choice([NO_POOLING, NO_POOLING, AVERAGE, LARGEST]), random.choice([1, 5, 7]))
        rows = []
        for _ in range(3):
            prefix = random.randrange(0, score_tokens + 1) if case % 2 else score_tokens
            capacity = random.randrange(0, prefix + 40)
            rows.append([prefix, random.choice([0, 16, 32]), capacity, random.choice([1, 1, 3, 16, max(1, capacity // 32)])])
        few_values = random.choice([3, 50, 10 ** 6])
        scores = torch.randint(0, few_values, (3, score_tokens), device='cuda').float()
        scores[torch.rand_like(scores) < 0.01] = random.choice([float('nan'), float('inf'), -1.0, -0.0])
        indices = torch.full((3, score_tokens + 40), -7, device='cuda', dtype=torch.int32)
        counts = torch.full((3,), -7, device='cuda', dtype=torch.int32)
        select(library, scores, int32(rows), indices, counts, options)
        for row, (given, count) in enumerate(zip(indices.cpu().numpy(), counts.tolist())):
            wanted = reference_selection(scores[row].cpu().numpy(), *rows[row], options)
            assert count == len(wanted), (rows[row], vars(options), count, len(wanted))
            assert (given[:count] == wanted).all() and (given[count:] == -7).all(), (rows[row], vars(options))
    print(f'selections of up to {most_tokens} tokens: {cases} as the reference', flush=True)


def check_gathers(library):
    for dtype, dim in itertools.product((torch.float16, torch.float32), (128, 80, 33)):
        lengths = [[random.randrange(1, 3000) for _ in range(3)]]
        cache = Cache(library, lengths, 3, 3, dim, dtype, [1])
        chosen = [sorted(random.sample(range(n), random.randrange(0, n + 1))) for n in lengths[0]]
        indices = int32([row + [0] * (3000 - len(row)) for row in chosen])
        cache.gather(0, indices, int32([len(row) for row in chosen]))
        for head, row in enumerate(chosen):
            assert torch.equal(cache.held(cache.key_pool, 0, head), cache.keys[0][head][row])
            assert torch.equal(cache.held(cache.value_pool, 0, head), cache.values[0][head][row])
    assert library.kv_take_fault() == 0
    cache.gather(0, int32([[1, 1]] * 3), int32([2] * 3))
    torch.cuda.synchronize()
    assert library.kv_take_fault() != 0, 'took indices that do not ascend'
    print('gathers: as the reference', flush=True)


# ---- What PyTorch does ----

def torch_scores(query, keys, window):
    kv_heads, rows, dim = query.shape
    logits = torch.matmul(query * dim ** -0.5, keys.transpose(1, 2)).view(kv_heads, -1, window, keys.shape[1])
    mask = torch.full((window, window), float('-inf'), device='cuda', dtype=logits.dtype).triu(1)
    logits[..., -window:] += mask
    return torch.softmax(logits, dim=-1, dtype=torch.float32)[..., :-window].sum(dim=2).mean(dim=1)


def torch_gather(keys, values, chosen, window):
    tail = torch.arange(keys.shape[1] - window, keys.shape[1], device='cuda').expand(keys.shape[0], -1)
    indices = torch.cat([chosen, tail], dim=1)[..., None].expand(-1, -1, keys.shape[2])
    return keys.gather(1, indices), values.gather(1, indices)


def torch_snapkv(scores, wanted):
    pooled = functional.avg_pool1d(scores, kernel_size=5, padding=2, stride=1)
    return pooled.topk(wanted, dim=-1).indices.sort(dim=-1).values


def torch_hbw(scores, wanted, size):
    """Rounds of 1 and 8 groups; for a prefix of whole blocks, which divide by 8."""
    means = scores.view(scores.shape[0], -1, size).mean(dim=-1)
    quota = wanted // size
    first = means.topk(quota - quota // 2, dim=-1).indices
    left = means.scatter(1, first, float('-inf')).view(scores.shape[0], 8, -1)
    of_each = quota // 2 // 8
    best = left.topk(of_each + 1, dim=-1)
    offset = torch.arange(8, device='cuda')[None, :, None] * left.shape[-1]
    places = best.indices + offset
    extra = best.values[..., of_each].topk(quota // 2 - 8 * of_each, dim=-1).indices
    chosen = torch.cat([first, places[..., :of_each].flatten(1), places[..., of_each].gather(1, extra)], dim=1)
    tokens = chosen.sort(dim=-1).values[..., None] * size + torch.arange(size, device='cuda')
    return tokens.flatten(1)


# ---- Timing ----

WINDOW, CAPACITY, KV_HEADS, QUERY_HEADS, DIM = 32, 1024, 8, 32, 128


class Problem:
    def __init__(self, library, prefix, method):
        self.library, self.prefix, self.method = library, prefix, method
        length = prefix + WINDOW
        self.cache = Cache(library, [[length] * KV_HEADS], KV_HEADS, QUERY_HEADS, DIM, torch.float16, [WINDOW])
        cache = self.cache
        cache.query = cache.query[:WINDOW].contiguous()
        self.keys, self.values = torch.stack(cache.keys[0]), torch.stack(cache.values[0])
        self.query = cache.query.view(WINDOW, KV_HEADS, -1, DIM).permute(1, 2, 0, 3).reshape(KV_HEADS, -1, DIM)
        self.held = cache.counts.clone()
        self.scores = torch.empty(1, KV_HEADS, prefix, device='cuda')
        snap = method == 'SnapKV'
        self.block = 1 if snap else CAPACITY // 32
        self.options = Options([1] if snap else [1, 8], pooling=AVERAGE if snap else NO_POOLING, pool_tokens=5 if snap else 1)
        self.rows = int32([[prefix, WINDOW, CAPACITY, self.block]] * KV_HEADS)
        self.indices = torch.empty(KV_HEADS, CAPACITY, device='cuda', dtype=torch.int32)
        self.counts = torch.empty(KV_HEADS, device='cuda', dtype=torch.int32)

    def parts(self):
        return {'scores': self.score, 'selection': self.choose, 'gather': self.gather}

    def score(self):
        self.cache.counts.copy_(self.held[None].view_as(self.cache.counts))
        self.cache.score(self.scores)

    def choose(self):
        select(self.library, self.scores[0], self.rows, self.indices, self.counts, self.options)

    def gather(self):
        self.cache.counts.copy_(self.held.view_as(self.cache.counts))
        self.cache.gather(0, self.indices, self.counts)

    def ours(self):
        self.score()
        self.choose()
        self.cache.gather(0, self.indices, self.counts)

    def torch_choice(self):
        scores = torch_scores(self.query, self.keys, WINDOW)
        wanted = CAPACITY - WINDOW
        return torch_snapkv(scores, wanted) if self.method == 'SnapKV' else torch_hbw(scores, wanted, self.block)

    def torch(self):
        return torch_gather(self.keys, self.values, self.torch_choice(), WINDOW)

    def check(self):
        """Our scores against f32 arithmetic, the selection against the reference, the tokens against PyTorch's."""
        self.scores.fill_(float('nan'))
        self.indices.fill_(-1)
        self.score()
        self.choose()
        error = 0.0
        for head in range(KV_HEADS):
            exact = torch_scores(self.query[head:head + 1].float(), self.keys[head:head + 1].float(), WINDOW)
            error = max(error, ((self.scores[0, head] - exact[0]).abs() / exact[0]).max().item())
        wanted = reference_selection(self.scores[0, 0].cpu().numpy(), self.prefix, WINDOW, CAPACITY, self.block, self.options)
        assert (self.indices[0].cpu().numpy() == wanted).all(), 'another selection than the reference'
        theirs = self.torch_choice()
        shared = sum(torch.isin(self.indices[head, :CAPACITY - WINDOW], theirs[head].int()).sum().item()
                     for head in range(KV_HEADS)) / (KV_HEADS * (CAPACITY - WINDOW))
        assert error < 1e-3 and shared > 0.9, (error, shared)
        return error, shared


def measure(library, prefix, method, rounds, sampler):
    problem = Problem(library, prefix, method)
    error, shared = problem.check()
    functions = {'kv': problem.ours, 'torch': problem.torch, **problem.parts()}
    functions = {name: captured(function, 1 if name == 'torch' else 4) for name, function in functions.items()}
    calls = {name: 1 if name == 'torch' else 4 for name in functions}
    times, spans = {name: [] for name in functions}, {name: [] for name in functions}
    for round_number in range(rounds):
        order = list(functions.items())
        shift = round_number % len(order)
        for name, function in order[shift:] + order[:shift]:
            begun = time.time()
            times[name].append(time_once(function, 2) / calls[name])
            spans[name].append((begun, time.time()))
    summary = {name: dict(median=round(statistics.median(values), 4), low=round(min(values), 4),
                          high=round(max(values), 4), samples=rounds) for name, values in times.items()}
    readings = [sampler.between(*span) for span in spans['kv']]
    clock, watts = (statistics.median([r[i] for r in readings if r[i] is not None] or [0]) for i in (0, 1))
    print(f'{method} {prefix}: ' + ', '.join(f"{name} {value['median']} [{value['low']}..{value['high']}]" for name, value in summary.items())
          + f' ms; {clock} MHz {watts} W; error {error:.1e}, {shared:.1%} of the tokens as PyTorch', flush=True)
    row = dict(measure=f'{method}, {prefix} tokens before the window, capacity {CAPACITY}',
               shapes=dict(prefix=prefix, window=WINDOW, capacity=CAPACITY, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS,
                           headDim=DIM, dtype='float16'),
               device='cuda', kind='measured', unit='ms', better='lower', result=summary['kv'],
               reference=dict(name='PyTorch', **summary['torch']), date=time.strftime('%Y-%m-%d'),
               machine=machine_of(sampler.handle), clockMegahertz=clock, watts=watts, relativeError=error, sharedTokens=round(shared, 4))
    row.update({name: summary[name]['median'] for name in problem.parts()})
    if (prefix, method) in TARGETS:
        row['target'] = TARGETS[prefix, method]
    return row


TARGETS = {(131072, 'HBW-KV'): {'atMost': 0.3}, (131072, 'SnapKV'): {'atMost': 0.3},
           (1048576, 'HBW-KV'): {'atMost': 1.5}, (1048576, 'SnapKV'): {'atMost': 1.5}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--check-only', action='store_true')
    parser.add_argument('--cases', type=int, default=60)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--only', default='')
    parser.add_argument('--json')
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    random.seed(time.time_ns())
    torch.manual_seed(time.time_ns())
    check_scores(library)
    check_selections(library, options.cases, 3000)
    check_selections(library, options.cases // 20, 60000)
    check_gathers(library)
    if options.check_only:
        return
    sampler = Sampler()
    rows = []
    for prefix, method in itertools.product((32768, 131072, 1048576), ('HBW-KV', 'SnapKV')):
        if options.only and options.only not in f'{method} {prefix}':
            continue
        rows.append(measure(library, prefix, method, options.rounds, sampler))
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, 'w') as file:
                json.dump({'title': 'Choosing the tokens to keep, on the GPU against PyTorch', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
