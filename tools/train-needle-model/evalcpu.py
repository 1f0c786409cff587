"""evalcpu.py MODEL_DIR EVAL_DIR [per_cell] [max_len]: transformers on CPU, fp32, teacher-forced exact match of the answer, and perplexity."""

import gzip
import json
import math
import os
import sys
import time
from collections import defaultdict

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

d, ev = sys.argv[1:3]
per = int(sys.argv[3]) if len(sys.argv) > 3 else 10
mx = int(sys.argv[4]) if len(sys.argv) > 4 else 8192
mn = int(sys.argv[5]) if len(sys.argv) > 5 else 0
m = LlamaForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="sdpa").eval()
tok = Tokenizer.from_file(os.path.join(d, "tokenizer.json"))
ok = defaultdict(list)
dep = defaultdict(list)
t0 = time.time()
for line in gzip.open(os.path.join(ev, "eval.jsonl.gz"), "rt"):
    e = json.loads(line)
    k = (e["task"], e["length"])
    if e["length"] > mx or e["length"] < mn or len(ok[k]) >= per:
        continue
    p = tok.encode(e["prompt"]).ids
    a = tok.encode(e["prompt"] + e["answer"]).ids
    assert a[: len(p)] == p and len(p) == e["prompt_tokens"] and len(a) - len(p) == e["answer_tokens"]
    with torch.no_grad():
        lg = m(torch.tensor([a[:-1]]), logits_to_keep=len(a) - len(p)).logits[0]
    hit = lg.argmax(-1).tolist() == a[len(p) :]
    ok[k].append(hit)
    dep[(e["task"], e["depth"])].append(hit)
for t in dict.fromkeys(k[0] for k in ok):
    print(
        "%-16s" % t,
        " ".join(
            "%d: %.3f (%d)" % (k[1], sum(v) / len(v), len(v)) for k, v in sorted(ok.items()) if k[0] == t
        ),
        flush=True,
    )
ce = []
for i, line in enumerate(gzip.open(os.path.join(ev, "ppl.jsonl.gz"), "rt")):
    if i >= 8:
        break
    x = torch.tensor([tok.encode(json.loads(line)["text"]).ids[: min(mx, 8192)]])
    with torch.no_grad():
        lg = m(x).logits[0]
    ce.append(torch.nn.functional.cross_entropy(lg[:-1], x[0, 1:]).item())
print(
    "ppl, first 8 documents of ppl.jsonl.gz: %.4f" % math.exp(sum(ce) / len(ce)),
    "seconds %.0f" % (time.time() - t0),
)
