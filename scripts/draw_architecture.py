"""Draw the picture of the fleet: docs/architecture.svg.

Without arguments it writes the file. The picture is laid out by hand in this module, so a change is a change of a
number or a word here. It has a page of its own below the boxes, and its style sheet follows the colour scheme of
the reader, so it reads on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 960, 600

STYLE = """
  .page { fill: #ffffff }
  .box { fill: #eef2f7; stroke: #5b6b7f; stroke-width: 1.5 }
  .part { fill: #dbe4ef; stroke: #5b6b7f; stroke-width: 1 }
  .title { font-weight: bold; font-size: 17px }
  .small { font-size: 13px }
  .label { font-size: 13px; font-style: italic }
  text { font-family: sans-serif; fill: #1c2733; text-anchor: middle }
  .line { fill: none; stroke: #44566b; stroke-width: 1.8; marker-end: url(#head) }
  .weights { fill: none; stroke: #b4530a; stroke-width: 3; marker-end: url(#weight-head) }
  .spans { fill: none; stroke: #6f7f91; stroke-width: 1.5; stroke-dasharray: 5 4; marker-end: url(#span-head) }
  .head { fill: #44566b }
  .weight-head { fill: #b4530a }
  .span-head { fill: #6f7f91 }
  .weight-label { fill: #b4530a; font-weight: bold }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 }
    .box { fill: #1d2733; stroke: #8fa3ba }
    .part { fill: #2c3a4b; stroke: #8fa3ba }
    text { fill: #e6edf3 }
    .line { stroke: #a9bacd }
    .weights { stroke: #f0883e }
    .spans { stroke: #8b9bad }
    .head { fill: #a9bacd }
    .weight-head { fill: #f0883e }
    .span-head { fill: #8b9bad }
    .weight-label { fill: #f0883e }
  }
"""


def box(x: int, y: int, width: int, height: int, title: str, *lines: str) -> str:
    """A process or a group of processes, with its name and what it does."""
    middle = x + width // 2
    text = [f'<text class="title" x="{middle}" y="{y + 26}">{escape(title)}</text>']
    text += [
        f'<text class="small" x="{middle}" y="{y + 48 + 18 * number}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return "\n".join(
        [f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="10"/>', *text]
    )


def part(x: int, y: int, width: int, height: int, title: str, line: str = "") -> str:
    """A process inside a box."""
    middle = x + width // 2
    rows = [f'<rect class="part" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>']
    rows.append(f'<text class="small" font-weight="bold" x="{middle}" y="{y + 20}">{escape(title)}</text>')
    if line:
        rows.append(f'<text class="small" x="{middle}" y="{y + 38}">{escape(line)}</text>')
    return "\n".join(rows)


def arrow(path: str, kind: str = "line") -> str:
    """A line with a head at its end; `path` is in the language of SVG."""
    return f'<path class="{kind}" d="{path}"/>'


def label(x: int, y: int, text: str, *, anchor: str = "middle", kind: str = "label") -> str:
    """Words for an arrow."""
    return f'<text class="{kind}" x="{x}" y="{y}" style="text-anchor: {anchor}">{escape(text)}</text>'


def head(name: str) -> str:
    """The head of one kind of arrow."""
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0 L10 5 L0 10 z"/></marker>'
    )


def picture() -> str:
    """Return the whole drawing as SVG."""
    shapes = [
        box(40, 24, 250, 78, "flotilla", "command line, Python client"),
        box(360, 24, 290, 128, "coordinator", "runs the loop of every run"),
        part(376, 84, 80, 52, "ledger", "SQLite"),
        part(465, 84, 80, 52, "timeline", "spans"),
        part(554, 84, 80, 52, "fleet", "leases"),
        box(730, 24, 190, 78, "NATS", "registry, events"),
        box(
            40,
            330,
            250,
            90,
            "generator x N",
            "vLLM: tokens, log-probabilities",
            "and the version of each token",
        ),
        box(360, 330, 230, 90, "reward x M", "checkers, functions of yours", "in workers that can be killed"),
        box(660, 270, 260, 262, "trainer (a gang)", "also critic, reference, teachers"),
        part(680, 332, 220, 66, "front", "no torch: checks, advantages"),
        part(680, 446, 66, 66, "rank 0", "FSDP2"),
        part(757, 446, 66, 66, "rank 1", "loss"),
        part(834, 446, 66, 66, "rank n", "AdamW"),
        arrow("M290 52 H358"),
        label(325, 44, "runs"),
        arrow("M360 76 H292"),
        label(325, 94, "events"),
        arrow("M650 63 H728"),
        label(690, 54, "watch"),
        arrow("M400 152 C390 250 220 250 180 328"),
        label(178, 262, "prompts", anchor="end"),
        label(178, 280, "(token ids)", anchor="end"),
        arrow("M230 330 C262 268 425 262 445 154"),
        label(330, 296, "samples", anchor="start"),
        arrow("M485 152 V328"),
        label(492, 262, "samples", anchor="start"),
        arrow("M560 330 V154"),
        label(568, 296, "scores", anchor="start"),
        arrow("M610 152 C620 250 720 200 740 268"),
        label(716, 212, "train (scored groups)", anchor="start"),
        arrow("M790 398 V444"),
        label(800, 426, "frames", anchor="start"),
        arrow("M680 480 H165 V422", "weights"),
        label(420, 502, "weights: NCCL or gloo broadcast, digests compared", kind="label weight-label"),
        '<path class="spans" d="M40 566 H96"/>',
        label(106, 570, "spans: every process sends OpenTelemetry spans to the coordinator", anchor="start"),
        '<path class="line" d="M580 566 H636"/>',
        label(646, 570, "gRPC; every process registers with NATS", anchor="start"),
        arrow("M60 330 C0 250 180 160 358 134", "spans"),
        label(66, 200, "spans", anchor="start"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="The processes of a fleet and what travels between them">',
            "<!-- Written by scripts/draw_architecture.py: change it there. -->",
            f"<style>{STYLE}</style>",
            f"<defs>{head('head')}{head('weight-head')}{head('span-head')}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
            *shapes,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
