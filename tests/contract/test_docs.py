"""Pages of documentation: links lead somewhere, sentences are short, and the picture is what its script draws."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flotilla_testing.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SENTENCE = 40  # words
LONG_SENTENCE = 25
MOST_LONG_SENTENCES = 0.02  # share of all sentences; it only falls

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
BLOCK_START = re.compile(r"^\s*([-*+]|\d+\.|>|#+)\s+")


def pages() -> list[Path]:
    """Return all pages that git knows or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [path for line in sorted(set(listing.splitlines())) if (path := ROOT / line).is_file()]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def blocks(page: Path) -> list[str]:
    """Return paragraphs and items of lists, each on one line; tables, headings and code are left out."""
    found: list[str] = []
    fresh = True
    for line in prose(page).splitlines():
        start = BLOCK_START.match(line)
        heading = start is not None and start[1].startswith("#")
        if not line.strip() or heading or line.lstrip().startswith(("|", "!", "<")):
            fresh = True
        elif fresh or start:
            found.append(line[start.end() if start else 0 :].strip())
            fresh = False
        else:
            found[-1] += " " + line.strip()
    return found


def sentences(page: Path) -> list[str]:
    text_of = []
    for block in blocks(page):
        text = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block))
        text_of += re.split(r"(?<=[.!?])[)*_]* +(?=[A-Z(*_`]|code\b)|(?<=:) +(?=[A-Z])", text)
    return [sentence for sentence in text_of if sentence.strip()]


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_its_anchor_to_a_heading(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_longer_than_a_reader_can_hold(page: Path) -> None:
    too_long = [sentence for sentence in sentences(page) if words(sentence) > LONGEST_SENTENCE]
    assert too_long == []


def test_few_sentences_are_long() -> None:
    lengths = [words(sentence) for page in pages() for sentence in sentences(page)]
    share = sum(length > LONG_SENTENCE for length in lengths) / len(lengths)
    assert share <= MOST_LONG_SENTENCES


def test_the_picture_is_what_its_script_draws() -> None:
    script = ROOT / "scripts" / "draw_architecture.py"
    module = loaded(script)
    assert module.PICTURE.read_text("utf-8") == module.picture(), f"run python {script.relative_to(ROOT)}"
