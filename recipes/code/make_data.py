"""Makes the data of this recipe: Python functions of one line to write, with calls that they have to pass.

Writes `train.jsonl` and `heldout.jsonl` to `data` beside this file. Each row has a prompt, which is the beginning of a
file of Python; its `kind`; and the `tests` that the reward `code` runs.

Invariants: the arguments of held-out functions have names that no training row has, so no question is in both files;
what a call is expected to return is computed here; the same seed always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
CALLS = 4
PROMPT = "# f(n): n plus 1\ndef f(n): return n + 1\n# {call}: {what}\n"
"""An example, and what is asked for."""


class Kind(NamedTuple):
    """A function to write: its arguments, what it returns in words, and what it returns."""

    arguments: str
    """A letter for each: `n` a number, `p` a number above 0, `l` a list of numbers, `s` a text."""
    what: str
    """`{0}` is the name of the first argument, and `{k}` a number that is drawn."""
    returns: Callable[..., Any]
    """Gets the arguments, and the drawn number where `what` has one."""


KINDS = {
    "sum": Kind("nn", "the sum of {0} and {1}", lambda a, b: a + b),
    "difference": Kind("nn", "{0} minus {1}", lambda a, b: a - b),
    "product": Kind("nn", "the product of {0} and {1}", lambda a, b: a * b),
    "larger": Kind("nn", "the larger one of {0} and {1}", max),
    "smaller": Kind("nn", "the smaller one of {0} and {1}", min),
    "distance": Kind("nn", "the absolute difference of {0} and {1}", lambda a, b: abs(a - b)),
    "remainder": Kind("pp", "the remainder of {0} divided by {1}", lambda a, b: a % b),
    "exceeds": Kind("nn", "whether {0} is greater than {1}", lambda a, b: a > b),
    "twice the sum": Kind("nn", "two times the sum of {0} and {1}", lambda a, b: 2 * (a + b)),
    "sum of squares": Kind("nn", "the sum of the squares of {0} and {1}", lambda a, b: a * a + b * b),
    "sum of three": Kind("nnn", "the sum of {0}, {1} and {2}", lambda a, b, c: a + b + c),
    "largest of three": Kind("nnn", "the largest one of {0}, {1} and {2}", max),
    "product plus": Kind("nnn", "{0} times {1}, plus {2}", lambda a, b, c: a * b + c),
    "plus": Kind("n", "{0} plus {k}", lambda a, k: a + k),
    "times": Kind("n", "{0} times {k}", lambda a, k: a * k),
    "less": Kind("n", "{0} minus {k}", lambda a, k: a - k),
    "divisible": Kind("p", "whether {0} is divisible by {k}", lambda a, k: a % k == 0),
    "square": Kind("n", "the square of {0}", lambda a: a * a),
    "negative": Kind("n", "{0} with the opposite sign", lambda a: -a),
    "even": Kind("n", "whether {0} is even", lambda a: a % 2 == 0),
    "absolute": Kind("n", "the absolute value of {0}", abs),
    "total": Kind("l", "the sum of the numbers in the list {0}", sum),
    "largest": Kind("l", "the largest number in the list {0}", max),
    "length of list": Kind("l", "the number of items in the list {0}", len),
    "first item": Kind("l", "the first item of the list {0}", lambda a: a[0]),
    "sorted": Kind("l", "the numbers of the list {0} in ascending order", sorted),
    "each plus": Kind("l", "a list of the numbers in {0}, each plus {k}", lambda a, k: [x + k for x in a]),
    "how many above": Kind("l", "how many numbers in {0} are above {k}", lambda a, k: sum(x > k for x in a)),
    "upper case": Kind("s", "the text {0} in upper case", str.upper),
    "length of text": Kind("s", "the length of the text {0}", len),
    "last letter": Kind("s", "the last letter of the text {0}", lambda a: a[-1]),
    "joined": Kind("ss", "the text {0} followed by the text {1}", lambda a, b: a + b),
    "repeated": Kind("s", "the text {0} repeated {k} times", lambda a, k: a * k),
    "same start": Kind(
        "ss", "whether the texts {0} and {1} begin with the same letter", lambda a, b: a[0] == b[0]
    ),
}
NAMES = ["a b c", "x y z", "u v w", "p q r", "h i j", "m n o"]
HELD_OUT_NAMES = ["k l s", "d e g", "left right rest"]
LISTS, HELD_OUT_LISTS = ["items", "numbers", "row", "found", "array", "sizes"], ["values", "data", "series"]
WORDS = ["Apple", "bee", "Cloud", "dance", "Echo", "flame", "Amber", "below", "Coral", "do"]
DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda draw: draw.randint(-20, 20),
    "p": lambda draw: draw.randint(1, 30),
    "l": lambda draw: [draw.randint(-9, 20) for _ in range(draw.randint(2, 6))],
    "s": lambda draw: draw.choice(WORDS),
}


def row_of(draw: random.Random, name: str, names: str, items: str) -> dict[str, Any]:
    """Return a row: a function to write, with calls whose results are not all the same."""
    kind, k = KINDS[name], draw.randint(2, 9)
    arguments = [items] if kind.arguments == "l" else names.split()[: len(kind.arguments)]
    drawn = [k] if "{k}" in kind.what else []
    tests: list[dict[str, Any]] = []
    while len(tests) < CALLS or all(test["expected"] == tests[0]["expected"] for test in tests):
        values = [DRAWN[each](draw) for each in kind.arguments]
        tests.append({"function": "f", "arguments": values, "expected": kind.returns(*values, *drawn)})
    asked = PROMPT.format(call=f"f({', '.join(arguments)})", what=kind.what.format(*arguments, k=k))
    return {"prompt": asked, "kind": name, "tests": tests}


def rows(draw: random.Random, names: list[str], lists: list[str]) -> list[dict[str, Any]]:
    """Return a row of each kind for each choice of names."""
    made = [row_of(draw, kind, *each) for each in zip(names, lists, strict=True) for kind in KINDS]
    draw.shuffle(made)
    return made


def write(path: Path, made: list[dict[str, Any]]) -> None:
    """Write one file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in made))
    part.replace(path)


def make_data(out: Path, seed: int) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    write(out / "train.jsonl", rows(draw, NAMES, LISTS))
    write(out / "heldout.jsonl", rows(draw, HELD_OUT_NAMES, HELD_OUT_LISTS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (%(default)s)")
    asked = parser.parse_args()
    make_data(asked.out, asked.seed)
