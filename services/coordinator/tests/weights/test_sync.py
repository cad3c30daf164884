"""Weight synchronisation against scripted members: who is evicted, who goes on, what a failure is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights import sync as sync_module
from flotilla_coordinator.weights.epochs import CALL_SLACK_S
from flotilla_coordinator.weights.members import SyncReport
from flotilla_coordinator.weights.sync import WeightSync
from flotilla_core import rpc
from flotilla_core.config import WeightSyncConfig
from flotilla_core.errors import (
    DeadlineExceeded,
    Exhausted,
    FlotillaError,
    Internal,
    Mismatch,
    RankFailed,
    Unavailable,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_core.version import Version
from flotilla_testing.scripted import scripted_generator as replica
from flotilla_testing.scripted import scripted_trainer

pytestmark = pytest.mark.usefixtures("direct_calls")

V1, V2 = Version(0, 1), Version(0, 2)
Failure = FlotillaError | None
LONGEST_SAMPLE_S = 100.0
TIMEOUT_S = 30.0


class Bench:
    """A sync with its trainer and replicas that a test may change; evicted ones stay out unless they come back."""

    version = Version(0, 0)

    def __init__(self, *names: str, config: WeightSyncConfig | None = None, staleness: int = 0) -> None:
        self.replicas = {name: replica(name) for name in names}
        self.evicted: list[tuple[str, FlotillaError]] = []
        self.coming_back = ""
        self.verdicts: list[dict[str, FlotillaError]] = []
        self.verified: list[SyncReport] = []
        self.checking = asyncio.Event()
        self.checking.set()
        self.mismatch: Mismatch | None = None
        self.stub = scripted_trainer()
        self.sync = WeightSync(
            "run",
            config or WeightSyncConfig(),
            backend="gloo",
            policy=self,
            candidates=self._candidates,
            ready=self._ready,
            evict=self._evict,
            record=lambda report: None,
            verify=self._verify,
            longest_sample_s=LONGEST_SAMPLE_S,
            max_staleness=staleness,
        )

    async def _candidates(self) -> list[Any]:
        if not self.replicas:
            raise Unavailable("waited 1 s for a generator")
        return list(self.replicas.values())

    def _ready(self) -> list[Any]:
        return list(self.replicas.values())

    def _evict(self, gone: Any, error: FlotillaError) -> None:
        self.evicted.append((gone.instance_id, error))
        self.replicas.pop(gone.name, None)
        if gone.name in self.coming_back:
            self.replicas[gone.name] = replica(gone.name, life=2)

    async def _verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        self.verified.append(report)
        await self.checking.wait()
        if self.mismatch is not None:
            raise self.mismatch
        return self.verdicts.pop(0) if self.verdicts else {}

    def fail(self, name: str, method: str, *failures: Failure) -> None:
        self.replicas[name].stub.failures[method] = list(failures)

    def serving(self, version: Version) -> set[str]:
        return {n for n, r in self.replicas.items() if self.sync.serving.serves(r.instance_id, version)}

    @property
    def epochs(self) -> list[int]:
        return [request.epoch for request in self.stub.asked("OpenWeightGroup")]


async def test_a_member_whose_live_memory_changed_is_evicted_and_asked_for_no_canary() -> None:
    bench = Bench("a", "b")
    bench.fail("b", "VerifyWeights", WeightsMismatch("lm_head.weight: live tensor differs"))
    await bench.sync.publish(V1)
    await bench.sync.settled()
    assert [name for name, _ in bench.evicted] == ["b-1"] and bench.serving(V1) == {"a"}
    assert [[m.name for m in report.members] for report in bench.verified] == [["a"]]


async def test_one_member_with_other_weights_is_evicted_its_samples_are_void_and_the_run_goes_on() -> None:
    bench = Bench("a", "b")
    bench.verdicts = [{"b": Mismatch("b does not decode with the trainer's weights")}]
    await bench.sync.publish(V1)
    await bench.sync.settled()
    await bench.sync.wait_until_verified(V1)
    assert [name for name, _ in bench.evicted] == ["b-1"] and bench.serving(V1) == {"a"}
    assert bench.sync.disowns({"a-1", "b-1"}, [V1])
    assert not bench.sync.disowns({"a-1"}, [V1]) and not bench.sync.disowns({"b-1"}, [Version(0, 0)])
    await bench.sync.publish(V2)
    assert bench.serving(V2) == {"a"}


async def test_other_weights_on_every_member_end_the_run() -> None:
    bench = Bench("a", "b")
    bench.verdicts = [{name: Mismatch(f"{name} does not decode with the trainer's weights") for name in "ab"}]
    await bench.sync.publish(V1)
    with pytest.raises(Mismatch, match="a does not decode"):
        await bench.sync.settled()


async def test_live_memory_that_changed_on_the_only_member_ends_the_run() -> None:
    bench = Bench("a")
    bench.fail("a", "VerifyWeights", WeightsMismatch("lm_head.weight: live tensor differs"))
    await bench.sync.publish(V1)
    with pytest.raises(WeightsMismatch, match="lm_head"):
        await bench.sync.settled()


async def test_a_group_is_kept_over_versions() -> None:
    bench = Bench("a", "b")
    for version in (V1, V2):
        report = await bench.sync.publish(version)
        assert report.epochs == 1 and {m.name for m in report.members} == {"a", "b"}
    assert bench.epochs == [1] and bench.serving(V2) == {"a", "b"}


@pytest.mark.parametrize(
    ("config", "staleness", "policy", "drains"),
    [
        (WeightSyncConfig(), 0, gen.KV_POLICY_RECOMPUTE, False),
        (WeightSyncConfig(), 1, gen.KV_POLICY_REUSE, False),
        (WeightSyncConfig(kv_policy="recompute"), 1, gen.KV_POLICY_RECOMPUTE, False),
        (WeightSyncConfig(kv_policy="reuse"), 0, gen.KV_POLICY_REUSE, False),
        (WeightSyncConfig(kv_policy="drain"), 1, gen.KV_POLICY_DRAIN, True),
        (WeightSyncConfig(update="between_samples"), 1, gen.KV_POLICY_DRAIN, True),
        (WeightSyncConfig(update="between_samples", kv_policy="reuse"), 0, gen.KV_POLICY_DRAIN, True),
    ],
)
async def test_a_commit_that_waits_for_running_samples_has_their_time(
    config: WeightSyncConfig, staleness: int, policy: int, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, limits = Bench("a", config=config, staleness=staleness), []
    call = rpc.unary

    async def unary(method: Callable[..., Any], request: Any, **options: Any) -> Any:
        if isinstance(request, gen.CommitWeightsRequest):
            limits.append(options["timeout_s"])
        return await call(method, request, **options)

    monkeypatch.setattr(rpc, "unary", unary)
    await bench.sync.publish(V1)
    (asked,) = bench.replicas["a"].stub.asked("CommitWeights")
    assert asked.kv_policy == policy
    assert limits == [config.timeout_s + CALL_SLACK_S + LONGEST_SAMPLE_S * drains]


async def test_the_same_version_again_is_no_new_group() -> None:
    bench = Bench("a")
    await bench.sync.publish(V1)
    await bench.sync.publish(V1)
    assert bench.epochs == [1] and bench.serving(V1) == {"a"}


async def test_a_joiner_serves_only_after_its_first_commit_and_makes_a_new_epoch() -> None:
    bench = Bench("a")
    await bench.sync.publish(V1)
    bench.replicas["b"] = replica("b")
    assert bench.serving(V1) == {"a"}
    await bench.sync.publish(V2)
    assert bench.serving(V2) == {"a", "b"} and bench.epochs == [1, 2]
    assert [r.rank_offset for n in "ab" for r in bench.replicas[n].stub.asked("JoinWeightGroup")] == [1, 1, 2]


async def test_a_restart_under_the_same_name_serves_nothing_until_it_committed() -> None:
    bench = Bench("a", "b")
    await bench.sync.publish(V1)
    bench.replicas["b"] = replica("b", life=2)
    assert bench.serving(V1) == {"a"}
    await bench.sync.publish(V1)
    assert bench.serving(V1) == {"a", "b"} and bench.epochs == [1, 2]


@pytest.mark.parametrize("phase", ["JoinWeightGroup", "StageWeights"])
async def test_a_member_that_fails_by_itself_is_evicted_and_the_others_go_on(phase: str) -> None:
    bench = Bench("a", "b")
    bench.fail("a", phase, WeightGroupFailed("another member failed"))
    bench.fail("b", phase, Internal("out of memory"))
    report = await bench.sync.publish(V1)
    assert report.epochs == 2 and bench.epochs == [1, 2]
    assert [(who, error.what) for who, error in bench.evicted] == [("b-1", "out of memory")]
    assert bench.serving(V1) == {"a"}


@pytest.mark.parametrize(
    "error", [Exhausted("CUDA out of memory"), Unavailable("the sender's store is gone")]
)
async def test_a_member_whose_fault_persists_never_ends_a_run_that_has_healthy_members(
    error: FlotillaError,
) -> None:
    bench = Bench("a", "b")
    bench.fail("a", "StageWeights", WeightGroupFailed("another member failed"))
    bench.fail("b", "StageWeights", *[error] * 100)
    await bench.sync.publish(V1)
    assert bench.serving(V1) == {"a"} and bench.evicted == [("b-1", error)]


@pytest.mark.parametrize("phase", ["JoinWeightGroup", "StageWeights"])
async def test_a_member_that_is_gone_is_evicted(phase: str) -> None:
    bench = Bench("a", "b")
    bench.fail("b", phase, WeightGroupFailed("the sender saw a connection break"))
    bench.fail("b", "GetWeightStatus", Unavailable("connection refused"))
    await bench.sync.publish(V1)
    assert [who for who, _ in bench.evicted] == ["b-1"] and bench.serving(V1) == {"a"}


async def test_a_broken_wire_costs_an_epoch_and_nobody() -> None:
    bench = Bench("a", "b")
    bench.stub.failures["PublishWeights"] = [WeightGroupFailed("sending bucket 1 of 3")]
    bench.fail("a", "StageWeights", WeightGroupFailed("receiving bucket 1 of 3"))
    report = await bench.sync.publish(V1)
    assert report.epochs == 2 and not bench.evicted and bench.serving(V1) == {"a", "b"}
    assert bench.stub.asked("CloseWeightGroup") and bench.replicas["a"].stub.asked("AbortWeights")


async def test_a_limit_that_all_missed_blames_nobody_who_answers() -> None:
    bench = Bench("a", "b")
    bench.stub.failures["PublishWeights"] = [DeadlineExceeded("no answer within 65 s")]
    for name in "ab":
        bench.fail(name, "StageWeights", DeadlineExceeded("no answer within 65 s"))
    bench.fail("b", "GetWeightStatus", DeadlineExceeded("no answer within 3 s"))
    await bench.sync.publish(V1)
    assert [who for who, _ in bench.evicted] == ["b-1"] and bench.serving(V1) == {"a"}


async def test_a_member_that_stages_but_does_not_commit_costs_itself_alone() -> None:
    bench = Bench("a", "b")
    await bench.sync.publish(V1)
    bench.fail("b", "CommitWeights", Unavailable("it died"))
    report = await bench.sync.publish(V2)
    assert report.epochs == 1 and [m.name for m in report.members] == ["a"]
    assert [who for who, _ in bench.evicted] == ["b-1"] and bench.sync.serving.live_version("b-1") is None


async def test_no_survivor_means_a_new_epoch_for_those_that_come() -> None:
    bench = Bench("a")
    bench.fail("a", "CommitWeights", Unavailable("it died"))
    bench.coming_back = "a"
    report = await bench.sync.publish(V1)
    assert report.epochs == 2 and [who for who, _ in bench.evicted] == ["a-1"]
    assert bench.sync.serving.serves("a-2", V1)


async def test_a_mismatch_of_one_member_evicts_it() -> None:
    bench = Bench("a", "b")
    bench.fail("b", "CommitWeights", WeightsMismatch("version 0.1 was not applied", why="lm_head.weight"))
    await bench.sync.publish(V1)
    assert bench.serving(V1) == {"a"} and "lm_head.weight" in str(bench.evicted[0][1])


@pytest.mark.parametrize("phase", ["StageWeights", "CommitWeights"])
async def test_a_mismatch_of_all_members_ends_the_sync_and_names_the_tensor(phase: str) -> None:
    bench = Bench("a", "b")
    for name in "ab":
        bench.fail(name, phase, WeightsMismatch("version 0.1 was not applied", why="lm_head.weight"))
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight"):
        await bench.sync.publish(V1)


async def test_a_group_that_does_not_open_in_time_costs_an_epoch_and_nobody() -> None:
    bench = Bench("a", "b")
    bench.stub.failures["OpenWeightGroup"] = [DeadlineExceeded("no answer within 60 s")]
    report = await bench.sync.publish(V1)
    assert report.epochs == 2 and bench.epochs == [1, 2]
    assert not bench.evicted and bench.serving(V1) == {"a", "b"}


async def test_a_trainer_that_never_opens_a_group_ends_the_sync_as_what_it_is() -> None:
    bench = Bench("a")
    late = DeadlineExceeded("no answer within 60 s")
    bench.stub.failures["OpenWeightGroup"] = [late, late, RankFailed("rank 1 does not answer for 60 s")]
    with pytest.raises(RankFailed, match="rank 1 does not answer"):
        await bench.sync.publish(V1)


@pytest.mark.parametrize("call", ["OpenWeightGroup", "PublishWeights"])
async def test_the_trainers_own_trouble_ends_the_sync_as_what_it_is(call: str) -> None:
    bench = Bench("a")
    bench.stub.failures[call] = [RankFailed("rank 1 was killed")]
    with pytest.raises(RankFailed, match="rank 1 was killed"):
        await bench.sync.publish(V1)
    assert not bench.evicted


async def test_a_group_that_breaks_again_and_again_ends_named() -> None:
    bench = Bench("a")
    limit = sync_module.MAX_EPOCHS_PER_SYNC
    bench.fail("a", "JoinWeightGroup", *[WeightGroupFailed("port 7 is closed")] * limit)
    with pytest.raises(WeightGroupFailed, match=r"a: port 7 is closed"):
        await bench.sync.publish(V1)
    assert bench.epochs == list(range(1, limit + 1))


async def test_a_member_that_cannot_answer_the_live_check_is_evicted_and_not_the_run() -> None:
    bench = Bench("a", "b")
    bench.verdicts = [{"b": Unavailable("it died")}]
    await bench.sync.publish(V1)
    await bench.sync.settled()
    assert [who for who, _ in bench.evicted] == ["b-1"] and bench.serving(V1) == {"a"}


async def test_a_live_check_that_nobody_answers_is_repeated_with_those_that_come() -> None:
    bench = Bench("a")
    bench.verdicts = [{"a": Unavailable("it died")}]
    bench.coming_back = "a"
    await bench.sync.publish(V1)
    await bench.sync.settled()
    assert len(bench.verified) == 2 and bench.sync.serving.serves("a-2", V1)
    assert bench.sync.serving.live_version("a-1") is None


async def test_close_gives_the_group_up_even_where_a_member_is_gone() -> None:
    bench = Bench("a", "b")
    await bench.sync.publish(V1)
    bench.fail("b", "AbortWeights", Unavailable("the channel to the peer is closed"))
    await bench.sync.close()
    await bench.sync.close()
    assert len(bench.stub.asked("CloseWeightGroup")) == 1
    assert len(bench.replicas["a"].stub.asked("AbortWeights")) == 1


async def test_work_goes_on_with_the_replica_that_replaced_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_module, "LOOK_AGAIN_S", 0.01)
    bench = Bench("a")
    await bench.sync.publish(V1)
    served = asyncio.Event()

    async def work() -> str:
        bench.replicas["a"] = replica("a", life=2)
        await asyncio.wait_for(served.wait(), 5)
        return "done"

    async def verify(report: SyncReport) -> dict[str, FlotillaError]:
        served.set()
        return {}

    bench.sync._verify = verify
    assert await bench.sync.keep_serving(work()) == "done"
    assert bench.sync.serving.serves("a-2", V1) and bench.epochs == [1, 2]


async def test_work_that_fails_is_raised_and_work_of_a_failed_sync_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_module, "LOOK_AGAIN_S", 0.001)
    bench = Bench("a")
    await bench.sync.publish(V1)

    async def fails() -> None:
        raise Internal("no")

    with pytest.raises(Internal, match="no"):
        await bench.sync.keep_serving(fails())
    bench.replicas["a"] = replica("a", life=2)
    bench.stub.failures["OpenWeightGroup"] = [RankFailed("rank 0 was killed")]
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(RankFailed):
        await bench.sync.keep_serving(waits())
    assert cancelled.is_set()


async def test_who_is_left_out_of_a_group_holds_and_serves_nothing_of_the_run() -> None:
    bench = Bench("a", "b")
    await bench.sync.publish(V1)
    left_out = bench.replicas.pop("b")
    await bench.sync.publish(V2)
    assert [(held.member.name, held.version) for held in bench.sync.serving.held()] == [("a", V2)]
    assert bench.sync.serving.live_version(left_out.instance_id) is None
    assert left_out.stub.asked("AbortWeights")


async def test_a_version_is_proved_when_its_live_check_has_passed_and_not_before() -> None:
    bench = Bench("a")
    before = asyncio.create_task(bench.sync.wait_until_verified(V1))
    bench.checking.clear()
    await bench.sync.publish(V1)
    assert bench.serving(V1) == {"a"} and bench.sync.version == V1 and bench.sync.checking
    assert not before.done(), "it decodes already, and is still being checked"
    bench.checking.set()
    async with asyncio.timeout(TIMEOUT_S):
        await bench.sync.settled()
        await before
        await bench.sync.wait_until_verified(Version(0, 0))
    assert not bench.sync.checking


async def test_one_check_is_under_way_at_a_time_and_the_next_sync_waits_for_it() -> None:
    bench = Bench("a")
    bench.checking.clear()
    await bench.sync.publish(V1)
    publishing = asyncio.create_task(bench.sync.publish(V2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not bench.replicas["a"].stub.asked("StageWeights")[1:] and bench.serving(V2) == set()
    bench.checking.set()
    async with asyncio.timeout(TIMEOUT_S):
        await publishing
        await bench.sync.settled()
    assert [report.version for report in bench.verified] == [V1, V2]


async def test_a_version_that_others_take_is_proved_again() -> None:
    bench = Bench("a")
    await bench.sync.publish(V1)
    await bench.sync.settled()
    bench.replicas["a"] = replica("a", life=2)
    bench.checking.clear()
    await bench.sync.publish(V1)
    waiting = asyncio.create_task(bench.sync.wait_until_verified(V1))
    await asyncio.sleep(0)
    assert not waiting.done() and bench.sync.serving.serves("a-2", V1)
    bench.checking.set()
    async with asyncio.timeout(TIMEOUT_S):
        await waiting


async def test_a_version_that_failed_its_live_check_is_never_proved_and_ends_what_is_generated() -> None:
    bench = Bench("a")
    await bench.sync.publish(V1)
    await bench.sync.settled()
    waiting = asyncio.create_task(bench.sync.wait_until_verified(V2))
    bench.mismatch = Mismatch("the token probabilities of a differ from the trainer's by 0.5")
    bench.checking.clear()
    await bench.sync.publish(V2)
    rollouts = asyncio.create_task(bench.sync.keep_serving(waiting))
    await asyncio.sleep(0)
    bench.checking.set()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(Mismatch, match="differ from the trainer's by"):
            await rollouts
        with pytest.raises(Mismatch, match="differ from the trainer's by"):
            await bench.sync.settled()
    assert waiting.cancelled()


async def test_a_trainer_that_dies_during_the_live_check_is_found_by_who_waits_for_it() -> None:
    bench = Bench("a")

    async def verify(report: SyncReport) -> dict[str, FlotillaError]:
        raise RankFailed("rank 0 was killed")

    bench.sync._verify = verify
    await bench.sync.publish(V1)
    with pytest.raises(RankFailed, match="rank 0 was killed"):
        await bench.sync.settled()


async def test_the_end_of_a_run_gives_up_its_live_check() -> None:
    bench = Bench("a")
    bench.checking.clear()
    await bench.sync.publish(V1)
    async with asyncio.timeout(TIMEOUT_S):
        await bench.sync.close()
    assert not bench.sync.checking and len(bench.stub.asked("CloseWeightGroup")) == 1
    assert not bench.sync.moves_weights_to("a-1")


async def test_a_member_whose_weights_are_checked_stays_with_the_run() -> None:
    bench = Bench("a")
    bench.checking.clear()
    await bench.sync.publish(V1)
    assert bench.sync.moves_weights_to("a-1")
    bench.checking.set()
    await bench.sync.settled()
    assert not bench.sync.moves_weights_to("a-1")


async def test_a_newcomer_waits_for_the_live_check_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "LOOK_AGAIN_S", 0.001)
    bench = Bench("a")
    bench.checking.clear()
    await bench.sync.publish(V1)
    bench.replicas["b"] = replica("b")
    looks: list[bool] = []

    async def rollouts() -> None:
        while not bench.sync.serving.serves("b-1", V1):
            looks.append(bench.sync.checking)
            if len(looks) == 20:
                assert bench.epochs == [1]
                bench.checking.set()
            await asyncio.sleep(0.001)

    async with asyncio.timeout(TIMEOUT_S):
        await bench.sync.keep_serving(rollouts())
    assert all(looks[:20]) and bench.epochs == [1, 2]


async def test_equal_weights_have_one_digest_and_others_another() -> None:
    bench = Bench("a", "b")
    await bench.sync.publish(V1)
    first, second = bench.sync.serving.held()
    digest = first.digest
    assert digest == second.digest == first.to_proto().digest
    bench.stub.answers["PublishWeights"].digests.tensor_digests.append(7)
    await bench.sync.publish(V2)
    assert digest != bench.sync.serving.held()[0].digest


async def test_a_generator_with_another_model_is_refused_at_the_door_and_the_others_go_on() -> None:
    bench = Bench("a", "b")
    bench.fail(
        "b", "JoinWeightGroup", WeightsMismatch("the manifest does not fit", why="missing: lm_head.weight")
    )
    await bench.sync.publish(V1)
    [(instance_id, error)] = bench.evicted
    assert instance_id == "b-1" and isinstance(error, Mismatch)
    assert "b holds another model" in str(error) and "lm_head.weight" in str(error)
    assert bench.serving(V1) == {"a"}


async def test_where_no_generator_holds_the_trainers_model_the_run_ends() -> None:
    bench = Bench("a")
    bench.fail(
        "a", "JoinWeightGroup", WeightsMismatch("the manifest does not fit", why="missing: lm_head.weight")
    )
    with pytest.raises(Mismatch, match="lm_head"):
        await bench.sync.publish(V1)
    assert bench.evicted == []
