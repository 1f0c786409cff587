"""Builds the training corpus and the tokenizer from Python sources found on this machine.

usage: corpus.py OUT_DIR STDLIB_DIR SITE_PACKAGES_DIR [SITE_PACKAGES_DIR ...]
Writes OUT_DIR/tokenizer.json, train.npz (uint16 tokens, documents separated by EOS), test.npz (held-out files),
corpus.json (what went in).
"""

import hashlib
import json
import lzma
import os
import random
import re
import sys

import numpy as np
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

import words

PACKAGES = dict(
    sympy="BSD-3-Clause",
    scipy="BSD-3-Clause",
    numpy="BSD-3-Clause",
    mpmath="BSD-3-Clause",
    networkx="BSD-3-Clause",
    torch="BSD-3-Clause",
)
PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB = int(os.environ.get("VOCAB", 4096))


def files(root, skip=("site-packages", "__pycache__", "lib2to3/tests/data", "idlelib/Icons")):
    for d, ds, fs in os.walk(root):
        ds.sort()
        ds[:] = [x for x in ds if x not in skip]
        for f in sorted(fs):
            if f.endswith(".py"):
                yield os.path.join(d, f)


def good(t):
    if len(t) < 200 or len(t) > 600_000:
        return False
    dig = sum(c.isdigit() for c in t) / len(t)
    if dig > 0.10:
        return False
    if sum(ord(c) > 127 for c in t) / len(t) > 0.02:
        return False
    lines = t.split("\n")
    if max(map(len, lines)) > 400 or len(t) / len(lines) > 90:
        return False
    return True


def main():
    out, std, sites = sys.argv[1], sys.argv[2], sys.argv[3:]
    docs, seen, stat = [], set(), {}
    roots = [("cpython-stdlib", std)]
    for p in PACKAGES:
        for s in sites:
            if os.path.isdir(os.path.join(s, p)):
                roots.append((p, os.path.join(s, p)))
                break
    for name, root in roots:
        n = b = drop = 0
        for f in files(root):
            try:
                t = open(f, encoding="utf-8").read()
            except Exception:
                continue
            t = t.replace("\r\n", "\n").replace("\t", "    ")
            t = re.sub(r"[ ]+\n", "\n", t)
            t = re.sub(r"\n{4,}", "\n\n\n", t)
            if name == "torch" and (
                "/_inductor/" in f and "/generated" in f or "/onnx/_internal/exporter/_torchlib" in f
            ):
                continue
            if not good(t):
                drop += 1
                continue
            h = hashlib.sha1(re.sub(r"\s+", "", t).encode()).hexdigest()
            if h in seen:
                continue
            seen.add(h)
            docs.append((name, os.path.relpath(f, root), t))
            n += 1
            b += len(t)
        stat[name] = dict(files=n, chars=b, dropped=drop)
    print(stat, sum(len(d[2]) for d in docs))
    # hold out whole files by hash (2.5 percent), so that the split does not depend on order
    test = [d for d in docs if int(hashlib.sha1((d[0] + "/" + d[1]).encode()).hexdigest(), 16) % 40 == 0]
    train = [d for d in docs if int(hashlib.sha1((d[0] + "/" + d[1]).encode()).hexdigest(), 16) % 40 != 0]
    rng = random.Random(1)
    tok = Tokenizer(models.BPE(byte_fallback=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    sample = [d for d in train if d[0] == "cpython-stdlib"] + rng.sample(
        [d for d in train if d[0] != "cpython-stdlib"], 2500
    )
    eng = [words.paragraph(rng) for _ in range(4000)]
    # the keys of the retrieval tasks: make ' word' one token each, as common words are in a large tokenizer
    wl = [" " + w for w in words.NOUNS for _ in range(9000)]
    tok.train_from_iterator([d[2] for d in sample] + eng + wl, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
    )
    os.makedirs(out, exist_ok=True)
    tok.save(os.path.join(out, "tokenizer.json"))
    n1 = sum(len(tok.encode(" " + w, add_special_tokens=False).ids) == 1 for w in words.NOUNS)
    n0 = sum(len(tok.encode(w, add_special_tokens=False).ids) == 1 for w in words.NOUNS)
    print("vocab", tok.get_vocab_size(), "nouns", len(words.NOUNS), "one-token with space", n1, "without", n0)

    def enc(ds):
        parts = []
        for i in range(0, len(ds), 256):
            for e in tok.encode_batch([d[2] for d in ds[i : i + 256]], add_special_tokens=False):
                a = np.array(e.ids + [1], dtype=np.uint16)
                parts.append(a)
        return parts

    rng.shuffle(train)
    tr, te = enc(train), enc(test)
    stat["train_tokens"] = int(sum(map(len, tr)))
    stat["test_tokens"] = int(sum(map(len, te)))
    stat["train_chars"] = sum(len(d[2]) for d in train)
    stat["test_chars"] = sum(len(d[2]) for d in test)
    stat["train_files"], stat["test_files"] = len(train), len(test)
    stat["licences"] = dict(PACKAGES, **{"cpython-stdlib": "PSF-2.0"})
    stat["test_list"] = [d[0] + "/" + d[1] for d in test]
    print({k: v for k, v in stat.items() if k != "test_list"})
    # two byte planes compress better than interleaved ones
    a = np.concatenate(tr)
    raw = (a & 255).astype(np.uint8).tobytes() + (a >> 8).astype(np.uint8).tobytes()
    with lzma.open(os.path.join(out, "train.bin.xz"), "wb", preset=6) as f:
        f.write(raw)
    b = np.concatenate(te)
    np.savez_compressed(os.path.join(out, "test.npz"), tokens=b)
    json.dump(stat, open(os.path.join(out, "corpus.json"), "w"), indent=1)
    print("xz", os.path.getsize(os.path.join(out, "train.bin.xz")))
    with open(os.path.join(out, "test_docs.jsonl"), "w") as f:
        f.writelines(json.dumps(dict(source=d[0], path=d[1], text=d[2])) + "\n" for d in test)


if __name__ == "__main__":
    main()
