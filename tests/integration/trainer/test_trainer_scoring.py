"""A gang that only scores, on real ranks; a teacher is a reference by another name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FailedPrecondition, InvalidRequest, Mismatch
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_testing.plain_torch import logprobs, plain_model
from flotilla_testing.session_specs import as_struct

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TOLERANCE = 1e-5
SIZES = [3, 1, 4]
TEMPERATURE = 0.7
BATCHING = as_struct({"tokens_per_microbatch": 48, "logprob_chunk_tokens": 7})
Groups = list[pb.TrainGroup]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(start_trainer: Callable[..., Any]) -> AsyncIterator[Any]:
    async with start_trainer(name="reference", nproc=1) as started:
        yield started


async def opened(gang: Any, **spec: Any) -> str:
    """A session of a new run, in place of the last one."""
    await gang.call("CloseSession", pb.CloseSessionRequest(run_id=gang.run_id))
    gang.runs += 1
    asked = session_pb2.SessionSpec(**({"role": session_pb2.ROLE_REFERENCE, "batching": BATCHING} | spec))
    reply = await gang.call("OpenSession", pb.OpenSessionRequest(run_id=gang.run_id, spec=asked, lineage=3))
    assert Version.from_proto(reply.policy_version) == Version(3, 0)
    return gang.run_id


async def logprobs_of(gang: Any, groups: Groups, **request: Any) -> dict[str, np.ndarray]:
    reply = await gang.logprobs(groups, temperature=TEMPERATURE, **request)
    assert Version.from_proto(reply.policy_version) == Version(3, 0)
    return {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}


def plainly(folder: Path, groups: Groups) -> dict[str, np.ndarray]:
    model = plain_model(folder)
    with torch.no_grad():
        return {
            sample.sample_id: logprobs(
                model, from_tensor(group.prompt_token_ids), from_tensor(sample.token_ids), TEMPERATURE
            ).numpy()
            for group in groups
            for sample in group.samples
        }


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for sequence_id, expected in other.items():
        np.testing.assert_allclose(one[sequence_id], expected, atol=TOLERANCE)


async def test_a_frozen_gang_scores_with_the_weights_that_its_run_names(
    reference: Any, groups_of: Callable[..., Groups], model_maker: Callable[..., Path], tmp_path: Path
) -> None:
    groups = groups_of(SIZES)
    await opened(reference)
    first = plainly(reference.model, groups)
    assert_same(await logprobs_of(reference, groups), first)
    assert_same(await logprobs_of(reference, groups, reference=True), first)
    assert_same(await logprobs_of(reference, groups, in_float32=True), first)

    folder = model_maker(tmp_path / "another", seed=9)
    await opened(reference, initial_weights=str(folder))
    other = plainly(folder, groups)
    assert max(np.abs(other[name] - first[name]).max() for name in first) > 0.1
    assert_same(await logprobs_of(reference, groups), other)
    await opened(reference)
    assert_same(await logprobs_of(reference, groups), first)


async def test_a_frozen_gang_refuses_to_learn_and_scores_on(
    reference: Any, groups_of: Callable[..., Groups], tmp_path: Path
) -> None:
    groups, run_id = groups_of(SIZES), await opened(reference)
    version = Version(3, 0).to_proto()
    with pytest.raises(FailedPrecondition, match="the reference does not learn"):
        await reference.train(0, groups, lineage=3)
    for method, request in {
        "ForwardBackward": pb.ForwardBackwardRequest(run_id=run_id, groups=groups),
        "OptimStep": pb.OptimStepRequest(run_id=run_id),
        "EvaluateLoss": pb.EvaluateLossRequest(run_id=run_id, groups=groups),
        "OpenWeightGroup": pb.OpenWeightGroupRequest(run_id=run_id),
        "LoadCheckpoint": pb.LoadCheckpointRequest(run_id=run_id, path=str(tmp_path)),
        "ExportModel": pb.ExportModelRequest(run_id=run_id, path=str(tmp_path / "x"), policy_version=version),
    }.items():
        with pytest.raises(FailedPrecondition, match="the reference does not learn"):
            await reference.call(method, request)
    with pytest.raises(FailedPrecondition, match="a reference has no values"):
        await reference.call("ComputeValues", pb.ComputeValuesRequest(run_id=run_id))
    assert_same(await logprobs_of(reference, groups), plainly(reference.model, groups))


async def test_a_session_of_another_role_or_with_something_to_learn_does_not_open(
    reference: Any, model_maker: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(FailedPrecondition, match="this gang is the reference's, the session is for teacher"):
        await opened(reference, role=session_pb2.ROLE_TEACHER)
    with pytest.raises(InvalidRequest, match="a reference does not learn"):
        await opened(reference, optimizer=as_struct({"learning_rate": 1e-3}))
    with pytest.raises(Mismatch, match="hidden_size"):
        await opened(reference, initial_weights=str(model_maker(tmp_path / "wide", seed=1, hidden_size=64)))
    await opened(reference)
