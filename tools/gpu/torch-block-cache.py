"""Times what a step over a block cache does before its attention (scores, chosen blocks, plan) beside PyTorch, and loads of
scattered blocks beside one contiguous copy.

usage: torch-block-cache.py [NAME=]LIBRARY... [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md); rows are those of the last one.
"""
import argparse
import json
import statistics
import time

import torch

from measuring import (Sampler, captured, current_stream, integers_of, libraries_of, machine_of, neighbour_shares, pointers_of, time_once,
                       timed)

BLOCK, QUERY_HEADS, KV_HEADS, HEAD_DIM, SINKS, RECENT, TOP = 32, 32, 8, 128, 1, 3, 64
ROOM = SINKS + TOP + RECENT


def integers(*shape, fill=0):
    return torch.full(shape, fill, device='cuda', dtype=torch.int32)


class Step:
    """Sequences of one length, and rows of answers. Runs of `run` blocks of a kv head follow each other in memory, as the chunks
    of prompts do. Of `missing` 1 the rows of a step choose other blocks than those of the step before; of a smaller share, so
    many of the chosen blocks are forgotten before each step. The cache has `cached` places."""

    def __init__(self, sequences, tokens, missing, run, cached=None):
        self.sequences, self.blocks = sequences, tokens // BLOCK
        lists = sequences * KV_HEADS
        count = lists * self.blocks
        self.cached = cached or lists * TOP * 5 // 4
        self.forgotten = None
        self.queries = [torch.randn(sequences, QUERY_HEADS, HEAD_DIM, device='cuda', dtype=torch.float16) for _ in range(2 if missing == 1 else 1)]
        runs = torch.randperm(count // run, device='cuda', dtype=torch.int32)
        self.table = (run * runs[:, None] + torch.arange(run, device='cuda', dtype=torch.int32)).view(-1)
        middle, half = torch.randn(count, HEAD_DIM, device='cuda'), torch.rand(count, HEAD_DIM, device='cuda')
        self.metadata = torch.stack((middle - half, middle + half), dim=1).half()
        self.scores = torch.full((lists, self.blocks), float('nan'), device='cuda')
        self.chosen, self.chosen_counts = integers(lists, ROOM), integers(lists)
        self.state = [integers(count, fill=-1), integers(self.cached, fill=-1), integers(self.cached), integers(1), integers(lists, 12, ROOM),
                      integers(lists, 4), integers(lists, ROOM), integers(lists), integers(2, lists * ROOM), integers(1)]
        self.budgets = integers(sequences, fill=ROOM)
        self.batch = [self.table, integers(lists, fill=tokens), torch.arange(sequences, device='cuda', dtype=torch.int32),
                      torch.arange(sequences + 1, device='cuda', dtype=torch.int32)]
        self.sizes = integers_of([sequences, QUERY_HEADS, KV_HEADS, HEAD_DIM, self.blocks, 2, ROOM, SINKS, RECENT, self.cached])
        self.ordered = self.metadata[self.table.long()].view(lists, self.blocks, 2 * HEAD_DIM)

    def pointers(self, query):
        return pointers_of([query, self.metadata, *self.batch, self.scores, self.chosen, self.chosen_counts, *self.state, self.budgets])

    def forget(self, library, share):
        self.run(library, PARTS)
        lists = self.sequences * KV_HEADS
        chosen = self.table.view(lists, self.blocks).gather(1, self.chosen[:, SINKS:SINKS + TOP].long()).view(-1)
        self.forgotten = chosen[torch.randperm(chosen.numel(), device='cuda')[:int(share * chosen.numel())]].long()

    def run(self, library, parts):
        if self.forgotten is not None:
            self.state[0].index_fill_(0, self.forgotten, -1)
        for query in self.queries:
            for part in parts:
                assert getattr(library, part)(self.sizes, self.pointers(query), current_stream()) == 0

    def torch_scores(self):
        query = self.queries[-1].view(self.sequences * KV_HEADS, -1, HEAD_DIM)
        expanded = torch.cat((query.clamp(max=0), query.clamp(min=0)), dim=2)
        return torch.matmul(self.ordered, expanded.transpose(1, 2)).amax(dim=2)

    def torch_step(self):
        return self.torch_scores()[:, SINKS:-RECENT].topk(TOP, dim=1).indices.sort(dim=1)

    def check(self, library):
        self.run(library, PARTS)
        exact = self.torch_scores().float()
        error = ((self.scores - exact).abs().max() / exact.abs().max()).item()
        wanted = self.scores[:, SINKS:-RECENT].topk(TOP, dim=1).values[:, -1]
        assert (self.chosen_counts == ROOM).all()
        own = self.chosen[:, SINKS:SINKS + TOP].long()
        assert (self.scores.gather(1, own) >= wanted[:, None]).all() and (own.diff(dim=1) > 0).all()
        return error


PARTS = ['kv_cached_block_scores', 'kv_select_top_blocks', 'kv_plan_blocks']


def rounded(each):
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()}


