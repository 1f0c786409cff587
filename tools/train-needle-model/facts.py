"""Statements, questions and answers of the retrieval tasks as token lists.

A key or a value is a dictionary of token lists: its spellings behind a space (k, v), bare (kb, vb) and behind a double
quote (kq).
"""

import random
import re

import numpy as np
from tokenizers import Tokenizer

import words

# (statement, question, end, key kinds, value kinds); {k} and {v} carry their leading space, {kb}/{vb} do not,
# {kq} is the key after a double quote at the start of a line
FAM = dict(
    pass2=(
        "The pass key for{k} is{v}. Remember it. The pass key for{k} is{v}.\n",
        "What is the pass key for{k}? The pass key for{k} is{v}",
        ".\n",
        "WWWPX",
        "DDDWH",
    ),
    pass1=(
        "The pass key for{k} is{v}. Remember it.\n",
        "What is the pass key for{k}? The pass key for{k} is{v}",
        ".\n",
        "WWWPX",
        "DDDWH",
    ),
    plain=(
        "The pass key is{v}. Remember it.{v} is the pass key.\n",
        "What is the pass key? The pass key is{v}",
        ".\n",
        "W",
        "DDDDW",
    ),
    note=(
        "# NOTE: the access code for{k} is{v}\n",
        "# What is the access code for{k}?\n# Answer:{v}",
        "\n",
        "WPUX",
        "DDWH",
    ),
    assign=("{kb} ={v}\n", "assert{k} =={v}", "\n", "WUU", "D"),
    magic=(
        "One of the special magic numbers for{k} is:{v}.\n",
        "What is the special magic number for{k} mentioned in the text? The special magic number for{k} mentioned in the text is{v}",
        ".\n",
        "WWP",
        "D",
    ),
    listing=("{kb}:{v}\n", "Lookup{k} ->{v}", "\n", "WPUX", "DDWH"),
    json=('{kq}": "{vb}",\n', 'Value of "{kb}": "{vb}', '"\n', "XXXXYW", "DDDDH"),
    log=("[INFO] request{k} returned code{v}\n", "[QUERY] request{k} returned code{v}", "\n", "XXYNW", "D"),
)


