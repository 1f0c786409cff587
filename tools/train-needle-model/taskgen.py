"""Generator of training rows and held-out evaluation examples.

Every row starts with BOS. `w` holds one number a token: 0 = ignored, > 0 = language-model loss, < 0 = answer loss (-w).
"""

import lzma
import os

import numpy as np

from filler import EOS, Filler

TASKS = ["code", "english", "needle1", "needleN", "multiquery", "kv", "vartrack", "mqar", "copy", "trace"]
TID = {t: i for i, t in enumerate(TASKS)}


class Gen(Filler):
    def __init__(self, tok_path, corpus, seed=0, english_tokens=1_500_000):
        super().__init__(tok_path, corpus, seed, english_tokens)

    MIX0 = dict(code=0.30, english=0.02, needle=0.20, kv=0.14, vartrack=0.10, mqar=0.14, copy=0.10)
    MIX1 = dict(code=0.30, english=0.02, needle=0.32, kv=0.18, vartrack=0.12, mqar=0.03, copy=0.03)

    MIX2 = dict(
        code=0.30, english=0.02, needle=0.20, kv=0.15, vartrack=0.18, mqlist=0.10, mqar=0.025, copy=0.025
    )

    def tail_of(self, qas):
        """qas: list of (question, answer, end); -> tokens, weights"""
        ids, w = [], []
        for q, a, e, *aw in qas:
            ids += q
            w += [0.0] * len(q)
            ids += a
            w += aw[0] if aw else [-1.0] * len(a)
            ids += e
            w += [-1.0 if aw else -0.3] * len(e)
        ids.append(EOS)
        w.append(-0.3)
        return ids, w

    def row_needle(self, L):
        r = self.r
        fam = r.choice(
            ("pass2", "pass1", "pass1", "plain", "note", "assign", "magic", "listing", "json", "log")
        )
        nmax = max(2, (L - 100) // 50)
        x = r.random()
        if fam == "plain" or x < 0.2:
            n = 1
        elif x < 0.65:
            n = min(nmax, 2 + int(r.random() * 7))
        else:
            n = min(nmax, int(np.exp(np.log(6) + r.random() * (np.log(max(8, min(nmax, 200))) - np.log(6)))))
        fs = self.facts(fam, n)
        n = len(fs)
        st = self.fam[fam][0]
        items = []
        for d in fs:
            t = self.fill(st, d)
            items.append((t, 0.0))
        q = 1 + int(r.random() * 2) if r.random() < 0.5 else 2 + int(r.random() * 14)
        q = min(q, n)
        # a second family as distractors, sometimes
        if r.random() < 0.2 and n < nmax // 2:
            f2 = r.choice(("pass1", "note", "magic", "listing", "log"))
            if f2 != fam and fam != "plain":
                for d in self.facts(f2, 1 + int(r.random() * 4)):
                    items.insert(int(r.random() * (len(items) + 1)), (self.fill(self.fam[f2][0], d), 0.0))
        tid = TID["needle1"] if n == 1 else TID["needleN"]
        ask = r.sample(range(n), q)
        qas = []
        if fam in ("pass1", "pass2") and n >= 2 and r.random() < 0.35:
            m = min(n, 2 + int(r.random() * 3), max(2, q))
            ask = r.sample(range(n), m)
            qas.append(self.mq([fs[i] for i in ask]))
            tid = TID["multiquery"]
        else:
            for i in ask:
                qas.append(self.qa(fam, fs[i]))
        tail = self.tail_of(qas)
        out = self.assemble(L, items, tail)
        if out is None:
            return self.natural(L) + (TID["code"],)
        return out[0], out[1], tid

    def row_kv(self, L):
        r = self.r
        fam = r.choice(("json", "json", "json", "listing", "log", "assign"))
        kk = r.choice({"json": "XXXXXY", "listing": "XXPUX", "log": "XXXN", "assign": "UUU"}[fam])
        vk = "D" if fam != "listing" else r.choice("DDWH")
        q = 1 + int(r.random() * 2) if r.random() < 0.3 else 4 + int(r.random() * 20)
        nd = r.choice((5, 6, 6, 8)) if vk == "D" else None
        part = 1.0 if r.random() < 0.6 else 0.15 + 0.85 * r.random()
        st = self.fam[fam][0]
        used = set()
        fs, items, n = [], [], 0
        one = 26 if fam == "json" else 22
        budget = (L - 8) * part - q * (one + 8)
        if budget < 40:
            q = 2
            budget = (L - 8) - q * (one + 8)
        while True:
            name, k = self.key(kk)
            if name in used:
                continue
            d = dict(k)
            d.update(self.value(vk, nd))
            t = self.fill(st, d)
            if n + len(t) > budget:
                break
            used.add(name)
            fs.append(d)
            items += t
            n += len(t)
        if len(fs) < 2:
            return self.natural(L) + (TID["code"],)
        q = min(q, len(fs))
        ask = r.sample(range(len(fs)), q)
        tail = self.tail_of([self.qa(fam, fs[i]) for i in ask])
        out = self.assemble(
            L, [(items, 0.0)], tail, at=[0.0 if part == 1.0 or r.random() < 0.5 else r.random()]
        )
        if out is None:
            return self.natural(L) + (TID["code"],)
        return out[0], out[1], TID["kv"]

    def row_mqlist(self, L):
        r = self.r
        fam = r.choice(("pass1", "pass1", "pass2"))
        kk = r.choice("WWWPX")
        per = 24 if fam == "pass1" else 40
        n = (
            int(min(3 + r.random() * 14, (L - 40) * 0.4 / per))
            if L < 1500 or r.random() < 0.6
            else int(4 + r.random() * 60)
        )
        n = max(2, n)
        fs = self.facts(fam, n, kk=kk, vk=r.choice("DDDDW"))
        n = len(fs)
        items = [(self.fill(self.fam[fam][0], d), 0.0) for d in fs]
        room = L - 4 - sum(len(t) for t, _ in items)
        qas, used = [], 0
        for _ in range(1 + int(r.random() * (6 if L <= 1024 or r.random() < 0.5 else 2))):
            q = self.mq(r.sample(fs, min(n, 2 + int(r.random() * 4))))
            c = len(q[0]) + len(q[1]) + len(q[2])
            if used + c > room:
                break
            used += c
            qas.append(q)
        out = self.assemble(L, items, self.tail_of(qas)) if qas else None
        if out is None:
            return self.natural(L) + (TID["code"],)
        return out[0], out[1], TID["multiquery"]

    def row_vartrack(self, L):
        r = self.r
        style = r.choice((0, 0, 0, 1, 2))
        kk = r.choice("WWU") if style != 1 else "W"
        hmax = r.choice((1, 2, 3, 4))
        dense = r.random() < 0.35
        nch = 1 + int(r.random() * (3 if not dense else min(16, L // 100)))
        if not dense and r.random() < 0.5:
            nch = 1 + int(r.random() * min(12, max(2, L // 200)))
        chs = self.chains(nch, hmax, style, kk)
        # interleave the chains, keeping each one's order
        seq = []
        ptr = [0] * len(chs)
        live = [i for i in range(len(chs))]
        while live:
            i = r.choice(live)
            seq.append(chs[i][ptr[i]])
            ptr[i] += 1
            if ptr[i] == len(chs[i]):
                live.remove(i)
        q = min(len(seq), 1 + int(r.random() * 2) if r.random() < 0.3 else 3 + int(r.random() * 10))
        ask = r.sample(seq, q)
        tid = TID["vartrack"]
        if self.trace_share and r.random() < self.trace_share:
            own = {id(x): (ch, i) for ch in chs for i, x in enumerate(ch)}
            qas, n = [], 0
            for a in ask:
                t = self.trace(*own[id(a)])
                n += len(t[0]) + len(t[1]) + 1
                if n > L // 2:
                    break
                qas.append(t)
            tail = self.tail_of(qas)
            tid = TID["trace"]
        else:
            qas = []
            for a in ask:
                t = self.vq(style, a[1])
                qas.append(t + ([-1.0, -self.hard] + [-1.0] * (len(t[1]) - 2),))
            tail = self.tail_of(qas)
        if dense:
            t = [x for s in seq for x in s[0]]
            out = self.assemble(L, [(t, 0.0)], tail, at=[r.random() if r.random() < 0.5 else 1.0])
        else:
            out = self.assemble(L, [(s[0], 0.0) for s in seq], tail)
        if out is None:
            return self.natural(L) + (TID["code"],)
        return out[0], out[1], tid

    def row_mqar(self, L):
        r = self.r
        n = int(min(L // 4 - 2, 8 + r.random() * 248))
        keys = self.rng.permutation(self.V - 3)[:n] + 3
        vals = self.rng.integers(3, self.V, n)
        pairs = np.stack([keys, vals], 1)
        p = self.rng.permutation(n)
        tail = pairs[p].reshape(-1)
        w = np.zeros(2 * n, np.float32)
        w[1::2] = -1
        out = self.assemble(
            L, [(pairs.reshape(-1), 0.0)], (tail, w), at=[0.0 if r.random() < 0.3 else r.random()]
        )
        return out[0], out[1], TID["mqar"]

    def row_copy(self, L):
        r = self.r
        nseg = 1 + int(r.random() * 3)
        m = max(6, int((L - 20) / 2 / nseg * (0.15 + 0.8 * r.random())))
        m = min(m, 400)
        segs = []
        for _ in range(nseg):
            x = r.random()
            if x < 0.4:
                s = self.rng.integers(3, self.V, m).tolist()
            elif x < 0.7:
                s = []
                while len(s) < m:
                    s += self.h[" "][int(r.random() * 65536)]
                s = s[:m]
            else:
                s = self.filler(m, "code")[0].tolist()
            segs.append(s)
        p = r.sample(range(nseg), nseg)
        ids, w = [], []
        for i in p:
            ids += segs[i]
            w += [0.0] * 4 + [-1.0] * (m - 4)
        w[0] = 0.0
        out = self.assemble(L, [(s, 0.0) for s in segs], (ids, w))
        if out is None:
            return self.natural(L) + (TID["code"],)
        return out[0], out[1], TID["copy"]

    def row(self, L, mix):
        x = self.r.random()
        for k, p in mix.items():
            x -= p
            if x < 0:
                break
        if k == "code":
            ids, w = self.natural(L)
            t = TID["code"]
        elif k == "english":
            ids, w = self.natural(L, True)
            t = TID["english"]
        else:
            ids, w, t = getattr(self, "row_" + k)(L)
        neg = w < 0
        n = int(neg.sum())
        if n:
            w[neg] *= 32.0 / (n + 8)
        return ids, w, t

    def batch(self, B, L, mix, ids, w, tid):
        for b in range(B):
            i, ww, t = self.row(L, mix)
            ids[b] = i
            w[b] = ww
            tid[b] = t


def load_corpus(d):
    raw = lzma.open(os.path.join(d, "train.bin.xz")).read()
    n = len(raw) // 2
    a = np.frombuffer(raw[:n], np.uint8).astype(np.uint16) | (
        np.frombuffer(raw[n:], np.uint8).astype(np.uint16) << 8
    )
    return a
