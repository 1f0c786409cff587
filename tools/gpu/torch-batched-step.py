"""Times a decode step of many sequences beside the same step in PyTorch, in turns, and writes rows for docs/benchmarks.

    python3 tools/gpu/torch-batched-step.py MODEL [--batches 1x4096 8x4096 63x1024,1x131072] [--json rows.json]

MODEL is a directory of tools/make-random-model.mjs with the shapes of an 8B Llama; run it in the test kit. PyTorch's step
is what one would write: compiled, cuDNN's attention over a contiguous cache, captured in one CUDA graph. It neither
samples nor checks anything. In a batch of several lengths sequences of one length attend together, in a call of their own.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCHES = ["1x4096", "8x4096", "16x4096", "32x4096", "64x4096", "128x4096", "63x1024,1x131072"]
LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, DIM, INTERMEDIATE, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
DEVICE = {"device": "cuda", "dtype": torch.float16}


def rotated(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@torch.compile(dynamic=False)
def project(x, norm, qkv):
    return F.linear(F.rms_norm(x, (HIDDEN,), norm), qkv)


@torch.compile(dynamic=False)
def turn(q, k, cos, sin):
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


@torch.compile(dynamic=False)
def feed_forward(x, attended, output, norm, gate_up, down):
    x = x + F.linear(attended, output)
    gate, up = F.linear(F.rms_norm(x, (HIDDEN,), norm), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


class TorchStep:
    def __init__(self):
        def weight(outs, ins):
            return torch.randn(outs, ins, **DEVICE) * 0.02

        self.layers = [
            {
                "norms": torch.ones(2, HIDDEN, **DEVICE),
                "qkv": weight((QUERY_HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                "output": weight(HIDDEN, QUERY_HEADS * DIM),
                "gate_up": weight(2 * INTERMEDIATE, HIDDEN),
                "down": weight(HIDDEN, INTERMEDIATE),
            }
            for _ in range(LAYERS)
        ]
        self.embedding, self.head = weight(VOCABULARY, HIDDEN), weight(VOCABULARY, HIDDEN)
        self.norm = torch.ones(HIDDEN, **DEVICE)
        self.cos, self.sin = torch.randn(2, 1, 1, 1, DIM, **DEVICE)

    def capture(self, lengths):
        """A graph of one step, and the caches that it works on."""
        # Layers share caches where all of them would not fit beside our model: several still do not fit into L2.
        distinct = LAYERS if sum(lengths) <= 2**18 else LAYERS // 4
        alike = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
        cache = [
            [torch.randn(2, count, KV_HEADS, length, DIM, **DEVICE) for length, count in alike]
            for _ in range(distinct)
        ]
        sequences, counts = len(lengths), [count for _, count in alike]
        ids = torch.randint(0, VOCABULARY, (sequences,), device="cuda")

        def attend(q, k, v, keys, values):
            keys[:, :, -1:], values[:, :, -1:] = k, v
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        def step():
            x = self.embedding[ids]
            for layer, caches in zip(self.layers, itertools.cycle(cache)):
                qkv = project(x, layer["norms"][0], layer["qkv"]).view(sequences, QUERY_HEADS + 2 * KV_HEADS, DIM)
                q, k, v = (part.unsqueeze(2) for part in qkv.split((QUERY_HEADS, KV_HEADS, KV_HEADS), 1))
                q, k = turn(q, k, self.cos, self.sin)
                rows = zip(q.split(counts), k.split(counts), v.split(counts), caches)
                parts = [attend(q, k, v, keys, values) for q, k, v, (keys, values) in rows]
                attended = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(sequences, QUERY_HEADS * DIM)
                x = feed_forward(x, attended, layer["output"], layer["norms"][1], layer["gate_up"], layer["down"])
            return F.linear(F.rms_norm(x, (HIDDEN,), self.norm), self.head).argmax(-1)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph, cache

    def time(self, graph, steps):
        milliseconds = []
        for _ in range(steps + 4):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(start.elapsed_time(end))
        return milliseconds[4:]


class OurStep:
    def __init__(self, model):
        command = ["./node", "tools/gpu/batch-bench.mjs", model]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.machine = self.answer()["ready"]

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def time(self, lengths, steps):
        print("step", lengths, steps, file=self.process.stdin, flush=True)
        return self.answer()["milliseconds"]


def summary(samples):
    low, median, high = min(samples), statistics.median(samples), max(samples)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3), "samples": len(samples)}


def least_bytes(lengths):
    layer = HIDDEN * DIM * 2 * (QUERY_HEADS + KV_HEADS) + 3 * HIDDEN * INTERMEDIATE
    weights = LAYERS * layer + VOCABULARY * HIDDEN
    return 2 * (weights + LAYERS * 2 * KV_HEADS * DIM * sum(lengths))


def parse_lengths(batch):
    """`63x1024,1x131072` as the length of each sequence."""
    parts = [map(int, part.split("x")) for part in batch.split(",")]
    return [length for count, length in parts for _ in range(count)]


def measure_of(lengths):
    counts = {length: lengths.count(length) for length in sorted(set(lengths))}
    sequences = [f"{count} sequence{'s' if count > 1 else ''} of {length}" for length, count in counts.items()]
    return f"decode step of {' and '.join(sequences)} tokens"


def row(lengths, ours, theirs, machine):
    return {
        "measure": measure_of(lengths),
        "shapes": {"layers": LAYERS, "hiddenSize": HIDDEN, "dtype": "f16", "leastBytes": least_bytes(lengths)},
        "device": "cuda",
        "kind": "measured",
        "unit": "ms",
        "better": "lower",
        "result": summary(ours),
        "reference": {"name": "PyTorch, compiled, one CUDA graph", **summary(theirs)},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batches", nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json")
    options = parser.parse_args()
    ours, torch_step = OurStep(options.model), TorchStep()
    rows = []
    for batch in options.batches:
        lengths = parse_lengths(batch)
        graph, cache = torch_step.capture(lengths)
        samples = {"ours": [], "torch": []}
        for _ in range(options.rounds):
            samples["torch"] += torch_step.time(graph, options.steps)
            samples["ours"] += ours.time(batch, options.steps)
        del graph, cache
        torch.cuda.empty_cache()
        rows.append(row(lengths, samples["ours"], samples["torch"], ours.machine))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("quit", file=ours.process.stdin, flush=True)
    text = json.dumps(rows, indent=2)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