def step_rows(libraries, options, sampler, machine):
    rows = []
    cases = ((8, 131072, 0, 64, None), (8, 131072, 0, 1, None), (8, 131072, 1, 64, None), (8, 32768, 0, 64, None), (8, 32768, 0.05, 64, 16384),
             (8, 32768, 0.05, 64, 40960), (8, 131072, 0.05, 64, 65536), (32, 32768, 0, 64, None), (1, 131072, 0, 64, None))
    for sequences, tokens, missing, run, cached in cases:
        step = Step(sequences, tokens, missing, run, cached)
        if 0 < missing < 1:
            step.forget(next(iter(libraries.values())), missing)
        repeats = 10 * len(step.queries)
        functions = {name: captured(lambda library=library: step.run(library, PARTS), 10) for name, library in libraries.items()}
        if not missing:
            functions['PyTorch'] = captured(step.torch_step, repeats)
        results = timed(functions, options.rounds, sampler, 1)
        results = {name: ({key: value / repeats if key != 'samples' else value for key, value in each[0].items()}, *each[1:])
                   for name, each in results.items()}
        lacking = {0: '', 1: ', all chosen blocks new'}.get(missing, f', {100 * missing:.0f} % of the chosen blocks missing of a cache of {cached}')
        what = f'{sequences} sequences of {tokens // 1024}K{lacking}{", scattered blocks" if run == 1 else ""}'
        for name, library in libraries.items():
            error = step.check(library)
            parts = {part: time_once(captured(lambda part=part: step.run(library, [part]), 10), 3) / repeats for part in PARTS}
            print(f'{what}, {name}: {results[name][0]["median"]:.4f} ms [{results[name][0]["low"]:.4f}], {results[name][1]} MHz, loads '
                  f'{step.state[9].item()}, error {error:.1e}; parts {({part[3:]: round(value, 4) for part, value in parts.items()})}', flush=True)
        if 'PyTorch' in results:
            print(f'    PyTorch {results["PyTorch"][0]["median"]:.4f} ms')
        summary, clock, watts = results[list(libraries)[-1]]
        shapes = dict(sequences=sequences, keys=tokens, queryHeads=QUERY_HEADS, kvHeads=KV_HEADS, headDim=HEAD_DIM, blockTokens=BLOCK, top=TOP, dtype='float16')
        row = dict(measure=f'scores, top {TOP} blocks and plan of a layer, {what}', shapes=shapes, device='cuda', kind='measured', unit='ms', better='lower',
                   result=rounded(summary), date=time.strftime('%Y-%m-%d'), machine=machine, clockMegahertz=clock, watts=watts, error=error)
        if step.forgotten is not None:
            # A part of the result: what the step loads has to be forgotten first.
            row['forgetting'] = round(time_once(captured(lambda: step.state[0].index_fill_(0, step.forgotten, -1), 10), 3) / 10, 4)
        if (sequences, tokens, missing, run) == (8, 131072, 0, 64):
            row['target'] = {'atMost': 0.055}
        if 'PyTorch' in results:
            row['reference'] = dict(name='PyTorch, f16 (matmul, amax, topk, sort)', **rounded(results['PyTorch'][0]))
        rows.append(row)
    return rows


