"""Times our few-row linear kernel next to PyTorch's linear (cuBLAS) and a kernel that only reads the weights,
interleaved in one process, and checks the products against each other.

usage: torch-linear.py LIBRARY [NAME=LIBRARY ...] [--rounds N] [--only TEXT] [--json FILE]

LIBRARY is the path of libcuda-kernels.so (README.md), of which several builds may take turns. A call of a case multiplies
with one copy of its weights after the other, 1.5 GB in all, replayed from one graph, so that they come from memory as
in a model.
"""
import argparse
import ctypes
import json
import statistics
import time

import torch
import torch.nn.functional as functional

from measuring import Sampler, captured, current_stream, integers_of, libraries_of, machine_of, pointers_of, time_once

BYTES = 1.5e9
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Problem:
    """`launches`: the [out, in] of weights that share an input and a launch; the launches follow each other."""

    def __init__(self, launches, rows, dtype, input_dtype):
        self.launches, self.rows, self.dtype, self.input_dtype = launches, rows, dtype, input_dtype
        once = sum(out * features for layers in launches for out, features in layers)
        self.copies = max(1, round(BYTES / (2 * once)))
        self.pool = torch.empty(self.copies * once, device='cuda', dtype=dtype).normal_()
        self.sink = torch.zeros(1, device='cuda', dtype=torch.int32)
        self.calls = []
        at = 0
        for _ in range(self.copies):
            for layers in launches:
                features = layers[0][1]
                input_ = torch.randn(rows, features, device='cuda', dtype=input_dtype)
                weights, outputs = [], []
                for out, _ in layers:
                    weights.append(self.pool[at:at + out * features].view(out, features))
                    outputs.append(torch.empty((rows, out), device='cuda', dtype=input_dtype))
                    at += out * features
                sizes = [rows, features, DTYPES[input_dtype], DTYPES[dtype], *(out for out, _ in layers)]
                tensors = [input_, *(each for pair in zip(weights, outputs) for each in pair)]
                self.calls.append((input_, weights, outputs, len(layers), integers_of(sizes),
                                   pointers_of(tensors)))

    def poison(self):
        for _, _, outputs, *_ in self.calls:
            for output in outputs:
                output.fill_(float('nan'))

    def ours(self, library):
        stream = current_stream()
        for *_, count, sizes, pointers in self.calls:
            assert library.kv_linear(count, sizes, pointers, stream) == 0

    def torch(self):
        for input_, weights, *_ in self.calls:
            converted = input_.to(self.dtype)
            for weight in weights:
                functional.linear(converted, weight)

    def read(self, library):
        stream = current_stream()
        assert library.kv_read(ctypes.c_void_p(self.pool.data_ptr()), ctypes.c_int64(self.pool.nbytes),
                               ctypes.c_void_p(self.sink.data_ptr()), stream) == 0

    def error(self, library):
        """‖ours − exact‖ / ‖exact‖, the most over the layers of the first and the last copy."""
        errors = []
        self.poison()
        self.ours(library)
        for input_, weights, outputs, *_ in self.calls[:len(self.launches)] + self.calls[-len(self.launches):]:
            for weight, output in zip(weights, outputs):
                exact = torch.cat([input_.double() @ part.double().T for part in weight.split(16384)], dim=1)
                errors.append(((output.double() - exact).norm() / exact.norm()).item())
        return max(errors)


def interleaved(functions, rounds, repeats):
    """Times the functions in turn, from another first one each round: their milliseconds, and when they ran."""
    times = {name: [] for name in functions}
    spans = {name: [] for name in functions}
    for round_number in range(rounds):
        order = list(functions.items())
        shift = round_number % len(order)
        for name, function in order[shift:] + order[:shift]:
            begun = time.time()
            times[name].append(time_once(function, repeats))
            spans[name].append((begun, time.time()))
    return times, spans


