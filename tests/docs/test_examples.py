"""What pages start on the fleet of an example, with fewer steps: by hand, by a loop of one's own, and day to day.

The fleet of the arithmetic example is up from its own page to `make down` of the README, the last page that needs it.
`make up`, `ps` and `down` are the commands of the same names. docs/install.md has `make test-wheels`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.doc_pages import ROOT, Reader, blocks

pytestmark = pytest.mark.timeout(600)

SHORTER = "steps=3 optimizer.warmup_updates=1 evaluation.every_steps=3 evaluation.max_prompts=16"
WARM_UP = "<run directory of the warm-up>"
MAKE = re.compile(r"make (up|ps|down)")
LOOP = ROOT / "examples" / "custom_loop"


def runs(reader: Reader) -> list[dict[str, Any]]:
    """Return the runs of the arithmetic example, the newest first."""
    found: list[dict[str, Any]] = json.loads(reader.shell("flotilla run list --json"))["runs"]
    return found


def warm_up(reader: Reader) -> str:
    return str(next(run["directory"] for run in runs(reader) if run["run_id"].startswith("arithmetic-sft")))


@pytest.fixture(scope="module")
def by_hand(reader: Reader) -> Reader:
    """The reader, who has followed the page of the example but for its last line."""

    def prepared(command: str) -> str | None:
        if WARM_UP in command:
            command = command.replace(WARM_UP, warm_up(reader))
        return None if command == "flotilla down" else shorter(command)

    reader.prepared = prepared
    reader.follow("examples/arithmetic/README.md")
    return reader


def shorter(command: str) -> str:
    return f"{command} {SHORTER}" if command.startswith("flotilla run start") else command


def test_the_arithmetic_example_works_by_hand(by_hand: Reader) -> None:
    assert [run["state"] for run in runs(by_hand)] == ["succeeded"] * 2
    assert json.loads((by_hand.folder / "timeline.json").read_text())["traceEvents"]


def test_the_cells_of_the_notebook_run_in_order_and_training_goes_on_with_another_advantage(
    by_hand: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(by_hand.folder)
    written = json.loads((LOOP / "grpo.ipynb").read_text("utf-8"))["cells"]
    cells = ["".join(cell["source"]) for cell in written if cell["cell_type"] == "code"]
    training = next(code for code in cells if code.startswith("for _ in range(STEPS)"))
    names: dict[str, Any] = {}
    for code in cells:
        exec(code, names)
        if code.startswith("STACK"):
            names |= {"STEPS": 2, "EVALUATE_EVERY": 2, "PROMPTS": 8}
        if code is training:
            names["advantages"] = lambda rewards: rewards - rewards.mean()
            exec(training, names)
    assert list(names["reward_curve"]) == [1, 2, 3, 4] and list(names["accuracy_curve"]) == [0, 2, 4]
    assert (runs(by_hand)[0]["state"], runs(by_hand)[0]["step"]) == ("succeeded", 4)


def test_the_script_of_the_custom_loop_runs_as_its_docstring_says(by_hand: Reader) -> None:
    (command,) = re.findall(r"^    (python .*)$", (LOOP / "grpo.py").read_text("utf-8"), re.MULTILINE)
    by_hand.shell(f"{command.replace(WARM_UP, warm_up(by_hand))} --steps 2 --prompts 8")
    assert (runs(by_hand)[0]["state"], runs(by_hand)[0]["step"]) == ("succeeded", 2)


def test_the_loop_of_the_page_of_custom_loops_runs(by_hand: Reader) -> None:
    loop, _ = (text for language, text in blocks(ROOT / "docs/custom-loops.md") if language == "python")
    by_hand.run([sys.executable, "-c", loop.replace("range(100)", "range(2)")])
    assert (runs(by_hand)[0]["state"], runs(by_hand)[0]["step"]) == ("succeeded", 2)


def test_the_days_of_the_readme_go_by(by_hand: Reader) -> None:
    """The run of the page has ended when it is resumed, so another one is stopped on its way before."""
    ids = ["A", "B"]

    def prepared(command: str) -> str | None:
        command = MAKE.sub(r"flotilla \1", command)
        if command.startswith("make"):
            return None
        if "run resume" in command:
            by_hand.shell(f"flotilla run start examples/arithmetic/sft.yaml {SHORTER} steps=1000")
            ids[:] = by_hand.stop_after_a_step("local")
        return shorter(command).replace("compare A B", f"compare {ids[0]} {ids[1]}")

    by_hand.prepared = prepared
    by_hand.follow("README.md")
    assert by_hand.said["make ps"].count("generator-") == 1
    assert "arithmetic-sft" in by_hand.said["flotilla run list"]
    by_hand.shell("flotilla ps", code=3)


def test_checkpoints_and_models_are_evaluated_without_a_trainer(by_hand: Reader) -> None:
    saved = next(Path(warm_up(by_hand)).glob("checkpoints/step-*"))
    by_hand.instead = {
        "FOLDER": str(saved),
        "RUN": "latest",
        "run.yaml": "examples/arithmetic/grpo.yaml",
        "test.jsonl": "examples/arithmetic/data/heldout.jsonl",
    }
    by_hand.prepared = lambda command: f"{command} evaluation.max_prompts=16"
    (commands,) = (
        text for _, text in blocks(ROOT / "docs/evaluation.md") if text.startswith("flotilla eval")
    )
    by_hand.follow_commands(commands)
    assert len(by_hand.folder.joinpath("answers.jsonl").read_text().splitlines()) == 16


def test_the_example_of_instructions_works_by_hand_with_any_chat_model(
    reader: Reader, chat_model: Path
) -> None:
    def prepared(command: str) -> str | None:
        if command.startswith("make"):
            return None
        return f"{command} --model {chat_model}" if command.endswith("get_model.py") else shorter(command)

    reader.instead, reader.prepared = {}, prepared
    reader.follow("examples/instruct/README.md")
    assert "succeeded" in reader.shell("flotilla run show --stack examples/instruct/stack.yaml")
