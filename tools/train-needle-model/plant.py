"""Plants the facts of the retrieval tasks in a text, and writes questions about them.

plant.py TEXT OUT_DIR [seed]   writes OUT_DIR/document.txt and OUT_DIR/questions.json

The document holds 8 pass keys of words, 24 of hex codes and 3 chains of two hops, each fact on a line of its own
between paragraphs, at positions drawn over the whole text. The wording is that of `facts.py`.
"""

import json
import os
import random
import sys

from words import NOUNS


def digits(rng):
    return "".join(rng.choice("0123456789") for _ in range(5))


def code(rng):
    return "%04x-%04x" % (rng.randrange(65536), rng.randrange(65536))


def pass_key(key, value):
    return f"The pass key for {key} is {value}. Remember it."


def main():
    source, out = sys.argv[1:3]
    rng = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    with open(source) as file:
        paragraphs = [each.strip("\n") for each in file.read().split("\n\n") if each.strip()]

    nouns = rng.sample(NOUNS, 8 + 3 * 3)
    words = {noun: digits(rng) for noun in nouns[:8]}
    codes = {code(rng): code(rng) for _ in range(24)}
    chains = [(*nouns[8 + 3 * i : 11 + 3 * i], digits(rng)) for i in range(3)]

    planted = [(rng.random(), pass_key(*each)) for each in (words | codes).items()]
    for first, second, third, value in chains:
        statements = [f"{first} = {value}", f"{second} = {first}", f"{third} = {second}"]
        planted += zip(sorted(rng.random() for _ in statements), statements)
    placed = [(round(at * len(paragraphs)), fact) for at, fact in sorted(planted)]

    lines = []
    for index in range(len(paragraphs) + 1):
        lines += [fact + "\n" for at, fact in placed if at == index]
        lines += [paragraphs[index] + "\n"] if index < len(paragraphs) else []

    questions = []
    for _ in range(2):
        asked = rng.sample(list(words), 3)
        questions.append(
            dict(
                task="multiquery3of8",
                question=f"What are the pass keys for {asked[0]}, {asked[1]} and {asked[2]}?",
                answer=" " + ", ".join(f"{each} is {words[each]}" for each in asked),
            )
        )
    for asked in rng.sample(list(codes), 2):
        questions.append(
            dict(
                task="needle24hex",
                question=f"What is the pass key for {asked}? The pass key for {asked} is",
                answer=f" {codes[asked]}",
            )
        )
    for first, second, third, value in chains[:1]:
        questions.append(
            dict(task="trace2", question=f"trace {third} ->", answer=f" {second} -> {first} -> {value}")
        )

    with open(os.path.join(out, "document.txt"), "w") as file:
        file.write("\n".join(lines) + "\n")
    with open(os.path.join(out, "questions.json"), "w") as file:
        json.dump(questions, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
