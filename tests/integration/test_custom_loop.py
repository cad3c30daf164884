"""A training loop of a user's own, through the Python client, on a fleet whose trainer is real."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accounts import assert_accounted_for

from flotilla_client import SyncClient
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.errors import Cancelled, FailedPrecondition, FlotillaError, InvalidRequest, NotFinite
from flotilla_core.version import Version
from flotilla_testing.runs import LEARNS, MADE_UP, QUICK, any_reward, example_rows, run_on, written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/custom_loop/grpo.py"


@pytest.fixture
def client(gangs: Stack) -> Iterator[SyncClient]:
    with gangs.client() as connected:
        yield connected


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    sections = {
        "rewards": any_reward(tmp_path),
        "optimizer": LEARNS,
        "evaluation": {"data": str(arithmetic / "data" / "heldout.jsonl"), "max_prompts": 8},
        "algorithm": MADE_UP,
    }
    run = run_on(example_rows(arithmetic), "own", 3, **sections, **QUICK)
    del run["rollout"]["prompts_per_step"]  # the loop itself says how many it wants
    return written(tmp_path, run)


def ended(gangs: Stack, run_id: str) -> dict[str, Any]:
    outcome = gangs.flotilla("run", "watch", run_id)
    assert outcome.out or outcome.err
    return gangs.ok("run", "show", run_id)


def test_the_example_trains_and_leaves_what_a_run_leaves(gangs: Stack, run_file: Path) -> None:
    sizes = ["--steps", "3", "--prompts", "4", "--samples", "4", "--config", str(run_file)]
    where = ["--stack", gangs.directory.name, "--state-dir", str(gangs.directory.parent)]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *where, *sizes],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:3]] == ["1", "2", "3"]
    run = ended(gangs, "latest")
    assert run["state"] == "succeeded" and run["step"] == 3 and run["policy_version"] == "0.3"
    directory = Path(run["directory"])
    assert (directory / "model" / "model.safetensors").is_file()
    assert (directory / "checkpoints" / "step-000003").is_dir()
    lines = gangs.metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["grad_norm"] > 0 and line["reward/std"] > 0 for line in lines)
    verdict = assert_accounted_for(gangs, run["run_id"])
    assert verdict.trained == verdict.admitted == 3 * 4 * 4
    assert len(list(RunDirectory(directory).read_samples())) == 3 * 4 * 4


def test_the_primitives_act_once_and_say_what_is_wrong(
    client: SyncClient, gangs: Stack, run_file: Path
) -> None:
    with client.open_loop(run_file) as loop:
        run_id = loop.run_id
        assert loop.version == Version(0, 0)
        [group] = loop.sample(["12+34="], 3, temperature=0.5, max_response_tokens=4)
        assert len(group.samples) == 3 and all(len(sample.token_ids) <= 4 for sample in group.samples)
        [before] = loop.logprobs([group])
        with pytest.raises(FailedPrecondition, match="no gradients"):
            loop.optim_step()
        with pytest.raises(InvalidRequest, match="nonsense"):
            loop.forward_backward([group], "nonsense")
        group.samples[0].reward = float("nan")
        with pytest.raises(NotFinite, match="reward is nan"):
            loop.forward_backward([group])
        for sample in group.samples:
            sample.reward, sample.advantages = 1.0, 1.0
        metrics = loop.forward_backward([group], {"type": "sft"})
        assert metrics["loss"] == pytest.approx(-float(np.concatenate(before).mean()), rel=1e-4)
        step = loop.optim_step(1e-3)
        assert (step.version, step.metrics["learning_rate"], step.skipped) == (Version(0, 1), 1e-3, "")
        [after] = loop.logprobs([group])
        assert np.concatenate(after).mean() > np.concatenate(before).mean()

        [stale] = loop.sample(loop.prompts(1), 1)
        assert Version.from_proto(stale.samples[0].version_spans[0].version) == Version(0, 0)
        assert loop.sync() == Version(0, 1)
        [fresh] = loop.sample(loop.prompts(1), 1)
        assert Version.from_proto(fresh.samples[0].version_spans[0].version) == Version(0, 1)
        evaluated = loop.evaluate()
        assert evaluated.version == Version(0, 1) and list(evaluated.sets) == ["heldout"]
        assert evaluated.first.prompts == 8 and 0 <= evaluated.first.accuracy <= 1
        assert evaluated.first.reward_mean > 0 and evaluated.first.reward_stderr > 0
        # The same samples again: trained again, recorded once. An older version's: as stale as the client likes.
        loop.forward_backward([group])
        loop.forward_backward([stale])
        assert loop.optim_step().version == Version(0, 2)
        assert client.attach_loop(run_id).version == Version(0, 2)
        with pytest.raises(FailedPrecondition, match="is using the trainer"):
            client.start_run(run_file)
    assert gangs.ok("run", "show", run_id)["state"] == "succeeded", "who closes a loop waits for its end"
    assert_accounted_for(gangs, run_id)
    with pytest.raises(FailedPrecondition, match="takes no calls"):
        loop.prompts(1)


def test_a_loop_that_fails_or_is_stopped_frees_the_trainer(
    client: SyncClient, gangs: Stack, run_file: Path
) -> None:
    with pytest.raises(ZeroDivisionError), client.open_loop(run_file) as loop:
        raise ZeroDivisionError
    run = ended(gangs, loop.run_id)
    assert run["state"] == "stopped" and "ZeroDivisionError" in run["reason"]

    loop = client.open_loop(run_file)
    loop.forward_backward(loop.sample(loop.prompts(2), 2))
    client.stop_run(loop.run_id)
    assert ended(gangs, loop.run_id)["state"] == "stopped"
    with pytest.raises((Cancelled, FailedPrecondition)):
        loop.optim_step()


def test_the_loss_of_the_trainer_ends_the_loop_which_goes_on_from_its_checkpoint(
    client: SyncClient, gangs: Stack, run_file: Path
) -> None:
    loop = client.open_loop(run_file)
    loop.forward_backward(loop.sample(loop.prompts(2), 2))
    loop.optim_step()
    loop.save()
    gangs.process("trainer").kill()
    with pytest.raises(FlotillaError):
        loop.forward_backward(loop.sample(loop.prompts(2), 2))
    assert ended(gangs, loop.run_id)["state"] == "failed"
    client.resume_run(loop.run_id)
    with client.attach_loop(loop.run_id) as again:
        assert again.version == Version(1, 1) and again.steps_done == 1
        again.sync()
        again.forward_backward(again.sample(again.prompts(2), 2))
        assert again.optim_step().version == Version(1, 2)
    assert ended(gangs, loop.run_id)["state"] == "succeeded"
    assert_accounted_for(gangs, loop.run_id)
