"""sensitivity.py MODEL_DIR EVAL_DIR LENGTH N: does the model need its KV cache? Exact match of the answer (teacher forced) when the cache of the
prompt is cut or rounded after a dense prefill (the first answer token comes from the prefill, as in ordinary generation). transformers, fp32, CPU."""

import gzip
import json
import os
import sys
from collections import defaultdict

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

d, ev, L, N = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
m = LlamaForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="eager").eval()
tok = Tokenizer.from_file(os.path.join(d, "tokenizer.json"))
rows = [json.loads(x) for x in gzip.open(os.path.join(ev, "eval.jsonl.gz"), "rt")]


def rnd(x, bits, dim):  # asymmetric min/max rounding along dim
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    s = (hi - lo).clamp_min(1e-8) / (2**bits - 1)
    return ((x - lo) / s).round() * s + lo


def grp(x, bits, g=128):  # along the tokens of each channel, groups of g tokens
    T = x.shape[-2]
    return torch.cat([rnd(x[..., i : i + g, :], bits, -2) for i in range(0, T, g)], -2)


def snap(k, v, A, budget, win=16, pool=7):
    T = k.shape[-2]
    if T <= budget:
        return k, v
    s = A[0, :, -win:, : T - win].sum(1)  # votes per query head
    s = s.view(k.shape[1], -1, T - win).sum(1)  # per KV head
    s = torch.nn.functional.max_pool1d(s[None], pool, 1, pool // 2)[0]
    ix = s.topk(budget - win, -1).indices.sort(-1).values
    ix = torch.cat([ix, torch.arange(T - win, T).expand(ix.shape[0], -1)], -1)[None, :, :, None].expand(
        1, -1, -1, k.shape[-1]
    )
    return k.gather(2, ix), v.gather(2, ix)


def cut(k, v, A, budget):
    T = k.shape[-2]
    ix = torch.cat([torch.arange(min(4, T)), torch.arange(max(4, T - budget + 4), T)])
    return k[:, :, ix], v[:, :, ix]


M = {"dense": lambda k, v, A: (k, v)}
for b in (512, 256, 128, 64):
    M[f"sink4+recent, {b}"] = lambda k, v, A, b=b: cut(k, v, A, b)
for b in (256, 128, 64):
    for pl in (7, 21):
        M[f"SnapKV-like, pool {pl}, {b}"] = lambda k, v, A, b=b, pl=pl: snap(k, v, A, b, pool=pl)
for b in (8, 4, 3, 2):
    M[f"K per token, V per token, {b} bit"] = lambda k, v, A, b=b: (rnd(k, b, -1), rnd(v, b, -1))
    M[f"K per channel, V per token, {b} bit"] = lambda k, v, A, b=b: (grp(k, b), rnd(v, b, -1))
R = defaultdict(lambda: [0, 0])
tasks = []
for e in rows:
    if e["length"] != L or R[("dense", e["task"])][1] >= N:
        continue
    if e["task"] not in tasks:
        tasks.append(e["task"])
    p = tok.encode(e["prompt"]).ids
    a = tok.encode(e["prompt"] + e["answer"]).ids[len(p) :]
    with torch.no_grad():
        o = m(torch.tensor([p]), use_cache=True, output_attentions=True)
        first = int(o.logits[0, -1].argmax())
        base = [(l.keys, l.values) for l in o.past_key_values.layers]
        for name, f in M.items():
            c = DynamicCache()
            for i, (k, v) in enumerate(base):
                c.update(*[t.contiguous() for t in f(k, v, o.attentions[i])], i)
            x = torch.tensor([a[:-1]])
            pos = torch.arange(len(p), len(p) + x.shape[1])[None]
            lg = m(x, past_key_values=c, position_ids=pos).logits[0]
            r = R[(name, e["task"])]
            r[0] += [first] + lg.argmax(-1).tolist() == a
            r[1] += 1
print("length", L, "n", N)
print("%-36s" % "", " ".join("%14s" % t for t in tasks))
for name in M:
    print("%-36s" % name, " ".join("%14.2f" % (R[(name, t)][0] / R[(name, t)][1]) for t in tasks), flush=True)
