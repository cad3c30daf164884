"""Two fleets: one with vLLM and a trainer of two ranks for one module, and one with all gangs for several.

All have real rewards, coordinator and NATS. A run takes a fleet for itself, so tests leave none behind. A fleet that
only waits takes a tenth of a processor, so none is up longer than a test needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_testing.credentials import hand_ours_down
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, running_stack, sim_stack

# What these tests share is found by its name, also by vLLM's workers.
sys.path.insert(0, str(Path(__file__).parent))

hand_ours_down()


@pytest.fixture(scope="session", autouse=True)
def inspected_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what vLLM finds out about a model's class, for which it starts a process, for all engines of the session."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))


@pytest.fixture(scope="module")
def stack(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The default fleet, up once for all tests of a module."""
    description = {
        "name": "integration",
        "model": str(arithmetic / "model"),
        "trainer": {"nproc": 2},
        "generator": {"replicas": 1, "kv_cache_gib": 0.25},
    }
    with running_stack(description, tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="session")
def gangs_of_all_modules(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Real gangs for every role, a trainer of two ranks among them, and an engine that makes its samples up.

    Critic and reference take turns with the policy, as on GPUs that they share.

    Every response is as long as it may be, so that "at most" in a plan is "exactly".
    """
    with sim_stack(
        arithmetic / "model",
        tmp_path_factory.mktemp("gangs"),
        trainer={"nproc": 2},
        generator={"sim": {"response_tokens": 1000}, "max_model_tokens": 64},
        critic={"replicas": 1, "placement": "colocated"},
        teachers={"math": {"replicas": 1}, "code": {"replicas": 1}},
        reference={"replicas": 1, "placement": "colocated"},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def gangs(gangs_of_all_modules: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Those of all modules, of which the last one takes them down."""
    yield gangs_of_all_modules
    *_, last = (item for item in request.session.items if "gangs" in item.fixturenames)
    if last.path == request.path:
        gangs_of_all_modules.flotilla("down")


@pytest.fixture(scope="session")
def run_file(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GRPO run on the example's data."""
    return small_run(arithmetic, tmp_path_factory.mktemp("run") / "run.yaml")
