"""Writes three texts like those of the retrieval tasks, to train codebooks of the model's keys on.

calibration.py OUT_DIR [characters]   writes OUT_DIR/calibration-1.txt to -3.txt, of 40,000 characters each

The filler is the Python of this folder and English of `words.py`; nothing of it is in `models/needle-8m/eval`. The
wording of the facts is that of `facts.py`.
"""

import pathlib
import random
import sys

from words import NOUNS, paragraph


def digits(rng, count=5):
    return "".join(rng.choice("0123456789") for _ in range(count))


def code(rng):
    return "%04x-%04x" % (rng.randrange(65536), rng.randrange(65536))


def fact(rng):
    noun, other = rng.sample(NOUNS, 2)
    return rng.choice(
        [
            lambda: f"The pass key for {noun} is {digits(rng)}. Remember it.",
            lambda: f"The pass key for {code(rng)} is {code(rng)}. Remember it.",
            lambda: f"One of the special magic numbers for {noun} is: {digits(rng)}.",
            lambda: f"{noun} = {digits(rng)}",
            lambda: f"{noun} = {other}",
        ]
    )()


def question(rng):
    first, second, third = rng.sample(NOUNS, 3)
    return rng.choice(
        [
            lambda: f"What is the pass key for {first}? The pass key for {first} is {digits(rng)}.",
            lambda: f"What are the pass keys for {first}, {second} and {third}? {first} is {digits(rng)}",
            lambda: f"trace {first} -> {second} -> {third} -> {digits(rng)}",
            lambda: f'Value of "{code(rng)}": "{digits(rng, 6)}"',
        ]
    )()


def part(rng, sources):
    """Some lines of one kind."""
    kind = rng.random()
    if kind < 0.7:
        lines = rng.choice(sources)
        first = rng.randrange(len(lines))
        return "\n".join(lines[first : first + 25])
    if kind < 0.85:
        return paragraph(rng).rstrip("\n")
    return "\n".join(f'"{code(rng)}": "{digits(rng, 6)}",' for _ in range(12))


def text(rng, sources, characters):
    parts = []
    while sum(map(len, parts)) < characters:
        parts += [part(rng, sources), fact(rng)]
        if rng.random() < 0.1:
            parts.append(question(rng))
    return "\n".join([*parts, question(rng)]) + "\n"


def main():
    out = pathlib.Path(sys.argv[1])
    characters = int(sys.argv[2]) if len(sys.argv) > 2 else 40_000
    folder = pathlib.Path(__file__).parent
    sources = [path.read_text().split("\n") for path in sorted(folder.glob("*.py"))]
    out.mkdir(parents=True, exist_ok=True)
    for number in (1, 2, 3):
        (out / f"calibration-{number}.txt").write_text(text(random.Random(number), sources, characters))


if __name__ == "__main__":
    main()
