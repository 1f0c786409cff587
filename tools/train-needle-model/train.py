"""Trains the model. Length curriculum, learning rate and stop follow the wall clock, so a run fits a lease.

train.py --data DIR --out DIR --seconds 480 [--init FILE.safetensors] [--stage A|B] [--device cpu] ...
"""

import argparse
import json
import math
import os
import sys
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
import numpy as np
import torch
import torch.multiprocessing as mp

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from model import Cfg, Llama, hf_config
from taskgen import TASKS, Gen, load_corpus

# (progress from which it holds, {row length: share of tokens}, share of MIX0 in the task mix or None for MIX2)
CURR = dict(
    A=[
        (0.00, {512: 1.0}, 1.0),
        (0.04, {512: 0.4, 1024: 0.3, 2048: 0.3}, 0.7),
        (0.12, {512: 0.1, 1024: 0.2, 2048: 0.3, 4096: 0.4}, 0.4),
        (0.35, {512: 0.05, 1024: 0.1, 2048: 0.2, 4096: 0.3, 8192: 0.35}, 0.2),
        (0.60, {512: 0.03, 1024: 0.12, 2048: 0.15, 4096: 0.25, 8192: 0.3, 16384: 0.15}, 0.1),
    ],
    B=[
        (0.00, {512: 0.30, 1024: 0.15, 2048: 0.15, 4096: 0.2, 8192: 0.2}, None),
        (0.35, {512: 0.12, 1024: 0.15, 2048: 0.18, 4096: 0.25, 8192: 0.25, 16384: 0.05}, None),
        (0.70, {512: 0.05, 1024: 0.1, 2048: 0.15, 4096: 0.25, 8192: 0.25, 16384: 0.2}, None),
    ],
)


def stage(curr, p):
    out = curr[0]
    for s in curr:
        if p >= s[0]:
            out = s
    return out


def worker(k, args, gen, slots_ids, slots_w, slots_t, free, ready, prog, seed):
    torch.set_num_threads(1)
    gen.reseed(seed * 1000 + k)
    rng = np.random.default_rng(seed * 7919 + k)
    if args.stage == "B":
        gen.hard, gen.trace_share = 4.0, 0.8
    T = args.tokens
    while True:
        s = free.get()
        if s is None:
            return
        _, Ls, m0 = stage(CURR[args.stage], prog.value)
        L = int(rng.choice(list(Ls), p=np.array(list(Ls.values())) / sum(Ls.values())))
        B = T // L
        mix = gen.MIX2 if m0 is None else {k_: m0 * gen.MIX0[k_] + (1 - m0) * gen.MIX1[k_] for k_ in gen.MIX0}
        ids = slots_ids[s].numpy()[: B * (L + 1)].reshape(B, L + 1)
        w = slots_w[s].numpy()[: B * (L + 1)].reshape(B, L + 1)
        tid = slots_t[s].numpy()
        b = np.empty((B, L + 1), np.uint16)
        gen.batch(B, L + 1, mix, b, w, tid)
        ids[:] = b
        ready.put((s, L))


def zeropower(G, steps=5):
    """Newton-Schulz iteration of Muon on a batch of matrices (N, r, c)"""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(torch.bfloat16)
    tr = X.size(-2) > X.size(-1)
    if tr:
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tr else X


class Muon:
    """All matrices of one role (one a layer, or one block of a fused matrix a layer) are orthogonalised as one batch."""

    def __init__(self, roles, lr, momentum=0.95, wd=0.01, comp=None):
        self.roles = roles  # list of (list of params, row slice or None)
        self.lr, self.mu, self.wd = lr, momentum, wd
        self.buf = [None] * len(roles)
        self.zp = comp(zeropower) if comp else zeropower

    @torch.no_grad()
    def step(self, mult):
        for i, (ps, sl) in enumerate(self.roles):
            g = torch.stack([(p.grad if sl is None else p.grad[sl[0] : sl[1]]) for p in ps])
            if self.buf[i] is None:
                self.buf[i] = torch.zeros_like(g)
            b = self.buf[i]
            b.lerp_(g, 1 - self.mu)
            u = self.zp(g.lerp(b, self.mu))
            lr = self.lr * mult
            sc = lr * max(1.0, g.size(-2) / g.size(-1)) ** 0.5
            dst = [p if sl is None else p[sl[0] : sl[1]] for p in ps]
            torch._foreach_mul_(dst, 1 - lr * self.wd)
            torch._foreach_add_(dst, list(u.to(g.dtype).unbind(0)), alpha=-sc)


