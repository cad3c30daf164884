"""Token ids mean the same to everybody who takes part."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.common.v1.registration_pb2 import Registration
from flotilla_coordinator.data.same_tokenizer import of_same_tokenizer
from flotilla_core.errors import Mismatch

OURS: Any = SimpleNamespace(digest="ours")


@dataclass(eq=False)
class Replica:
    registration: Registration

    @property
    def name(self) -> str:
        return self.registration.name


def replica(name: str, digest: str) -> Any:
    return Replica(Registration(name=name, tokenizer_digest=digest))


def test_a_generator_with_another_tokenizer_is_refused_and_the_others_go_on() -> None:
    refused: list[tuple[str, str]] = []
    replicas = [replica("a", "ours"), replica("b", "theirs"), replica("c", "")]
    fitting = of_same_tokenizer(replicas, OURS, "m", lambda who, why: refused.append((who.name, str(why))))
    assert [one.name for one in fitting] == ["a", "c"]
    [(name, why)] = refused
    assert name == "b" and "b has another tokenizer" in why


def test_where_every_generator_has_another_tokenizer_the_run_is_refused() -> None:
    refused: list[str] = []
    with pytest.raises(Mismatch, match="a has another tokenizer"):
        of_same_tokenizer(
            [replica("a", "x"), replica("b", "x")], OURS, "m", lambda who, _: refused.append(who.name)
        )
    assert refused == []
