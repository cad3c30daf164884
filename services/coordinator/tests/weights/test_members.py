"""Which generators are candidates for weights, and what a refusal of weights costs them."""

from __future__ import annotations

from typing import Any

from flotilla_coordinator.weights.members import Candidates
from flotilla_core.errors import Unauthenticated, Unavailable, WeightsMismatch
from flotilla_testing.scripted import scripted_generator as replica


async def test_an_instance_that_refuses_its_weights_again_and_again_gets_none_until_it_restarts() -> None:
    told: list[tuple[str, str]] = []

    class Pool:
        def eject(self, instance_id: str, _why: str) -> None:
            told.append(("ejected", instance_id))

        def drain(self, instance_id: str, _why: str) -> None:
            told.append(("banned", instance_id))

    nothing: Any = None
    candidates = Candidates(
        Pool(),  # type: ignore[arg-type]
        tokenizer=nothing,
        model="/model",
        wait_limit_s=1.0,
        notice=lambda finding: told.append(("said", finding.what)),
        spared=nothing,
    )
    for passing in (Unavailable("it does not answer"), Unauthenticated("it does not take our token now")):
        for _ in range(4):
            candidates.evict(replica("b"), passing)  # type: ignore[arg-type]
    assert "banned" not in [deed for deed, _ in told]
    told.clear()
    for _ in range(3):
        candidates.evict(replica("b"), WeightsMismatch("w arrived otherwise"))  # type: ignore[arg-type]
    candidates.evict(replica("b", life=2), WeightsMismatch("w arrived otherwise"))  # type: ignore[arg-type]
    deeds = [(deed, who) for deed, who in told if deed != "said"]
    assert deeds == [("ejected", "b-1"), ("ejected", "b-1"), ("banned", "b-1"), ("ejected", "b-2")]
    assert "b gets no weights until it restarts" in [text for deed, text in told if deed == "said"][2]