def measure(problem, label, libraries, rounds, sampler):
    first = next(iter(libraries.values()))
    functions, errors = {}, {}
    for name, library in libraries.items():
        errors[name] = problem.error(library)
        functions[name] = captured(lambda library=library: problem.ours(library), 1)
    functions['F.linear'] = captured(problem.torch, 1)
    functions['read'] = captured(lambda: problem.read(first), 1)
    times, spans = interleaved(functions, rounds, 10)
    rows = []
    for name, values in times.items():
        each = [1000 * value / problem.copies for value in values]
        readings = [reading for span in spans[name] if (reading := sampler.between(*span))[0] is not None]
        clock, watts = (statistics.median(r[index] for r in readings) if readings else None for index in (0, 1))
        row = dict(case=label, kernel=name, rows=problem.rows, launches=problem.launches, dtype=str(problem.dtype)[6:],
                   inputDType=str(problem.input_dtype)[6:], microseconds=round(statistics.median(each), 3),
                   fastest=round(min(each), 3), slowest=round(max(each), 3), rounds=rounds,
                   gigabytesPerSecond=round(problem.pool.nbytes / problem.copies / statistics.median(each) / 1e3, 1),
                   clockMegahertz=clock, watts=watts, relativeError=errors.get(name))
        rows.append(row)
        print(f"{label:34s} {name:10s} {row['microseconds']:9.2f} us [{row['fastest']:.2f}..{row['slowest']:.2f}] "
              f"{row['gigabytesPerSecond']:7.1f} GB/s {clock} MHz {watts} W error {row['relativeError']}", flush=True)
    return rows


def comparisons(rows, machine, date):
    """Rows as docs/benchmarks/ keeps them (tools/bench/README.md): the kernel named kv against PyTorch."""
    summary = lambda row: dict(median=row['microseconds'], low=row['fastest'], high=row['slowest'], samples=row['rounds'])
    kept = []
    for case in dict.fromkeys(row['case'] for row in rows):
        by_name = {row['kernel']: row for row in rows if row['case'] == case}
        ours = by_name['kv']
        row = dict(measure=case, shapes={name: ours[name] for name in ('rows', 'launches', 'dtype', 'inputDType')},
                   device='cuda', kind='measured', unit='µs', better='lower', result=summary(ours),
                   reference=dict(name='PyTorch linear', **summary(by_name['F.linear'])), date=date, machine=machine)
        row.update({name: ours[name] for name in ('gigabytesPerSecond', 'clockMegahertz', 'watts', 'relativeError')})
        row['readGigabytesPerSecond'] = by_name['read']['gigabytesPerSecond']
        kept.append(row)
    return {'title': 'Few-row linear layers on the GPU against PyTorch', 'rows': kept}


QUERY, KEY, GATE, DOWN = (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)
# The linear layers of a Llama 3.1 8B layer, as its runner calls them.
BLOCK = [[QUERY, KEY, KEY], [QUERY], [GATE, GATE], [DOWN]]


def all_cases():
    half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
    cases = {}
    for shape in (KEY, QUERY, GATE, DOWN, (128256, 4096)):
        for rows in (1, 2, 4, 8):
            cases[f'{shape[0]} × {shape[1]}, rows: {rows}'] = ([[shape]], rows, half, half)
    for rows in (1, 8):
        cases[f'4096 × 4096, bf16, rows: {rows}'] = ([[QUERY]], rows, bfloat, bfloat)
        for shape in (QUERY, DOWN):
            cases[f'{shape[0]} × {shape[1]}, f32 input, rows: {rows}'] = ([[shape]], rows, half, single)
        cases[f'layers of a block, rows: {rows}'] = (BLOCK, rows, half, half)
        cases[f'layers of a block, one by one, rows: {rows}'] = ([[s] for layers in BLOCK for s in layers], rows, half, half)
    return cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('libraries', nargs='+')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--only', default='')
    parser.add_argument('--json')
    options = parser.parse_args()
    libraries = libraries_of(options.libraries)
    torch.manual_seed(time.time_ns())
    sampler = Sampler()
    rows = []
    for label, arguments in all_cases().items():
        if options.only and not any(text in label for text in options.only.split(',')):
            continue
        rows += measure(Problem(*arguments), label, libraries, options.rounds, sampler)
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, 'w') as file:
            json.dump(comparisons(rows, machine_of(sampler.handle), time.strftime('%Y-%m-%d')), file, indent=1, ensure_ascii=False)


main()
