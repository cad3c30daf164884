"""Makes the data of this example: instructions whose fulfilment a function can check.

Writes `train.jsonl`, `heldout.jsonl` (300 prompts of the same kinds) and `other-kinds.jsonl` (100 prompts of kinds that
are not trained) to `data` beside this file. Each row has a chat prompt, its `kind` and the `checks` of rewards.py.

Invariants: a topic or a list that is asked for in a held-out file is in no row of `train.jsonl`; the same seed
always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRAIN, HELD_OUT, OTHER_KINDS = 1500, 300, 100
WORDS = {
    name: words.split()
    for name, words in (line.split(":") for line in (HERE / "words.txt").read_text().splitlines())
}

NAME = ("Name", "List", "Give me")
SAY = ("Write one short sentence about", "Say something short about", "Tell me one thing about")

Asked = tuple[str, dict[str, Any]]
Kind = Callable[[random.Random, str], Asked]
"""Makes an instruction and its checks about one topic."""


def few_words(draw: random.Random, topic: str) -> Asked:
    most = draw.randint(8, 16)
    text = f"Describe the {topic} in one sentence of at most {most} words."
    return text, {"mentions": topic, "whole": True, "least_words": 3, "most_words": most}


def both_words(draw: random.Random, topic: str) -> Asked:
    other = draw.choice(WORDS["things"])
    text = f'Write one short sentence with the words "{topic}" and "{other}".'
    return text, {"mentions": topic, "also_mentions": other, "whole": True, "least_words": 4}


def without_word(draw: random.Random, topic: str) -> Asked:
    word = draw.choice(WORDS["common"])
    text = f'{draw.choice(SAY)} the {topic} without the word "{word}".'
    return text, {"mentions": topic, "avoids": word, "whole": True, "least_words": 4}


def described(draw: random.Random, topic: str) -> Asked:
    word = draw.choice(WORDS["adjectives"])
    text = f"{draw.choice(SAY)} the {word} {topic}."
    return text, {"mentions": topic, "also_mentions": word, "whole": True, "least_words": 4}


def question(draw: random.Random, topic: str) -> Asked:
    text = f"{draw.choice(('Write', 'Ask', 'Ask me'))} one short question about the {topic}."
    return text, {"mentions": topic, "ends_with": "?", "least_words": 3}


def listing(draw: random.Random, what: str) -> Asked:
    count = draw.randint(2, 5)
    return f"{draw.choice(NAME)} {WORDS['numbers'][count]} {what}.", {"items": count}


def opener(draw: random.Random, topic: str) -> Asked:
    word = draw.choice(WORDS["openers"])
    text = f'{draw.choice(SAY)} the {topic}. Begin with the word "{word}".'
    return text, {"mentions": topic, "first_word": word, "whole": True}


def commas(draw: random.Random, what: str) -> Asked:
    count = draw.randint(2, 5)
    text = f"{draw.choice(NAME)} {WORDS['numbers'][count]} {what}, separated by commas."
    return text, {"items": count, "lines": 1}


def loud(draw: random.Random, topic: str) -> Asked:
    text = f"{draw.choice(SAY)} the {topic} that ends with an exclamation mark."
    return text, {"mentions": topic, "ends_with": "!"}


def addition(draw: random.Random, asked: str) -> Asked:
    first, second = map(int, asked.split("+"))
    name, thing, numbers = draw.choice(WORDS["names"]), draw.choice(WORDS["things"]), WORDS["numbers"]
    text = f"{name} has {numbers[first]} {thing} and gets {numbers[second]} more. How many are that?"
    return text, {"last_number": first + second}


SUMS = [f"{a}+{b}" for a in range(2, 11) for b in range(a, 11)]
KINDS: dict[str, tuple[Kind, Sequence[str]]] = {
    "few words": (few_words, WORDS["topics"]),
    "both words": (both_words, WORDS["topics"]),
    "without a word": (without_word, WORDS["topics"]),
    "described": (described, WORDS["topics"]),
    "question": (question, WORDS["topics"]),
    "list": (listing, WORDS["lists"]),
}
UNTRAINED: dict[str, tuple[Kind, Sequence[str]]] = {
    "opener": (opener, WORDS["topics"]),
    "commas": (commas, WORDS["lists"]),
    "exclamation": (loud, WORDS["topics"]),
    "addition": (addition, SUMS),
}


def rows(
    kinds: dict[str, tuple[Kind, Sequence[str]]], count: int, draw: random.Random
) -> list[dict[str, Any]]:
    """`count` different rows, each kind as often as the others."""
    made: dict[str, dict[str, Any]] = {}
    names = list(kinds)
    for _ in range(100 * count):
        if len(made) == count:
            return list(made.values())
        name = names[len(made) % len(names)]
        make, subjects = kinds[name]
        text, checks = make(draw, draw.choice(subjects))
        made[text] = {"prompt": [{"role": "user", "content": text}], "kind": name, "checks": checks}
    raise ValueError(f"{sorted(kinds)} have too few different rows for {count}")


def split(subjects: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Subjects for training and, a quarter of them, for what is held out."""
    order = list(subjects)
    random.Random(seed).shuffle(order)
    cut = len(order) // 4
    return order[cut:], order[:cut]


def make_data(out: Path, *, seed: int = 0) -> None:
    """Write the three files to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for name, kinds, part, count in (
        ("train", KINDS, 0, TRAIN),
        ("heldout", KINDS, 1, HELD_OUT),
        ("other-kinds", UNTRAINED, 1, OTHER_KINDS),
    ):
        of_part = {kind: (make, split(subjects, seed)[part]) for kind, (make, subjects) in kinds.items()}
        lines = (json.dumps(row) + "\n" for row in rows(of_part, count, draw))
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, default=HERE / "data")
    cli.add_argument("--seed", type=int, default=0)
    asked = cli.parse_args()
    make_data(asked.out, seed=asked.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
