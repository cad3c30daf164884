"""The files of recipes are sound, and what their pages promise was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from flotilla_core.config import RunConfig, StackConfig, load

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
LAID_UNDER = ROOT / "examples" / "instruct" / "grpo.yaml"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*/*.yaml")), ids=lambda file: "/".join(file.parts[-2:]))
def test_each_file_of_a_recipe_is_a_configuration_with_a_name_of_its_own(file: Path) -> None:
    named = re.findall(r"^name: (.+)$", file.read_text(), re.MULTILINE)
    stack = file.stem.startswith("stack")
    if stack:
        found = load(StackConfig, [file]).name
    else:
        below = {name: [LAID_UNDER] for name in ("instruct", "judge")}
        below["qwen3"] = [file.parent / "grpo.yaml"]
        found = load(RunConfig, [*below.get(file.parent.name, []), file]).name
    assert [found] == named
    # A run may have the name of its stack; two stacks of one name would share a state directory.
    alike = [other for other in RECIPES.glob("*/*.yaml") if other.stem.startswith("stack") is stack]
    assert [other for other in alike if f"name: {found}\n" in other.read_text()] == [file]


@pytest.mark.parametrize(
    "recipe",
    [
        "code",
        "frozen_lake",
        "gsm8k",
        "instruct",
        "judge",
        "ppo",
        "reasoning_gym",
        "reward_model",
        "textarena",
        "tools",
    ],
)
def test_the_scores_that_a_page_tells_are_those_of_its_curves(recipe: str) -> None:
    # What was measured on a CPU with GRPO is told by the page of the example.
    pages = [RECIPES / recipe / "README.md", ROOT / "examples" / "instruct" / "README.md"]
    told = " ".join(" ".join(page.read_text() for page in pages).split())
    curves = {path.stem: lines_of(path) for path in (RECIPES / recipe / "curves").glob("*.jsonl")}
    assert curves
    for name, curve in curves.items():
        first, last = (line["eval/reward_mean"] for line in (curve[0], curve[-1]))
        forms = (f"{first:.3f} to {last:.3f}", f"| {first:.3f} | {last:.3f} |")
        in_percent = f"{last:.1%}".replace("%", " %")
        assert any(form in told for form in ((in_percent,) if recipe == "gsm8k" else forms)), name


def test_problems_become_rows_with_their_final_number_and_no_calculator(tmp_path: Path) -> None:
    problem = {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4, in cents 1,000.\n#### 1,004"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(problem) + "\n")
    script = [
        sys.executable,
        RECIPES / "gsm8k" / "make_data.py",
        "--from",
        tmp_path,
        "--out",
        tmp_path / "made",
    ]
    subprocess.run(script, check=True)
    prompt = [{"role": "user", "content": "Two and two?"}]
    solution = "It is 2+2=4, in cents 1,000.\n#### 1,004"
    assert lines_of(tmp_path / "made" / "solutions.jsonl") == [{"prompt": prompt, "answer": solution}]
    for split in ("train", "test"):
        assert lines_of(tmp_path / "made" / f"{split}.jsonl") == [{"prompt": prompt, "answer": "1004"}]


def test_pairs_have_a_right_and_a_wrong_response_to_one_prompt(tmp_path: Path) -> None:
    told = ["Name a tree.", "Name a tree in one word."]
    rewards = {"a": [1.0, 0.0, 1.0, 0.0, 0.0], "b": [1.0, 1.0]}
    samples = [
        {
            "step": 0,
            "group_id": group,
            "prompt": f"<user>{told[1]}<end>",
            "response": f"{group}{n}",
            "reward": reward,
        }
        for group, each in rewards.items()
        for n, reward in enumerate(each)
    ]
    (tmp_path / "samples").mkdir()
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "samples" / "step-000000.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in told)
    )
    script = [
        sys.executable,
        RECIPES / "instruct" / "make_pairs.py",
        tmp_path,
        "--out",
        tmp_path / "pairs.jsonl",
    ]
    subprocess.run([*script, "--prompts", tmp_path / "prompts.jsonl"], check=True)
    found = lines_of(tmp_path / "pairs.jsonl")
    assert {pair["prompt"][0]["content"] for pair in found} == {told[1]}
    assert [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in found] == [
        ("a0", "a1"),
        ("a2", "a3"),
    ]


@pytest.mark.parametrize(
    ("prompt", "reward", "said"),
    [("Name a tree.", 1.0, "no prompt of the first 50 steps"), ("Name a bird.", 0.0, "'Name a bird.'")],
)
def test_a_run_that_makes_no_pairs_is_refused_and_no_file_is_written(
    tmp_path: Path, prompt: str, reward: float, said: str
) -> None:
    sample = {"step": 0, "group_id": "a", "prompt": prompt, "response": "oak", "reward": reward}
    (tmp_path / "samples").mkdir()
    packed = zstandard.compress(json.dumps(sample).encode() + b"\n")
    (tmp_path / "samples" / "step-000000.jsonl.zst").write_bytes(packed)
    told, pairs = tmp_path / "prompts.jsonl", tmp_path / "pairs.jsonl"
    told.write_text(json.dumps({"prompt": [{"role": "user", "content": "Name a tree."}]}) + "\n")
    script = [sys.executable, RECIPES / "instruct" / "make_pairs.py", tmp_path]
    shown = subprocess.run(
        [*script, "--prompts", told, "--out", pairs], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, pairs.exists()) == (1, False) and said in shown.stderr


def test_a_judge_learns_what_the_checks_say_of_samples_in_the_form_of_verdicts(tmp_path: Path) -> None:
    files = {"train": ("step", "Name a tree."), "heldout": ("eval", "Name a bird.")}
    (tmp_path / "samples").mkdir()
    for name, (kind, told) in files.items():
        row = {"prompt": [{"role": "user", "content": told}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        # The last one is there twice; the one without a reward teaches nothing.
        said = [("An oak.", 1.0), ("A fir.", 0.0), ("No oak?", None), ("A fir.", 0.0)]
        about = {"prompt": f"<user>{told}<end>", "info": {"checks": {"mentions": "oak"}}, "set": "heldout"}
        lines = [json.dumps({**about, "response": text, "reward": reward}) for text, reward in said]
        packed = zstandard.compress("\n".join([*lines, ""]).encode())
        (tmp_path / "samples" / f"{kind}-000000.jsonl.zst").write_bytes(packed)
    script = [sys.executable, RECIPES / "judge" / "make_data.py", tmp_path, "--prompts", tmp_path]
    subprocess.run([*script, "--out", tmp_path / "made"], check=True, cwd=ROOT)
    found = {path.stem: lines_of(path) for path in (tmp_path / "made").glob("*.jsonl")}
    verdicts = {row["answer"]: row["prompt"][1]["content"] for row in found["verdicts"]}
    for answer, response in (("yes", "An oak."), ("no", "A fir.")):
        question = verdicts[f'{{"reason": "mentions: {answer}", "verdict": "{answer}"}}']
        assert "Follow the instruction.\n\nuser: Name a tree.\n<<<end" in question and response in question
    assert sorted((row["response"], row["label"]) for row in found["labelled"]) == [
        ("A fir.", "no"),
        ("An oak.", "yes"),
    ]
    for name, told in (("pairs", "Name a tree."), ("heldout-pairs", "Name a bird.")):
        (pair,) = found[name]
        assert [pair[key][0]["content"] for key in ("chosen", "rejected")] == ["An oak.", "A fir."]
        assert pair["prompt"][1]["content"] == told


def test_a_run_is_drawn_beside_the_curves_of_its_recipe(tmp_path: Path) -> None:
    curve = (RECIPES / "gsm8k" / "curves" / "grpo.jsonl").read_text()
    (tmp_path / "evaluations.jsonl").write_text(curve)
    drawn = tmp_path / "drawn.png"
    script = [sys.executable, RECIPES / "curve.py", RECIPES / "gsm8k", tmp_path, "--out", drawn]
    subprocess.run(script, check=True)
    assert drawn.read_bytes().startswith(b"\x89PNG")
