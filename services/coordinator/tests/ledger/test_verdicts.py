"""Verdicts are kept on disk as they were, and their means are metrics."""

from __future__ import annotations

import json

from flotilla_coordinator.ledger.verdicts import Said, TermVerdict, from_text, part_means, to_text

FULL = TermVerdict(
    "/me/f.py:f", Said.ERROR, 0.0, {"a/b": 1.0}, "zwölf", "sha256:0", 0.25, "KeyError", "/me/f.py", 7
)


def test_a_verdict_is_read_as_it_was_written_and_what_is_empty_takes_no_room() -> None:
    plain = TermVerdict("exact", value=0.0)
    assert from_text(to_text([FULL, plain])) == (FULL, plain)
    assert json.loads(to_text([plain])) == [{"reward": "exact", "outcome": "scored", "value": 0.0}]
    assert (to_text([]), from_text("")) == ("", ())


def test_what_a_later_release_adds_to_a_verdict_is_left_out() -> None:
    assert from_text('[{"reward": "exact", "value": 1.0, "colour": "red"}]') == (
        TermVerdict("exact", value=1.0),
    )


def test_parts_have_means_over_the_samples_that_have_them() -> None:
    first = [TermVerdict("/me/f.py:f", value=0.5, parts={"acc": 1.0, "a/b": 2.0})]
    second = [TermVerdict("/me/f.py:f", value=1.0, parts={"acc": 0.0})]
    assert part_means([first, second, []]) == {"f.py:f[a_b]": 2.0, "f.py:f[acc]": 0.5}


def test_several_rewards_have_means_of_their_values_each_under_a_name_of_its_own() -> None:
    verdicts = [
        TermVerdict("exact", value=1.0),
        TermVerdict("f.py:f", value=2.0),
        TermVerdict("f.py:f", value=4.0),
    ]
    failed = [TermVerdict("exact", value=0.0), TermVerdict("f.py:f", Said.TIMEOUT)]
    assert part_means([verdicts, failed]) == {"exact": 0.5, "f.py:f": 2.0, "f.py:f#2": 4.0}
