"""A fork goes on like the run that it was forked from, or begins its optimizer anew, and leaves the original alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_coordinator.runs.fork import Forked
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.config import RunConfig
from flotilla_core.config.data import CurriculumConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.version import Version

SIZES = [4, 1, 6, 3]
SAVED_AT, STEPS = 2, 5
CURSOR = {"sets": [{"epoch": 0, "position": 8}]}
SPEC = {"epsilon": 1e-3, "schedule": "linear", "total_updates": 8}
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
MakeGroups = Callable[..., list[pb.TrainGroup]]


def run(**changes: Any) -> RunConfig:
    described = {"name": "run", "steps": 8, "data": {"train": "/x.jsonl"}, "rewards": [{"reward": "exact"}]}
    return RunConfig.model_validate(described | changes)


@dataclass(frozen=True)
class Original:
    """A run of five updates, with a checkpoint after the second."""

    folder: Path
    losses: list[float]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def original(
    two_ranks: Any, groups_of: MakeGroups, tmp_path_factory: pytest.TempPathFactory
) -> Original:
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / CheckpointShelf.name_of(SAVED_AT)
    state = Progress("run", SAVED_AT, Version(0, SAVED_AT), CURSOR, 0.5).to_bytes()
    await two_ranks.open(**SPEC)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            await two_ranks.save(folder, Version(0, step), coordinator_state=state)
        losses.append((await two_ranks.train(step, groups_of(SIZES, seed=step))).metrics["loss"])
    return Original(folder, losses)


def forked(original: Original, target: Path, *, fresh: bool = False, **changes: Any) -> Path:
    """The checkpoint with which a fork begins."""
    shelf = CheckpointShelf(target / "checkpoints")
    Forked.of("fork", original.folder, run(), run(**changes), fresh_optimizer=fresh).write(shelf)
    return shelf.folder(original.folder.name)


async def load(trainer: Any, folder: Path) -> pb.LoadCheckpointResponse:
    """Load what counts of a checkpoint, as a coordinator asks for it."""
    progress = Progress.of(folder)
    return await trainer.load(
        folder, fresh_optimizer=progress.fresh_optimizer, fresh_objective=progress.fresh_objective
    )


async def losses_from(trainer: Any, groups_of: MakeGroups, folder: Path | None, start: int) -> list[float]:
    if folder is not None:
        assert Version.from_proto((await load(trainer, folder)).policy_version) == Version(1, SAVED_AT)
    return [
        (await trainer.train(step - SAVED_AT + start, groups_of(SIZES, seed=step), lineage=1)).metrics["loss"]
        for step in range(SAVED_AT, STEPS)
    ]


async def test_a_fork_continues_the_curve(
    original: Original, trainer: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await trainer.open(lineage=1, **SPEC)
    losses = await losses_from(trainer, groups_of, forked(original, tmp_path), SAVED_AT)
    assert losses == pytest.approx(original.losses[SAVED_AT:], rel=1e-6)


async def test_a_fork_with_a_fresh_optimizer_has_the_weights_alone(
    original: Original, two_ranks: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    constant = SPEC | {"schedule": "constant"}
    await two_ranks.open(lineage=1, **constant)
    folder = forked(original, tmp_path, fresh=True)
    losses = await losses_from(two_ranks, groups_of, folder, SAVED_AT)
    await two_ranks.open(lineage=1, initial_weights=str(original.folder / "model"), **constant)
    anew = await losses_from(two_ranks, groups_of, None, 0)
    assert losses == pytest.approx(anew, rel=1e-6)
    await two_ranks.open(lineage=1, **constant)
    kept = await losses_from(two_ranks, groups_of, forked(original, tmp_path / "kept"), SAVED_AT)
    assert losses[0] == pytest.approx(kept[0], rel=1e-6)
    assert abs(losses[2] - kept[2]) > 1e-4


async def test_a_fork_takes_no_room_and_leaves_the_original_as_it_was(
    original: Original, tmp_path: Path
) -> None:
    before = Manifest.verified(original.folder)
    folder = forked(original, tmp_path, fresh=True)
    copied = Manifest.verified(folder)
    assert Manifest.verified(original.folder) == before
    assert {name for name in before.files if copied.files[name] != before.files[name]} == {"coordinator.json"}
    shared = [name for name in before.files if (folder / name).samefile(original.folder / name)]
    assert len(shared) == len(before.files) - 1
    assert Progress.of(folder) == Progress(
        "fork", SAVED_AT, Version(0, SAVED_AT), CURSOR, fresh_optimizer=True
    )


async def test_another_objective_starts_with_what_it_has_not_adapted(
    original: Original, two_ranks: Any, groups_of: MakeGroups, policy_of: Any, tmp_path: Path
) -> None:
    """A policy's coefficient is not in a checkpoint of supervised learning, nor in a fork of its fork."""
    await two_ranks.open("sft", **SPEC)
    state = Progress("run", 0, Version(0, 0), None).to_bytes()
    saved = tmp_path / "taught" / CheckpointShelf.name_of(0)
    await two_ranks.save(saved, Version(0, 0), coordinator_state=state)
    taught = run(algorithm={"type": "sft"}, rewards=[])
    shelf = CheckpointShelf(tmp_path / "fork")
    made = Forked.of("fork", saved, taught, run(), fresh_optimizer=False)
    assert made.progress.fresh_objective and made.fresh_data
    made.write(shelf)
    of_fork = CheckpointShelf(tmp_path / "fork of the fork")
    Forked.of("third", shelf.folder(saved.name), run(), run(), fresh_optimizer=False).write(of_fork)
    for own in (shelf, of_fork):
        await two_ranks.open(policy_of(), lineage=1, **SPEC)
        await load(two_ranks, own.folder(saved.name))
        assert (await two_ranks.train(0, groups_of(SIZES), lineage=1)).metrics["loss"]


