"""Generators are shared among runs, for any fleet and any runs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from flotilla_coordinator.fleet.leases import Claim, GeneratorLeases, allocate

RUNS = ("a", "b", "c", "d")

claims_of_runs = st.lists(
    st.builds(Claim, st.sampled_from(RUNS), st.none() | st.integers(1, 4)),
    max_size=4,
    unique_by=lambda claim: claim.run_id,
)
slots_and_holders = st.dictionaries(
    st.integers(0, 7).map(lambda index: f"generator-{index}"),
    st.sampled_from((*RUNS, "ended", None)),
    max_size=8,
)


@given(slots_and_holders, claims_of_runs)
def test_shares_are_even_within_what_each_wants_and_none_is_left_that_somebody_wants(
    holders: dict[str, str | None], claims: list[Claim]
) -> None:
    held = {slot: run for slot, run in holders.items() if run is not None}
    counts = Counter(allocate(sorted(holders), claims, held).values())
    assert set(counts) <= {claim.run_id for claim in claims}
    for claim in claims:
        has = counts[claim.run_id]
        assert claim.most is None or has <= claim.most
        if claim.most is None or has < claim.most:
            assert sum(counts.values()) == len(holders), "one is left over that it wants"
            assert all(has >= counts[other.run_id] - 1 for other in claims), "others have two more"


@given(slots_and_holders, claims_of_runs)
def test_what_was_dealt_stays_as_it_is(holders: dict[str, str | None], claims: list[Claim]) -> None:
    held = {slot: run for slot, run in holders.items() if run is not None}
    dealt = allocate(sorted(holders), claims, held)
    assert allocate(sorted(holders), claims, dealt) == dealt


@given(st.dictionaries(st.integers(0, 4).map(str), st.sampled_from(("a", "b", "c")), min_size=1))
def test_no_other_even_deal_takes_fewer_generators_away(held: dict[str, str]) -> None:
    claims, slots = [Claim(run) for run in "abc"], sorted(held)
    sizes = sorted(Counter(allocate(slots, claims, held).values()).values())
    fewest = min(
        sum(held[slot] != run for slot, run in zip(slots, deal, strict=True))
        for deal in product("abc", repeat=len(slots))
        if sorted(Counter(deal).values()) == sizes
    )
    assert sum(run != held[slot] for slot, run in allocate(slots, claims, held).items()) == fewest


def test_a_slot_changes_hands_when_its_run_has_let_it_go() -> None:
    leases = GeneratorLeases()
    slots = ["generator-0", "generator-1", "generator-2", "generator-10"]
    leases.claim(Claim("first"))
    assert leases.deal(slots) == [] and set(leases.held.values()) == {"first"}
    leases.claim(Claim("second", most=1))
    assert leases.deal(slots) == leases.leaving == ["generator-10"]
    assert leases.deal(slots) == [] and leases.held["generator-10"] == "first"
    leases.let_go("generator-10")
    assert leases.deal(slots) == [] and leases.held["generator-10"] == "second"
    leases.end("first")
    assert leases.deal(slots) == [] and Counter(leases.held.values()) == {"second": 1}
