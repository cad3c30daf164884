"""Makes the data of this recipe, problems in words with three numbers, and a chat model whose template shows tools.

Invariants: the numbers of a problem are in one file alone; the same seed always writes the same bytes. In the file of
imitation one row of four calls the calculator and the others answer at once, all of them rightly. The model is that of
examples/instruct with another chat template: its weights are a link.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from flotilla_environment.builtin.calculator import calculate
from flotilla_environment.tools import described

HERE = Path(__file__).resolve().parent
INSTRUCT = HERE.parents[1] / "examples" / "instruct"
SIZES = {"sft": 800, "rl": 1000, "heldout": 100}
CALLED = 0.25
"""Share of the rows of imitation that call."""

NAMES = ("Mia", "Tom", "Ada", "Ben", "Eva", "Leo", "Ida", "Max")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps", "cards", "stones")
PROBLEMS = {
    "{a}+{b}-{c}": "{name} has {a} {things} and buys {b} more. Then {name} gives away {c}. How many {things} are left?",
    "{a}+{b}+{c}": "{name} has {a} {things}, finds {b} more and gets {c} as a gift. How many {things} is that?",
    "{a}*{b}+{c}": "{name} has {a} boxes with {b} {things} each, and {c} single {things}. How many {things} is that?",
    "{a}*{b}-{c}": "{name} has {a} bags with {b} {things} each, and sells {c} of the {things}. How many are left?",
}
TOOLS = [{"type": "function", "function": described(calculate)}]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def row_of(name: str, numbers: tuple[int, ...], draw: random.Random) -> dict[str, Any]:
    """Return a problem, with the conversation that solves it where the file is that of imitation."""
    form, words = draw.choice(list(PROBLEMS.items()))
    values = dict(zip("abc", numbers, strict=True))
    expression = form.format(**values)
    asked = {
        "role": "user",
        "content": words.format(**values, name=draw.choice(NAMES), things=draw.choice(THINGS)),
    }
    result = calculate(expression)
    if name != "sft":
        return {"prompt": [asked], "answer": result}
    chat: list[dict[str, Any]] = [asked]
    if draw.random() < CALLED:
        function = {"name": "calculate", "arguments": {"expression": expression}}
        chat.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        chat.append({"role": "tool", "content": result})
    return {"messages": [*chat, {"role": "assistant", "content": f"The answer is {result}."}], "tools": TOOLS}


def make_data(out: Path, seed: int = 0) -> None:
    """Write the three files into `out`."""
    draw = random.Random(seed)
    triples: dict[tuple[int, ...], None] = {}
    while len(triples) < sum(SIZES.values()):
        # The last number is the smallest, so that no answer is below zero.
        *others, least = sorted(draw.choices(range(11, 100), k=3), reverse=True)
        draw.shuffle(others)
        triples[(*others, least)] = None
    left = list(triples)
    out.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        own, left = left[:size], left[size:]
        lines = (json.dumps(row_of(name, numbers, draw)) + "\n" for numbers in own)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_model(out: Path) -> None:
    """Write a folder with the files of the example's model, and this recipe's chat template."""
    subprocess.run([sys.executable, str(INSTRUCT / "get_model.py")], stdout=sys.stderr, check=True)
    out.mkdir(parents=True, exist_ok=True)
    for file in (INSTRUCT / "model").resolve().iterdir():
        if file.name != "chat_template.jinja":
            link = out / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    make_data(HERE / "data")
    make_model(HERE / "model")
    print(json.dumps({"model": str(HERE / "model"), "data": str(HERE / "data")}))