async def test_other_rewards_are_not_normalised_by_those_of_the_run_that_is_forked(
    original: Original, tmp_path: Path
) -> None:
    weighed = {"rewards": [{"reward": "exact", "weight": 10}]}
    played = {"rewards": [], "environment": {"name": "calculator"}}
    for place, changes in enumerate((weighed, played)):
        assert Progress.of(forked(original, tmp_path / str(place), **changes)).fresh_objective
    assert not Progress.of(forked(original, tmp_path / "same", steps=9)).fresh_objective


async def test_a_fork_says_how_many_prompts_were_drawn_for_later_steps(original: Original) -> None:
    for staleness, said in (
        (0, "goes on where it was"),
        (2, "behind up to 8 prompts that were drawn for later"),
    ):
        before = run(rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_staleness": staleness})
        made = Forked.of("fork", original.folder, before, before, fresh_optimizer=False)
        assert said in made.described and bool(made.passed_over) == bool(staleness)


async def test_a_fork_of_a_fork_begins_anew_what_the_fork_began_anew(
    original: Original, tmp_path: Path
) -> None:
    fork = forked(original, tmp_path / "fork", fresh=True, algorithm={"type": "rloo"})
    rloo = run(algorithm={"type": "rloo"})
    shelf = CheckpointShelf(tmp_path / "third")
    made = Forked.of("third", fork, rloo, rloo, fresh_optimizer=False)
    assert "begins without moments" in made.described
    made.write(shelf)
    begun = Progress.of(shelf.folder(fork.name))
    assert begun.fresh_optimizer and begun.fresh_objective


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 2}, "steps is 2, and 2 steps are done at the checkpoint"),
        ({"lora": {"rank": 4}}, "lora is another one"),
        ({"initial_weights": "/other"}, "initial_weights is another one"),
        ({"algorithm": {"type": "reward_model"}, "rewards": []}, "have different heads"),
        ({"algorithm": {"type": "ppo", "critic": {}}}, "has a critic, and the checkpoint has none"),
    ],
)
async def test_a_fork_that_cannot_continue_is_refused(
    original: Original, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        forked(original, tmp_path, **changes)
    assert not any(tmp_path.iterdir())


async def test_a_level_that_goes_by_rewards_is_not_begun_again_in_silence(
    original: Original, tmp_path: Path
) -> None:
    before = run(
        data={"train": "reasoning_gym:countdown?levels=0-4", "curriculum": {"reward": 0.8, "prompts": 64}}
    )

    def taken_from(after: RunConfig) -> Forked:
        return Forked.of("fork", original.folder, before, after, fresh_optimizer=False)

    with pytest.raises(InvalidConfig, match="the level of the data that the run has reached is unknown"):
        taken_from(before)
    by_steps = before.data.model_copy(update={"curriculum": CurriculumConfig(every_steps=50)})
    for after in (before.model_copy(update={"seed": 1}), before.model_copy(update={"data": by_steps})):
        assert taken_from(after).fresh_data


async def test_other_data_or_another_seed_begins_at_the_start_of_the_data(
    original: Original, tmp_path: Path
) -> None:
    for place, changes in enumerate(({"seed": 1}, {"data": {"train": "/y.jsonl"}})):
        assert Progress.of(forked(original, tmp_path / str(place), **changes)).cursor is None
    kept = forked(original, tmp_path / "kept", optimizer={"learning_rate": 1e-5})
    assert Progress.of(kept).cursor == CURSOR
