"""Suites that are run tell what ran and what did not, and none is forgotten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test_all.py"
SUITES = sorted({file.parent.name for file in ROOT.glob("tests/*/test_*.py")})
IN_MAKE_TEST = ("contract", "integration")
IN_CI = ("test", "docs", "test-wheels", "test-trackers", "test-hosts", "test-helm", "test-upgrade")

MAKEFILE = f"""
both:
\t@{sys.executable} -m pytest -q -rs -p no:cacheprovider test_two.py
\t@{sys.executable} -m pytest -q -rs -p no:cacheprovider test_one.py
fails:
\t@{sys.executable} -m pytest -q -p no:cacheprovider test_wrong.py
docs:
\t@echo a page
"""
FILES = {
    "Makefile": MAKEFILE,
    "test_two.py": 'import pytest\n\ndef test_a(): pass\n\ndef test_b(): pytest.skip("no such device: 7")\n',
    "test_one.py": "def test_a(): pass\n",
    "test_wrong.py": "def test_a(): assert False\n",
    "listed.toml": '[skips]\n"no such device" = "there is none here"\n',
    "unlisted.toml": '[skips]\n"another reason" = "there is none here"\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("suites")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def ran(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run suites; the exit code, what is printed, and the page."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--directory", folder, *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, (folder / "build" / "what-ran.md").read_text("utf-8")


def row(page: str, suite: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| `make {suite}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_suite_that_fails_fails_all_and_the_others_run_and_are_told(folder: Path) -> None:
    code, printed, page = ran(folder, "both", "fails", "docs")
    assert code == 1
    assert row(page, "both")[4:] == ["passed: 2 passed, 1 skipped", "1 of test_two.py: no such device: 7"]
    assert row(page, "fails")[4].startswith("**failed**") and "1 failed" in row(page, "fails")[4]
    assert row(page, "docs")[4:] == ["passed", ""]
    assert re.fullmatch(r"2 passed, 1 skipped, 1 failed in \d+\.\d\ds", printed.splitlines()[-1])


@pytest.mark.parametrize(("skips", "expected"), [("listed", 0), ("unlisted", 1)])
def test_a_skip_fails_its_suite_unless_its_reason_is_listed(folder: Path, skips: str, expected: int) -> None:
    code, printed, _ = ran(folder, "--skips", str(folder / f"{skips}.toml"), "both")
    assert code == expected
    assert ("test_two.py: no such device: 7" in printed.rpartition("==>")[0].rpartition("|")[2]) == bool(
        expected
    )


def test_a_run_of_all_suites_leaves_none_out() -> None:
    made = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True)
    words = made.stdout.split()
    assert [one for one in SUITES if one not in IN_MAKE_TEST and f"test-{one}" not in words] == []
    assert {"test", "docs", "test-py312"} <= set(words)


def test_ci_runs_its_suites_and_says_why_each_listed_skip_is_accepted() -> None:
    text = (ROOT / ".ci" / "run").read_text("utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "scripts/test_all.py" in line)
    assert line.partition(".ci/skips.toml")[2].split() == [*IN_CI]
    skips = tomllib.loads((ROOT / ".ci" / "skips.toml").read_text("utf-8"))["skips"]
    assert all(reason and why for reason, why in skips.items())


def test_the_suite_of_containers_has_testcontainers_and_the_engine_that_users_have() -> None:
    lock = (ROOT / "requirements" / "docker.txt").read_text("ascii")
    assert {"testcontainers", "docker"} <= {line.partition("==")[0] for line in lock.splitlines()}
    code = {file.name: file.read_text("utf-8") for file in ROOT.glob("tests/docker/*.py")}
    assert any("testcontainers.compose import DockerCompose" in text for text in code.values())
    simulated = [name for name, text in code.items() if '"sim"' in text or "canary.prompts" in text]
    assert simulated == []


@pytest.mark.parametrize("suite", [one for one in SUITES if one != "option_pairs"])
def test_every_suite_has_a_row_that_says_what_it_proves(suite: str) -> None:
    page = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    assert re.search(rf"^\| `make test-{suite}` \|", page, re.MULTILINE)
