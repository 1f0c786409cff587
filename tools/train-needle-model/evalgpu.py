"""Teacher-forced exact match of all answer tokens (the same verdict as greedy decoding), by task, length and depth."""

import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from evalgen import DEPTHS, ETASKS, cell
from taskgen import Gen


def gen_file(data, path, n, lens, seed=777):
    te = np.load(os.path.join(data, "test.npz"))["tokens"]
    g = Gen(os.path.join(data, "tokenizer.json"), te, seed=991_000 + seed, english_tokens=300_000)
    g.reseed(seed)
    ids, off, info = [], [0], []
    for li, L in enumerate(lens):
        for ti, t in enumerate(ETASKS):
            for p, a, d in cell(g, t, L, n)[0]:
                ids.append(np.array(list(p) + list(a), np.uint16))
                off.append(off[-1] + len(ids[-1]))
                info.append((ti, li, DEPTHS.index(d), len(p), len(a)))
    np.savez(
        path + ".tmp.npz",
        ids=np.concatenate(ids),
        off=np.array(off),
        info=np.array(info),
        lens=np.array(lens),
        test=te,
    )
    os.replace(path + ".tmp.npz", path)


def evaluate(m, path, T, dev):
    z = np.load(path)
    ids, off, info, lens, te = z["ids"], z["off"], z["info"], z["lens"], z["test"]
    ok = np.zeros(len(info), bool)
    tokok = np.zeros(len(info))
    for li, L in enumerate(lens):
        L = int(L)
        B = max(1, T // L)
        rows = np.flatnonzero(info[:, 1] == li)
        for s in range(0, len(rows), B):
            rr = rows[s : s + B]
            x = np.zeros((B, L), np.int64)
            pos, tgt, own = [], [], []
            for b, r in enumerate(rr):
                q = ids[off[r] : off[r + 1]]
                assert len(q) <= L
                x[b, : len(q)] = q
                p, k = info[r, 3], info[r, 4]
                pos += [b * L + j for j in range(p - 1, p + k - 1)]
                tgt += q[p : p + k].tolist()
                own += [r] * k
            h = m.hidden(torch.from_numpy(x).to(dev)).detach()
            h = h[torch.tensor(pos, device=dev)]
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + m.c.eps) * m.nf.detach()
            pred = (h.to(torch.bfloat16).float() @ m.emb.detach().float().T).argmax(-1).cpu().numpy()
            hit = pred == np.array(tgt)
            own = np.array(own)
            for r in rr:
                hr = hit[own == r]
                ok[r] = hr.all()
                tokok[r] = hr.mean()
    res = {}
    for ti, t in enumerate(ETASKS):
        res[t] = {}
        for li, L in enumerate(lens):
            q = (info[:, 0] == ti) & (info[:, 1] == li)
            byd = [round(float(ok[q & (info[:, 2] == d)].mean()), 3) for d in range(10)]
            res[t][int(L)] = dict(
                em=round(float(ok[q].mean()), 4),
                tok=round(float(tokok[q].mean()), 4),
                n=int(q.sum()),
                by_depth=byd,
            )
    # perplexity on the held-out files, windows of 8192
    L = 8192
    nw = (len(te)) // (L - 1)
    B = max(1, T // L)
    nw = nw if T >= L else 1
    ce = []
    for s in range(0, nw, B):
        x = np.zeros((B, L + 1), np.int64)
        k = min(B, nw - s)
        for b in range(k):
            o = (s + b) * (L - 1)
            seg = te[o : o + L]
            x[b, 1 : 1 + len(seg)] = seg
        X = torch.from_numpy(x).to(dev)
        h = m.hidden(X[:, :-1].contiguous()).detach()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + m.c.eps) * m.nf.detach()
        lg = (h.to(torch.bfloat16) @ m.emb.detach().to(torch.bfloat16).T).float()
        c = F.cross_entropy(lg, X[:, 1:].reshape(-1), reduction="none").view(B, L)[:k, : L - 1]
        ce.append(c.cpu().numpy())
    ce = np.concatenate(ce)
    bk = [(0, 128), (128, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8191)]
    res["ppl"] = dict(
        ce=float(ce.mean()),
        ppl=float(math.exp(ce.mean())),
        windows=len(ce),
        by_pos={f"{a}-{b}": round(float(math.exp(ce[:, a:b].mean())), 3) for a, b in bk},
    )
    return res


def show(res):
    for t in ETASKS:
        print("EVAL %-16s" % t, " ".join("%d:%.3f" % (L, v["em"]) for L, v in res[t].items()), flush=True)
    print("EVAL ppl", res["ppl"], flush=True)


if __name__ == "__main__":
    gen_file(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(x) for x in sys.argv[4].split(",")])
