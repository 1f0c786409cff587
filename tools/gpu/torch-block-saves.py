"""Times ways to save the blocks of a prompt's layer in host memory, and what they cost work beside them.

usage: torch-block-saves.py LIBRARY [--rounds N] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md).
"""
import argparse
import json
import statistics
import time

import torch

from measuring import Sampler, current_stream, integers_of, libraries_of, machine_of, neighbour_shares, pointers_of, timed

# Keys or values of a layer of 32K tokens, 8 kv heads of 128, f16.
LAYER_BYTES = 64 << 20
# name: way, and blocks of a run or thread blocks or threads
WAYS = {'a copy a block': (0, 1), 'copies of runs of 16 blocks': (0, 16), 'copies of runs of 256 blocks': (0, 256),
        'a store kernel of 4 thread blocks': (1, 4), 'a store kernel of 132 thread blocks': (1, 132),
        'a copy, and a scatter by 1 thread': (2, 1), 'a copy, and a scatter by 4 threads': (2, 4)}


class Save:
    """Blocks of so many bytes, one behind the other on the device; in host memory runs of `run` blocks have any places."""

    def __init__(self, library, block_bytes, run):
        self.library, self.block_bytes, self.count = library, block_bytes, LAYER_BYTES // block_bytes
        self.device = torch.randint(0, 256, (self.count, block_bytes), device='cuda', dtype=torch.uint8)
        self.host, self.staging = (torch.empty(self.count, block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        runs = torch.randperm(self.count // run, dtype=torch.int32)
        self.places = (run * runs[:, None] + torch.arange(run, dtype=torch.int32)).view(-1)
        self.places_there = self.places.cuda()

    def run(self, way, count):
        sizes = integers_of([self.block_bytes, self.count, way, count])
        pointers = pointers_of([self.device, self.host, self.staging, self.places, self.places_there])
        assert self.library.kv_save_blocks(sizes, pointers, current_stream()) == 0

    def copy(self):
        self.staging.copy_(self.device, non_blocking=True)

    def check(self, way, count):
        self.host.fill_(0x5a)
        self.run(way, count)
        torch.cuda.synchronize()
        assert torch.equal(self.host[self.places.long()], self.device.cpu())


def save_rows(library, options, sampler, machine):
    rows = []
    for block_bytes in (4096, 8192, 16384):
        saves = {name: Save(library, block_bytes, count if way == 0 else 1) for name, (way, count) in WAYS.items()}
        for name, way in WAYS.items():
            saves[name].check(*way)
        functions = {name: lambda name=name: saves[name].run(*WAYS[name]) for name in WAYS}
        functions['copy'] = saves['a copy a block'].copy
        results = timed(functions, options.rounds, sampler, 4)
        for name, (summary, clock, watts) in results.items():
            print(f'blocks of 2 x {block_bytes} bytes, {name}: {LAYER_BYTES / summary["median"] / 1e6:.1f} GB/s', flush=True)
            if name != 'copy':
                rows.append(dict(measure=f'saves of {LAYER_BYTES // block_bytes // 2} blocks of 2 x {block_bytes} bytes: {name}',
                                 shapes=dict(blocks=LAYER_BYTES // block_bytes // 2, blockBytes=2 * block_bytes), device='cuda', kind='measured', unit='ms', better='lower',
                                 chart=False, result=rounded(summary), reference=dict(name='cudaMemcpyAsync, contiguous', **rounded(results['copy'][0])),
                                 date=time.strftime('%Y-%m-%d'), machine=machine, clockMegahertz=clock, watts=watts))
    return rows


def neighbour_rows(library, machine):
    beside = ['copies of runs of 256 blocks', 'a store kernel of 4 thread blocks', 'a store kernel of 132 thread blocks']
    save = Save(library, 8192, 256)
    loads = {name: lambda name=name: save.run(*WAYS[name]) for name in beside} | {'copy': save.copy}
    numbers_read = torch.zeros(1 << 30, device='cuda', dtype=torch.float16)
    left, right = (torch.randn(8192, 8192, device='cuda', dtype=torch.float16) for _ in range(2))
    rows = []
    for what, work in (('reading device memory', lambda: torch.sum(numbers_read)), ('a product of matrices', lambda: torch.matmul(left[:4096], right))):
        shares = neighbour_shares(work, loads)
        percent = lambda name: {figure: round(100 + 100 * of(shares[name]), 2) for figure, of in (('median', statistics.median), ('low', min), ('high', max))} | dict(samples=len(shares[name]))
        print(f'{what} beside saves, % of its time alone', {name: percent(name)['median'] for name in loads}, flush=True)
        rows += [dict(measure=f'{what} beside saves: {name}', shapes=dict(blocks=save.count // 2, blockBytes=16384), device='cuda', kind='measured', unit='% of its time alone', better='lower',
                      chart=False, result=percent(name), reference=dict(name='cudaMemcpyAsync, contiguous', **percent('copy')), date=time.strftime('%Y-%m-%d'), machine=machine) for name in beside]
    return rows


def rounded(each):
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('library')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--json')
    options = parser.parse_args()
    [library] = libraries_of([options.library]).values()
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    machine = machine_of(sampler.handle)
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = save_rows(library, options, sampler, machine)
        rows += neighbour_rows(library, machine)
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'title': 'Serving on a GPU: a cache over two memories', 'rows': rows}, file, indent=1, ensure_ascii=False)


main()
