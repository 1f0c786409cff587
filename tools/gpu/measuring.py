"""What the scripts that time our kernels beside PyTorch's share."""
import ctypes
import statistics
import threading
import time

import pynvml
import torch


class Sampler:
    """Reads the SM clock and the power every 10 ms."""

    def __init__(self):
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            clock = pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            watts = pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1000
            self.samples.append((time.time(), clock, watts))
            time.sleep(0.01)

    def between(self, start, end):
        chosen = [sample for sample in self.samples if start <= sample[0] <= end]
        if not chosen:
            return None, None
        return statistics.median(s[1] for s in chosen), statistics.median(s[2] for s in chosen)


def libraries_of(arguments):
    """`PATH` or `NAME=PATH` of each build of libcuda-kernels.so: the libraries by name, of which one without is kv."""
    named = (argument.rpartition('=') for argument in arguments)
    return {name or 'kv': ctypes.CDLL(path) for name, _, path in named}


def pointers_of(tensors):
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() if t is not None else None for t in tensors])


def integers_of(values):
    return (ctypes.c_int64 * len(values))(*[int(value) for value in values])


def current_stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def time_once(function, repeats):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def timed(functions, rounds, sampler, repeats, prepare=lambda: None):
    """Milliseconds a call, clock and power of each function, by name; the functions take turns, of `repeats` calls each.
    `prepare` is called in front of each turn, whose time it is no part of."""
    for function in functions.values():
        function()
    times, spans = ({name: [] for name in functions} for _ in range(2))
    for round_number in range(rounds):
        order = list(functions.items())
        shift = round_number % len(order)
        for name, function in order[shift:] + order[:shift]:
            prepare()
            begun = time.time()
            times[name].append(time_once(function, repeats))
            spans[name].append((begun, time.time()))
    results = {}
    for name, values in times.items():
        seen = [reading for reading in (sampler.between(*span) for span in spans[name]) if reading[0] is not None]
        clock, watts = (statistics.median(r[index] for r in seen) if seen else None for index in (0, 1))
        results[name] = dict(median=statistics.median(values), low=min(values), high=max(values), samples=rounds), clock, watts
    return results


def captured(function, repeats):
    """Replays `repeats` calls from one graph: calls shorter than their launches would time the host instead."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return graph.replay


def timed_in_graphs(functions, rounds, sampler, calls, prepare=lambda: None):
    """The same of functions of which `calls` calls are in one graph."""
    replays = {name: captured(function, calls) for name, function in functions.items()}
    results = timed(replays, rounds, sampler, 1, prepare)
    a_call = lambda taken: taken | {name: round(taken[name] / calls, 4) for name in ('median', 'low', 'high')}
    return {name: (a_call(taken), clock, watts) for name, (taken, clock, watts) in results.items()}


def neighbour_shares(work, copies):
    """How much longer `work` takes beside each of the copies, which are repeated meanwhile: in turns."""
    side = torch.cuda.Stream()
    shares = {name: [] for name in copies}

    def beside(copy):
        with torch.cuda.stream(side):
            for _ in range(30):
                copy()
        took = time_once(work, 20)
        side.synchronize()
        return took

    for turn in range(16):
        for name, copy in copies.items():
            share = beside(copy) / time_once(work, 20) - 1
            if turn > 0:
                shares[name].append(share)
    return shares


def machine_of(handle):
    watts = pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000
    return f'{pynvml.nvmlDeviceGetName(handle)}, driver {pynvml.nvmlSystemGetDriverVersion()}, power limit {watts} W'