def roles_of(m):
    c = m.c
    q, k = c.hq * c.hd, c.hkv * c.hd
    ls = m.ls
    return [
        ([l.wqkv for l in ls], (0, q)),
        ([l.wqkv for l in ls], (q, q + k)),
        ([l.wqkv for l in ls], (q + k, q + 2 * k)),
        ([l.wo for l in ls], None),
        ([l.wgu for l in ls], (0, c.ff)),
        ([l.wgu for l in ls], (c.ff, 2 * c.ff)),
        ([l.wd for l in ls], None),
    ]


def pick_backends(m, T, dev, lens):
    from torch.nn.attention import SDPBackend as S

    c = m.c
    for L in lens:
        B = T // L
        res = {}
        for be in (S.FLASH_ATTENTION, S.CUDNN_ATTENTION):
            try:
                q, k, v = (
                    torch.randn(B * L, h, c.hd, device=dev, dtype=torch.bfloat16, requires_grad=True)
                    for h in (c.hq, c.hkv, c.hkv)
                )
                m.backend[L] = be
                go = torch.randn(B * L, c.hq * c.hd, device=dev, dtype=torch.bfloat16)
                for i in range(5):
                    if i == 2:
                        torch.cuda.synchronize()
                        t0 = time.time()
                    o = m.attn(q, k, v, B, L)
                    torch.autograd.grad(o, (q, k, v), go)
                torch.cuda.synchronize()
                res[be] = (time.time() - t0) / 3 * 1e3
            except Exception as e:
                print("backend", be, L, "failed:", str(e)[:160])
        m.backend[L] = min(res, key=res.get) if res else None
        print(
            "attention L=%d ms %s" % (L, {str(k).split(".")[-1]: round(v, 2) for k, v in res.items()}),
            flush=True,
        )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--seconds", type=float, default=480)
    ap.add_argument("--stage", default="A")
    ap.add_argument("--init")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--tokens", type=int, default=65536)
    ap.add_argument("--workers", type=int, default=13)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--elr", type=float, default=3e-3)
    ap.add_argument("--beta", type=float, default=1.0)
    ap.add_argument("--decay_from", type=float, default=0.6)
    ap.add_argument("--warmup", type=int, default=200)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--log", type=int, default=100)
    ap.add_argument("--cfg", default="{}")
    ap.add_argument("--mu", type=float, default=0.95)
    ap.add_argument("--opt", default="muon")
    ap.add_argument("--nocompile", action="store_true")
    ap.add_argument("--maxsteps", type=int, default=10**9)
    ap.add_argument("--lr0", type=float, default=1.0)
    ap.add_argument("--eval", type=int, default=0)
    ap.add_argument("--elens", default="1024,2048,4096,8192,16384")
    args = ap.parse_args()
    t_start = time.time()
    dev = torch.device(args.device)
    cuda = dev.type == "cuda"
    torch.manual_seed(args.seed)
    corpus = load_corpus(args.data)
    gen = Gen(os.path.join(args.data, "tokenizer.json"), corpus, seed=args.seed)
    print("generator ready %.1fs, corpus %d tokens" % (time.time() - t_start, len(corpus)), flush=True)
    ctx = mp.get_context("fork")
    T = args.tokens
    N = 3 * args.workers
    ids_s = [torch.zeros(T + 256, dtype=torch.int32).share_memory_() for _ in range(N)]
    w_s = [torch.zeros(T + 256, dtype=torch.float32).share_memory_() for _ in range(N)]
    t_s = [torch.zeros(256, dtype=torch.int64).share_memory_() for _ in range(N)]
    free, ready, prog = ctx.Queue(), ctx.Queue(), ctx.Value("d", 0.0)
    for i in range(N):
        free.put(i)
    procs = [
        ctx.Process(
            target=worker, args=(k, args, gen, ids_s, w_s, t_s, free, ready, prog, args.seed), daemon=True
        )
        for k in range(args.workers)
    ]
    for p in procs:
        p.start()
    epath = os.path.join(args.out, "eval_rows.npz")
    if args.eval:
        import subprocess  # a fresh process: the tokenizer's thread pool does not survive a fork

        import evalgpu

        ep = subprocess.Popen(
            [sys.executable, evalgpu.__file__, args.data, epath, str(args.eval), args.elens]
        )
    c = Cfg(**json.loads(args.cfg))
    m = Llama(c, compile=cuda and not args.nocompile).to(dev)
    if args.init:
        from safetensors.torch import load_file

        sd = {}
        for f in args.init.split(","):
            sd.update(load_file(f))
        m.load_hf(sd)
    npar = sum(p.numel() for p in m.parameters())
    print("parameters", npar, c, flush=True)
    if cuda:
        torch.set_float32_matmul_precision("high")
        pick_backends(m, T, dev, sorted({L for s in CURR[args.stage] for L in s[1]}))
    small = [m.emb, m.nf] + [p for l in m.ls for p in (l.n1, l.n2)]
    mats = [p for l in m.ls for p in (l.wqkv, l.wo, l.wgu, l.wd)]
    comp = None
    if args.opt == "muon":
        muon = Muon(roles_of(m), args.lr, args.mu, comp=comp)
        adam = torch.optim.AdamW(
            [dict(params=small, lr=args.elr, weight_decay=0.0)], betas=(0.9, 0.95), eps=1e-8, fused=True
        )
    else:
        muon = None
        adam = torch.optim.AdamW(
            [
                dict(params=small, lr=args.elr, weight_decay=0.0),
                dict(params=mats, lr=args.lr, weight_decay=0.05),
            ],
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=True,
        )
    base = [g["lr"] for g in adam.param_groups]
    LB = [256, 512, 1024, 2048, 4096, 8192, 16384]
    acc = torch.zeros(len(TASKS) * len(LB), 2, device=dev)
    los = torch.zeros(3, device=dev)
    os.makedirs(args.out, exist_ok=True)
    logf = open(os.path.join(args.out, "train_log.jsonl"), "a")
    step = 0
    tokens = 0
    t0 = None
    tl = time.time()
    tokl = 0
    wait = 0.0
    pin = [
        (
            torch.zeros(T + 256, dtype=torch.int32, pin_memory=cuda),
            torch.zeros(T + 256, dtype=torch.float32, pin_memory=cuda),
        )
        for _ in range(4)
    ]
    evs = [torch.cuda.Event() for _ in range(4)] if cuda else None
    while True:
        now = time.time()
        p = 0.0 if t0 is None else (now - t0) / args.seconds
        prog.value = p
        if p >= 1 or step >= args.maxsteps:
            break
        tw = time.time()
        s, L = ready.get()
        wait += time.time() - tw
        B = T // L
        n = B * (L + 1)
        pi, pw = pin[step % 4]
        if cuda and step >= 4:
            evs[step % 4].synchronize()
        pi[:n] = ids_s[s][:n]
        pw[:n] = w_s[s][:n]
        tid = t_s[s][:B].clone()
        free.put(s)
        ids = pi[:n].to(dev, non_blocking=True).view(B, L + 1).long()
        w = pw[:n].to(dev, non_blocking=True).view(B, L + 1)
        if cuda:
            evs[step % 4].record()
        tid = tid.to(dev, non_blocking=True)
        tgt = ids[:, 1:].contiguous()
        w = w[:, 1:].contiguous()
        inp = ids[:, :-1].contiguous()
        lm, an, hit, _ = m(inp, tgt, w)
        loss = lm + args.beta * an
        loss.backward()
        mult = min(1.0, (step + 1) / args.warmup) * args.lr0
        if p > args.decay_from:
            mult *= max(0.0, (1 - p) / (1 - args.decay_from)) * 0.99 + 0.01
        if muon:
            muon.step(mult)
        for g, b in zip(adam.param_groups, base):
            g["lr"] = b * mult
        adam.step()
        adam.zero_grad(set_to_none=True)
        if muon:
            for q in mats:
                q.grad = None
        with torch.no_grad():
            isa = w < 0
            rows = torch.stack([(hit.view(B, L) & isa).sum(1), isa.sum(1)], 1).float()
            acc.index_add_(0, tid * len(LB) + LB.index(L), rows)
            los += torch.stack([lm.detach(), an.detach(), torch.ones_like(lm)])
        step += 1
        tokens += B * L
        if t0 is None:
            if cuda:
                torch.cuda.synchronize()
            t0 = time.time()
            print("first step done %.1fs" % (t0 - t_start), flush=True)
        if step % args.log == 0:
            a = acc.view(len(TASKS), len(LB), 2).cpu()
            l = (los[:2] / los[2]).cpu().tolist()
            now = time.time()
            per = {
                t: {
                    LB[j]: round((a[i, j, 0] / a[i, j, 1]).item(), 3)
                    for j in range(len(LB))
                    if a[i, j, 1] > 0
                }
                for i, t in enumerate(TASKS)
                if a[i, :, 1].sum() > 0
            }
            tot = {
                t: round((a[i, :, 0].sum() / a[i, :, 1].sum()).item(), 3)
                for i, t in enumerate(TASKS)
                if a[i, :, 1].sum() > 0
            }
            rec = dict(
                step=step,
                p=round(p, 4),
                t=round(now - t_start, 1),
                tokens=tokens,
                lm=round(l[0], 4),
                ans=round(l[1], 4),
                mult=round(mult, 4),
                tps=int((tokens - tokl) / (now - tl)),
                wait=round(wait, 2),
                acc=per,
            )
            logf.write(json.dumps(rec) + "\n")
            logf.flush()
            print(
                "%d p%.3f t%.0f %.0fM lm %.3f ans %.3f x%.2f %.2fMt/s w%.1f %s"
                % (
                    step,
                    p,
                    now - t_start,
                    tokens / 1e6,
                    l[0],
                    l[1],
                    mult,
                    rec["tps"] / 1e6,
                    wait,
                    " ".join("%s %.2f" % (k[:7], v) for k, v in tot.items()),
                ),
                flush=True,
            )
            acc.zero_()
            los.zero_()
            tl = now
            tokl = tokens
            wait = 0.0
            if not math.isfinite(l[0]):
                print("DIVERGED")
                break
    if cuda:
        torch.cuda.synchronize()
    t_train = time.time() - t0
    for q in procs:
        q.terminate()
    from safetensors.torch import save_file

    sd = m.hf_state()
    save_file(sd, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})
    json.dump(
        dict(
            hf=hf_config(c, c.maxpos),
            steps=step,
            tokens=tokens,
            train_seconds=t_train,
            parameters=npar,
            args=vars(args),
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            device=torch.cuda.get_device_name() if cuda else "cpu",
        ),
        open(os.path.join(args.out, "train_meta.json"), "w"),
        indent=1,
    )
    print("saved", step, "steps", tokens, "tokens", "%.1fs" % t_train, flush=True)
    if args.eval:
        ep.wait(200)
        m.load_hf({k: v.to(dev) for k, v in sd.items()})  # the bf16 weights, as saved
        te = time.time()
        res = evalgpu.evaluate(m, epath, T, dev)
        json.dump(res, open(os.path.join(args.out, "eval_gpu.json"), "w"), indent=1)
        evalgpu.show(res)
        print("eval %.1fs" % (time.time() - te))


if __name__ == "__main__":
    main()
