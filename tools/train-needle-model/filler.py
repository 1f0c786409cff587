"""Filler text, and rows assembled from filler and statements."""

import random

import numpy as np

import words
from facts import Facts

BOS, EOS = 0, 1


class Filler(Facts):
    def __init__(self, tok_path, corpus, seed, english_tokens):
        super().__init__(tok_path, seed)
        V = self.V
        self.corpus = corpus
        byts = [self.tok.decode([i], skip_special_tokens=False) for i in range(V)]
        ends = np.array([t.endswith("\n") and i > 2 for i, t in enumerate(byts)])
        ends[EOS] = True
        starts = np.array([bool(t.strip()) or (t != "" and "\n" not in t) for t in byts])
        starts[:3] = False
        # a token of white space alone can be the head of a blank line: allow it only when the next token is not a newline
        ws = np.array([t != "" and not t.strip() for t in byts])
        c = corpus
        nxt_nl = np.zeros(len(c), bool)
        lead_nl = np.array([("\n" in t) and not t.strip() for t in byts])
        nxt_nl[:-1] = lead_nl[c[1:]]
        ok = np.zeros(len(c), bool)
        ok[1:] = ends[c[:-1]] & starts[c[1:]] & ~(ws[c[1:]] & nxt_nl[1:])
        self.nl = np.flatnonzero(ok).astype(np.int64)
        r = random.Random(seed + 77)
        eng, n = [], 0
        while n < english_tokens:
            ps = [words.paragraph(r) for _ in range(2000)]
            for e in self.tok.encode_batch(ps, add_special_tokens=False):
                eng.append(e.ids)
                n += len(e.ids)
        self.eng_start = np.cumsum([0] + [len(x) for x in eng])[:-1].astype(np.int64)
        self.eng = np.fromiter((t for x in eng for t in x), dtype=np.uint16, count=n)
        self.noise = np.array(self.enc(words.NOISE), dtype=np.uint16)

    def filler(self, n, kind=None):
        """-> (tokens, insertion points) of exactly n tokens, starting at a line start"""
        if n <= 0:
            return np.zeros(0, np.uint16), np.zeros(1, np.int64)
        x = self.r.random()
        kind = kind or ("code" if x < 0.78 else "english" if x < 0.95 else "noise")
        if kind == "code":
            src, pts = self.corpus, self.nl
        elif kind == "english":
            src, pts = self.eng, self.eng_start
        else:
            k = len(self.noise)
            m = n // k + 1
            a = np.tile(self.noise, m + 1)[:n]
            return a, np.arange(0, n, k)
        for _ in range(100):
            a = int(self.r.random() * len(pts))
            s = int(pts[a])
            if s + n <= len(src):
                break
        else:
            s = 0
            a = 0
        seg = src[s : s + n].copy()
        seg[seg == EOS] = self.NEWLINE
        b = int(np.searchsorted(pts, s + n))
        return seg, pts[a:b] - s

    def assemble(self, L, items, tail, kind=None, at=None, order=True):
        """items: list of (tokens, weights); placed at random depths in filler (order kept); tail: (tokens, weights) at the end.
        -> ids, w of exactly L tokens, positions of the items"""
        nt = sum(len(t) for t, _ in items) + len(tail[0]) + 1
        F = L - nt
        if F < 0:
            return None
        seg, pts = self.filler(F, kind)
        k = len(items)
        if at is None:
            pos = np.sort(self.rng.random(k)) * F
        else:
            pos = np.asarray(at, float) * F
        # snap to line starts
        if len(pts):
            ix = np.clip(np.searchsorted(pts, pos), 0, len(pts) - 1)
            alt = np.clip(ix - 1, 0, None)
            pick = np.where(np.abs(pts[alt] - pos) < np.abs(pts[ix] - pos), alt, ix)
            pos = pts[pick]
        else:
            pos = np.zeros(k, np.int64)
        ids = np.empty(L, np.uint16)
        w = np.empty(L, np.float32)
        ids[0] = BOS
        w[0] = 0
        o = 1
        c = 0
        where = []
        for p, (t, tw) in zip(pos, items):
            p = int(p)
            m = p - c
            ids[o : o + m] = seg[c:p]
            w[o : o + m] = 1
            o += m
            c = p
            where.append(o)
            ids[o : o + len(t)] = t
            w[o : o + len(t)] = tw
            o += len(t)
        m = F - c
        ids[o : o + m] = seg[c:]
        w[o : o + m] = 1
        o += m
        if m > 0:  # the filler's last line may be cut: end it with a newline
            ids[o - 1] = self.NEWLINE
            w[o - 1] = 0
        t, tw = tail
        ids[o:] = t
        w[o:] = tw
        return ids, w, where

    def natural(self, L, english=False):
        src = self.eng if english else self.corpus
        s = int(self.r.random() * (len(src) - L))
        ids = np.empty(L, np.uint16)
        ids[0] = BOS
        ids[1:] = src[s : s + L - 1]
        w = np.ones(L, np.float32)
        w[0] = 0
        return ids, w