class Facts:
    def __init__(self, tok_path, seed):
        self.tok = Tokenizer.from_file(tok_path)
        self.V = self.tok.get_vocab_size()
        self.NEWLINE = self.enc("\n")[0]
        assert self.enc("\n") == [self.NEWLINE]
        self.DIG = [self.enc(str(i))[0] for i in range(10)]
        self.SP = self.enc(" ")[0]
        W = words.NOUNS
        self.w_sp = [self.enc(" " + w) for w in W]
        self.w_b = [self.enc(w) for w in W]
        self.w_q = [self.enc('"' + w) for w in W]
        self.w_d = [self.enc("-" + w) for w in W]
        self.w_u = [self.enc("_" + w) for w in W]
        hx = ["%04x" % i for i in range(65536)]
        self.h = {
            p: [tuple(e.ids) for e in self.tok.encode_batch([p + h for h in hx], add_special_tokens=False)]
            for p in ("", " ", "-", '"')
        }
        self.fam = {
            k: (self.parse(a), self.parse(b), self.enc(e), ks, vs) for k, (a, b, e, ks, vs) in FAM.items()
        }
        self.bare_q = self.enc('"')[0]
        self.mq_head = (
            self.enc("What are the pass keys for"),
            self.enc(","),
            self.enc(" and"),
            self.enc("?"),
            self.enc(" is"),
            self.enc(".\n"),
        )
        self.vt = {
            k: self.parse(v)
            for k, v in dict(
                d0="{kb} ={v}\n",
                l0="{kb} ={k}\n",
                q0="assert{k} =={v}",
                d1="VAR{k} ={v}\n",
                l1="VAR{k} = VAR{k2}\n",
                q1="What is the value of VAR{k}? VAR{k} =={v}",
                d2="let{k} ={v};\n",
                l2="let{k} ={k2};\n",
                q2="show{k} ->{v}",
            ).items()
        }
        self.tr = self.enc("trace"), self.enc(" ->")
        self.hard = (
            1.0  # weight of the key tokens of a multi-query answer and of a first digit behind a reference
        )
        self.trace_share = 0.0  # share of variable-tracking rows whose question spells the chain out
        self.reseed(seed)

    def reseed(self, s):
        self.rng = np.random.default_rng(s)
        self.r = random.Random(s)

    def enc(self, s):
        return self.tok.encode(s, add_special_tokens=False).ids

    def parse(self, s):
        """'a{k}b{v}' -> [ids, 'k', ids, 'v']"""
        out, i = [], 0
        for m in re.finditer(r"\{(\w+)\}", s):
            if m.start() > i:
                out.append(self.enc(s[i : m.start()]))
            out.append(m.group(1))
            i = m.end()
        if i < len(s):
            out.append(self.enc(s[i:]))
        return out

    def key(self, kind):
        r = self.r
        W = len(self.w_sp)
        if kind == "W":
            i = int(r.random() * W)
            return ("W", i), dict(k=self.w_sp[i], kb=self.w_b[i], kq=self.w_q[i])
        if kind in "PU":
            i, j = int(r.random() * W), int(r.random() * W)
            t = (self.w_d if kind == "P" else self.w_u)[j]
            return (kind, i, j), dict(k=self.w_sp[i] + t, kb=self.w_b[i] + t, kq=self.w_q[i] + t)
        if kind == "X":
            i, j = int(r.random() * 65536), int(r.random() * 65536)
            h = self.h
            t = h["-"][j]
            return (kind, i, j), dict(k=h[" "][i] + t, kb=h[""][i] + t, kq=h['"'][i] + t)
        if kind == "Y":
            i = int(r.random() * 65536)
            h = self.h
            return (kind, i), dict(k=h[" "][i], kb=h[""][i], kq=h['"'][i])
        d = [self.DIG[int(r.random() * 10)] for _ in range(5)]
        return (kind, *d), dict(k=[self.SP] + d, kb=d, kq=[self.bare_q] + d)

    def value(self, kind, nd=None):
        r = self.r
        if kind == "D":
            n = nd or (5 if r.random() < 0.4 else 4 + int(r.random() * 5))
            d = [self.DIG[int(r.random() * 10)] for _ in range(n)]
            return dict(v=[self.SP] + d, vb=d)
        if kind == "W":
            i = int(r.random() * len(self.w_sp))
            return dict(v=self.w_sp[i], vb=self.w_b[i])
        i, j = int(r.random() * 65536), int(r.random() * 65536)
        t = self.h["-"][j]
        return dict(v=self.h[" "][i] + t, vb=self.h[""][i] + t)

    @staticmethod
    def fill(tpl, d):
        o = []
        for p in tpl:
            o.extend(d[p] if isinstance(p, str) else p)
        return o

    def facts(self, fam, n, kk=None, vk=None, nd=None, used=None):
        *_, ks, vs = self.fam[fam]
        kk = kk or self.r.choice(ks)
        vk = vk or self.r.choice(vs)
        used = used if used is not None else set()
        out = []
        cap = {"W": 200, "N": 50000}.get(kk, 10**9)
        n = min(n, cap - len(used)) if cap < 10**9 else n
        while len(out) < n:
            name, k = self.key(kk)
            if name in used:
                continue
            used.add(name)
            d = dict(k)
            d.update(self.value(vk, nd))
            out.append(d)
        return out

    def qa(self, fam, d):
        """-> question tokens up to the answer, answer tokens"""
        _, q, end, *_ = self.fam[fam]
        o = []
        for p in q:
            if isinstance(p, str) and p[0] == "v":
                return o, list(d[p]), end
            o.extend(d[p] if isinstance(p, str) else p)

    def mq(self, ds):
        head, comma, and_, qm, is_, end = self.mq_head
        q = list(head)
        for i, d in enumerate(ds):
            q += and_ if len(ds) > 1 and i == len(ds) - 1 else comma if i else []
            q += d["k"]
        q += qm
        a, aw = [], []
        for i, d in enumerate(ds):
            h = (comma if i else []) + list(d["k"]) + is_
            a += h
            aw += [-self.hard] * len(h)
            a += list(d["v"])
            aw += [-1.0] * len(d["v"])
        return q, a, end, aw

    def chains(self, nch, hmax, style, kk="W", hops=None):
        """-> list of chains; a chain is a list of (tokens of the statement, question dict, hop)"""
        r = self.r
        used = set()
        out = []

        def newkey():
            while True:
                name, k = self.key(kk)
                if name not in used:
                    used.add(name)
                    return k

        for _ in range(nch):
            v = self.value("D")
            prev = None
            ch = []
            h = hops if hops is not None else int(r.random() * (hmax + 1))
            for i in range(h + 1):
                if kk == "W" and len(used) > 250:
                    break
                k = newkey()
                d = dict(k)
                d.update(v)
                if i == 0:
                    t = self.fill(self.vt["d%d" % style], d)
                else:
                    if style == 0:
                        t = list(k["kb"]) + self.vt["l0"][1] + list(prev["k"]) + self.vt["l0"][3]
                    else:
                        d["k2"] = prev["k"]
                        t = self.fill(self.vt["l%d" % style], d)
                ch.append((t, d, i))
                prev = k
            if ch:
                out.append(ch)
        return out

    def vq(self, style, d):
        o = []
        for p in self.vt["q%d" % style]:
            if isinstance(p, str) and p[0] == "v":
                return o, list(d[p]), [self.NEWLINE]
            o.extend(d[p] if isinstance(p, str) else p)

    def trace(self, ch, i):
        """question that spells the chain out: 'trace c -> b -> a -> value'"""
        q = list(self.tr[0]) + list(ch[i][1]["k"]) + list(self.tr[1])
        a = []
        for j in range(i - 1, -1, -1):
            a += list(ch[j][1]["k"]) + list(self.tr[1])
        return q, a + list(ch[i][1]["v"]), [self.NEWLINE]
