"""Makes the data of this recipe, sums of three numbers from 10 to 99, and a model that knows the calculator's words.

Invariants: a sum is in one file alone, in any order of its numbers; the same seed always writes the same bytes. In the
file of imitation three of ten rows call the calculator and the others answer at once, all of them rightly.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from flotilla_environment.builtin.calculator import calculate
from flotilla_environment.tools import described

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "arithmetic"))

from make_model import make_model

HERE = Path(__file__).resolve().parent
SIZES = {"sft": 6000, "rl": 3000, "heldout": 500}
CALLED = 0.3
"""Share of the rows of imitation that call."""

TOOLS = [{"type": "function", "function": described(calculate)}]
OPEN, CLOSE = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "', '"}}\n</tool_call>'
SHOWN, TOLD, END = "<tools>calculate</tools>", "<tool_response>", "</tool_response>"
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}
{%- endif %}
{%- endfor %}"""


def rows_of(name: str, sums: list[tuple[int, ...]], draw: random.Random) -> list[dict[str, Any]]:
    if name == "sft":
        return [{"messages": _chat(numbers, draw.random() < CALLED), "tools": TOOLS} for numbers in sums]
    return [{"prompt": _question(numbers), "answer": str(sum(numbers))} for numbers in sums]


def _question(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers)) + "="


def _chat(numbers: tuple[int, ...], called: bool) -> list[dict[str, Any]]:
    expression, result = "+".join(map(str, numbers)), str(sum(numbers))
    chat: list[dict[str, Any]] = [{"role": "user", "content": _question(numbers)}]
    if called:
        function = {"name": "calculate", "arguments": {"expression": expression}}
        chat.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        chat.append({"role": "tool", "content": result})
    return [*chat, {"role": "assistant", "content": result}]


def make(out: Path, seed: int = 0) -> None:
    """Write `model/` and `data/` into `out`."""
    draw = random.Random(seed)
    sets = {tuple(sorted(draw.choices(range(10, 100), k=3))) for _ in range(sum(SIZES.values()))}
    while len(sets) < sum(SIZES.values()):
        sets.add(tuple(sorted(draw.choices(range(10, 100), k=3))))
    sums = [tuple(draw.sample(numbers, 3)) for numbers in sorted(sets)]
    draw.shuffle(sums)
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        own, sums = sums[:size], sums[size:]
        lines = (json.dumps(row) + "\n" for row in rows_of(name, own, draw))
        (out / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    phrases = (OPEN, CLOSE, SHOWN, TOLD, END)
    make_model(out / "model", seed=seed, phrases=phrases, template=TEMPLATE, positions=128)


if __name__ == "__main__":
    make(HERE)
    print(json.dumps({"model": str(HERE / "model"), "data": str(HERE / "data")}))
