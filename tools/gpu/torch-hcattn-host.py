"""Times the choice of tokens by their share of attention, and the sum of their values on the host, next to PyTorch; checks
one against the other.

usage: torch-hcattn-host.py LIBRARY [--rounds N] [--threads N] [--tokens N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md). Values of 20 lists take turns, so that no cache holds them.
"""
import argparse
import ctypes
import json
import mmap
import statistics
import time

import torch

from measuring import Sampler, captured, current_stream, integers_of, machine_of, pointers_of, timed

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 64
GROUP = QUERY_HEADS // KV_HEADS
TAU = 0.9
CHOSEN = 0.05  # of the tokens, in the lists of the host's sums
LISTS = 20


def summary(milliseconds):
    return dict(median=round(statistics.median(milliseconds), 4), low=round(min(milliseconds), 4),
                high=round(max(milliseconds), 4), samples=len(milliseconds))


def int32(values, device='cuda'):
    return torch.tensor(values, device=device, dtype=torch.int32)


class Choice:
    """Scores of one row, and lists with room for a share of the tokens."""

    def __init__(self, library, tokens, pinned, spread, room):
        self.library, self.tokens = library, tokens
        blocks = KV_HEADS * tokens // BLOCK_TOKENS
        capacity = int(room * tokens)
        self.scores = spread * torch.randn(QUERY_HEADS, tokens, device='cuda')
        place = dict(pin_memory=True) if pinned else dict(device='cuda')
        self.value_rows = torch.empty(KV_HEADS, capacity, dtype=torch.int32, **place)
        self.weights = torch.empty(KV_HEADS, capacity, GROUP, **place)
        self.counts = torch.empty(KV_HEADS, dtype=torch.int32, **place)
        self.log_sum_exp = torch.empty(QUERY_HEADS, device='cuda')
        self.table = torch.randperm(blocks, device='cuda').to(torch.int32)
        self.tensors = [self.scores, torch.zeros(QUERY_HEADS, device='cuda'), self.table, int32([tokens] * KV_HEADS), int32([0]),
                        int32([0, 1]), self.value_rows, self.weights, self.counts, self.log_sum_exp]
        self.sizes = integers_of([1, QUERY_HEADS, KV_HEADS, tokens, tokens // BLOCK_TOKENS, blocks, capacity, 0])

    def run(self):
        stream = current_stream()
        assert self.library.kv_select_by_mass(self.sizes, pointers_of(self.tensors), ctypes.c_double(TAU), stream) == 0

    def torch(self):
        """Which tokens of each head are taken, by a sort of all."""
        shares = torch.softmax(self.scores, dim=-1)
        sorted_shares, order = shares.sort(dim=-1, descending=True, stable=True)
        before = sorted_shares.cumsum(dim=-1) - sorted_shares
        return torch.zeros_like(shares, dtype=torch.bool).scatter_(1, order, before < TAU)

    def error(self):
        """How many tokens of the lists PyTorch does not take or takes besides, of all."""
        self.run()
        torch.cuda.synchronize()
        taken = self.torch()
        union = taken.view(KV_HEADS, GROUP, -1).any(dim=1)
        if union.sum(dim=1).max() > self.value_rows.shape[1]:
            shares = torch.where(taken, self.scores - self.scores.logsumexp(dim=-1, keepdim=True), -torch.inf)
            order = shares.view(KV_HEADS, GROUP, -1).amax(dim=1).sort(dim=-1, descending=True, stable=True).indices
            union = torch.zeros_like(union).scatter_(1, order[:, :self.value_rows.shape[1]], True) & union
        inverse = torch.empty_like(self.table, dtype=torch.long)
        inverse[self.table.long()] = torch.arange(len(self.table), device='cuda')
        wrong = 0
        for head in range(KV_HEADS):
            rows = self.value_rows[head, :self.counts[head]].cuda().long()
            ours = torch.zeros(self.tokens, dtype=torch.bool, device='cuda')
            ours[inverse[rows // BLOCK_TOKENS] * BLOCK_TOKENS + rows % BLOCK_TOKENS - head * self.tokens] = True
            wrong += (ours != union[head]).sum().item()
        return wrong / int(self.counts.sum())


class Values:
    """A pool of values in host memory, and lists of rows of it."""

    def __init__(self, library, tokens, dtype, threads):
        self.library, self.dtype, self.threads = library, dtype, threads
        rows, count = KV_HEADS * tokens, int(CHOSEN * tokens)
        on_device = torch.randn(rows, HEAD_DIM, device='cuda', dtype=torch.float16)
        if dtype == torch.int8:
            on_device = (32 * on_device).to(torch.int8)
        # Large pages, as those of a host pool.
        pages = mmap.mmap(-1, on_device.numel() * on_device.element_size())
        pages.madvise(mmap.MADV_HUGEPAGE)
        self.values = torch.frombuffer(pages, dtype=dtype).view(rows, HEAD_DIM)
        self.values.copy_(on_device)
        self.lists = []
        for _ in range(LISTS):
            tokens_of = torch.rand(KV_HEADS, tokens, device='cuda').topk(count, dim=1).indices.sort(dim=1).values
            blocks = torch.randperm(rows // BLOCK_TOKENS, device='cuda').view(KV_HEADS, -1)
            places = blocks.gather(1, tokens_of // BLOCK_TOKENS) * BLOCK_TOKENS + tokens_of % BLOCK_TOKENS
            weights = torch.rand(KV_HEADS, count, GROUP) / count
            self.lists.append((places.to(torch.int32).cpu().contiguous().pin_memory(), weights.pin_memory()))
        self.counts = int32([count] * KV_HEADS, 'cpu')
        self.output = torch.empty(QUERY_HEADS, HEAD_DIM)
        kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 7}[dtype]
        self.sizes = integers_of([1, KV_HEADS, GROUP, count, HEAD_DIM, rows, kind, threads])
        self.pools = [self.values]

    def run(self, index):
        rows, weights = self.lists[index % LISTS]
        tensors = pointers_of([rows, weights, self.counts, self.values, self.output])
        assert self.library.kv_weighted_values(self.sizes, tensors) == 0

    def read(self, index):
        for pool in self.pools:
            words = self.bytes_of(pool) // 8
            self.library.kv_read_in_order(ctypes.c_void_p(pool.data_ptr() + index % LISTS * words * 8), ctypes.c_int64(words), self.threads)

    def bytes_of(self, pool):
        """Of the rows of a list."""
        return self.lists[0][0].numel() * HEAD_DIM * pool.element_size()

    def torch(self, index):
        rows, weights = self.lists[index % LISTS]
        values = self.values.index_select(0, rows.view(-1)).view(*rows.shape, HEAD_DIM)
        return (weights.transpose(1, 2) @ values.float()).view(QUERY_HEADS, HEAD_DIM)

    def error(self):
        reference = self.torch(0)
        self.run(0)
        return ((self.output - reference).norm() / reference.norm()).item()


class ListedAttention(Values):
    """Keys beside the values, and one row of queries: the lists' tokens get exact weights."""

    def __init__(self, library, tokens, dtype, threads):
        super().__init__(library, tokens, dtype, threads)
        pages = mmap.mmap(-1, self.values.numel() * 2)
        pages.madvise(mmap.MADV_HUGEPAGE)
        self.keys = torch.frombuffer(pages, dtype=torch.float16).view(self.values.shape)
        self.keys.copy_(torch.randn(self.keys.shape, device='cuda', dtype=torch.float16))
        self.query = torch.randn(QUERY_HEADS, HEAD_DIM)
        self.log_sum_exp = torch.zeros(QUERY_HEADS)
        self.pools.append(self.keys)

    def run(self, index):
        rows, _ = self.lists[index % LISTS]
        tensors = pointers_of([rows, self.counts, self.query, self.keys, self.values, self.output, self.log_sum_exp])
        assert self.library.kv_decode_attention_listed(self.sizes, tensors, ctypes.c_float(HEAD_DIM ** -0.5)) == 0

    def torch(self, index):
        rows, _ = self.lists[index % LISTS]
        keys, values = (pool.index_select(0, rows.view(-1)).view(*rows.shape, HEAD_DIM).float() for pool in (self.keys, self.values))
        weights = torch.softmax(self.query.view(KV_HEADS, GROUP, HEAD_DIM) @ keys.transpose(1, 2) * HEAD_DIM ** -0.5, dim=-1)
        return (weights @ values).view(QUERY_HEADS, HEAD_DIM)


def time_on_host(functions, rounds):
    """Milliseconds of functions of a number, which take turns."""
    times = {name: [] for name in functions}
    for function in functions.values():
        function(0)
    for index in range(rounds):
        for name, function in functions.items():
            begun = time.perf_counter()
            function(index + 1)
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: summary(values) for name, values in times.items()}


def choice_rows(library, tokens, rounds, sampler):
    # With a spread of 3.5 heads reach TAU with about 1/80 of their tokens each, with 0.1 or less with nearly TAU of them.
    for pinned, spread, room in ((False, 3.5, 0.1), (True, 3.5, 0.1), (False, 3.5, CHOSEN), (False, 0.1, CHOSEN), (False, 0, CHOSEN)):
        choice = Choice(library, tokens, pinned, spread, room)
        error = choice.error()
        results = timed({'kv': captured(choice.run, 10), 'torch': choice.torch}, rounds, sampler, 1)
        ours, clock, watts = results['kv']
        ours = {name: round(value / 10, 4) if name != 'samples' else value for name, value in ours.items()}
        cut = '' if room > CHOSEN else f', room for {room:.0%}' + ('' if spread == 3.5 else f', spread {spread}' if spread > 0 else ', equal scores')
        row = dict(measure=f'choice of tokens, {tokens} scores a head, lists ' + ('in host memory' if pinned else 'on the device') + cut,
                   shapes=dict(tokens=tokens, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, tau=TAU, spread=spread, room=room,
                               chosen=round(int(choice.counts.sum()) / KV_HEADS / tokens, 4)),
                   device='cuda', kind='measured', unit='ms', better='lower', result=ours,
                   reference=dict(name='PyTorch softmax, sort, sum', **{n: round(v, 4) for n, v in results['torch'][0].items()}),
                   clockMegahertz=clock, watts=watts, otherTokens=error)
        if not pinned:
            row['target'] = dict(atMost=0.25 if cut else 0.16)
        yield row


def value_rows(library, tokens, rounds, threads):
    for kind, dtype, what, target in ((Values, torch.float16, 'sum of values', dict(target=dict(atMost=1.3))),
                                      (Values, torch.int8, 'sum of values', dict(target=dict(atMost=0.8))),
                                      (ListedAttention, torch.float16, 'attention with exact scores', {})):
        values = kind(library, tokens, dtype, threads)
        time.sleep(0.5)  # threads of PyTorch's spin on the cores for a while
        results = time_on_host({'kv': values.run, 'read': values.read}, 4 * rounds)
        results.update(time_on_host({'torch': values.torch}, rounds))
        yield dict(measure=f'{what} on the host, {CHOSEN:.0%} of {tokens} rows, {str(dtype)[6:]}',
                   shapes=dict(tokens=tokens, kvHeads=KV_HEADS, group=GROUP, headDim=HEAD_DIM, threads=threads),
                   device='cpu', kind='measured', unit='ms', better='lower', result=results['kv'],
                   reference=dict(name='the same bytes, read in order', **results['read']), torch=results['torch'],
                   gigabytesPerSecond=round(sum(map(values.bytes_of, values.pools)) / results['kv']['median'] / 1e6, 1), relativeError=values.error(), **target)
        del values


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=16)
    parser.add_argument('--tokens', type=int, default=1 << 20)
    parser.add_argument('--json')
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    facts = dict(date=time.strftime('%Y-%m-%d'), machine=machine_of(sampler.handle))
    rows = []
    for row in [*choice_rows(library, options.tokens, options.rounds, sampler),
                *value_rows(library, options.tokens, options.rounds, options.threads)]:
        rows.append({**row, **facts})
        print(json.dumps({name: row[name] for name in row if name not in ('shapes', 'device', 'kind', 'better')}), flush=True)
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Choice of tokens and sums on the host', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