class Load:
    """Blocks of keys and of values of so many bytes, scattered in both memories."""

    def __init__(self, block_bytes, count):
        self.bytes = 2 * block_bytes * count
        host_blocks, blocks = 4 * count, 2 * count
        self.host = [torch.randint(0, 256, (host_blocks, block_bytes), dtype=torch.uint8).pin_memory() for _ in range(2)]
        self.device = [torch.zeros(blocks, block_bytes, device='cuda', dtype=torch.uint8) for _ in range(2)]
        self.lists = torch.stack((torch.randperm(host_blocks)[:count], torch.randperm(blocks)[:count])).int()
        self.loads = self.lists.cuda()
        self.count = integers(1, fill=count)
        self.block_bytes, self.loaded = block_bytes, count
        self.sizes = integers_of([block_bytes, host_blocks, blocks, count])
        self.contiguous = self.host[0].view(-1)[:self.bytes]
        self.copied = torch.empty(self.bytes, device='cuda', dtype=torch.uint8)

    def run(self, library):
        assert library.kv_fetch_blocks(self.sizes, pointers_of([*self.host, *self.device, self.loads, self.count]), current_stream()) == 0

    def run_otherwise(self, library, way):
        sizes = integers_of([self.block_bytes, self.loaded, way])
        assert library.kv_load_blocks(sizes, pointers_of([*self.host, *self.device, self.lists, self.loads]), current_stream()) == 0

    def copy(self):
        self.copied.copy_(self.contiguous, non_blocking=True)

    def poison(self):
        for device in self.device:
            device.fill_(0x5a)

    def check(self):
        for host, device in zip(self.host, self.device):
            source, target = self.lists.long()
            assert torch.equal(device[target.cuda()].cpu(), host[source])


OTHERWISE = {'a copy a block': 0, 'a batch of copies': 1, 'a thread block each': 2}


def load_rows(libraries, options, sampler, machine):
    rows = []
    last = list(libraries.values())[-1]
    numbers_read = torch.zeros(1 << 30, device='cuda', dtype=torch.float16)
    work = lambda: torch.sum(numbers_read)
    for block_bytes, count in ((8192, 4096), (8192, 205), (4096, 4096), (16384, 2048)):
        load = Load(block_bytes, count)
        functions = {name: lambda library=library: load.run(library) for name, library in libraries.items()}
        functions.update({name: lambda way=way: load.run_otherwise(last, way) for name, way in OTHERWISE.items()})
        for function in functions.values():
            load.poison()
            function()
            load.check()
        functions['copy'] = load.copy
        # A launch takes as long as some loads do.
        results = timed(functions, options.rounds, sampler, 8 if count > 1000 else 40)
        ours = list(libraries)[-1]
        for name in functions:
            speed = load.bytes / results[name][0]['median'] / 1e6
            print(f'{count} loads of 2 x {block_bytes} bytes, {name}: {speed:.1f} GB/s', flush=True)
        summary, clock, watts = results[ours]
        references = {'cudaMemcpyAsync, contiguous': 'copy', **{name: name for name in OTHERWISE}}
        for reference, name in references.items():
            beside = '' if name == 'copy' else f', beside {name}'
            # 50 GB/s of blocks of 16 KiB.
            target = dict(target={'atMost': round(load.bytes / 50e6, 3)}) if (block_bytes, count, name) == (8192, 4096, 'copy') else {}
            rows.append(dict(measure=f'loads of {count} blocks of 2 x {block_bytes} bytes{beside}', **target, shapes=dict(blocks=count, blockBytes=2 * block_bytes), device='cuda',
                             kind='measured', unit='ms', better='lower', result=rounded(summary), reference=dict(name=reference, **rounded(results[name][0])),
                             date=time.strftime('%Y-%m-%d'), machine=machine, clockMegahertz=clock, watts=watts))
        if (block_bytes, count) == (8192, 4096):
            shares = neighbour_shares(work, {name: functions[name] for name in (ours, 'a thread block each', 'copy')})
            print('    reading device memory beside it takes longer:', {name: f'{100 * statistics.median(each):.1f} %' for name, each in shares.items()}, flush=True)
            percent = lambda name: {figure: round(100 * of(shares[name]), 2) for figure, of in (('median', statistics.median), ('low', min), ('high', max))} | dict(samples=15)
            rows.append(dict(measure='how much longer reading device memory takes beside loads', shapes=dict(blocks=count, blockBytes=2 * block_bytes), device='cuda',
                             kind='measured', unit='%', better='lower', chart=False, result=percent(ours),
                             reference=dict(name='cudaMemcpyAsync, contiguous', **percent('copy')), date=time.strftime('%Y-%m-%d'), machine=machine))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--json')
    options = parser.parse_args()
    libraries = libraries_of(options.libraries)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    machine = machine_of(sampler.handle)
    rows = step_rows(libraries, options, sampler, machine)
    # Batches of copies are refused on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        rows += load_rows(libraries, options, sampler, machine)
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Serving on the GPU: a cache over two memories', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
