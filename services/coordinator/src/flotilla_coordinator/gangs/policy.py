"""The policy's session: what only a model that generators serve is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.batch_scores import batch_logprobs
from flotilla_coordinator.gangs.gang_session import SESSION_TIMEOUT_S
from flotilla_coordinator.gangs.group_messages import fill
from flotilla_coordinator.gangs.learning_session import TRAIN_TIMEOUT_S, LearningSession
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup
from flotilla_core import ids, rpc
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version


class PolicyTrainer(LearningSession):
    """The model that the run is about."""

    async def logprobs(
        self, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float
    ) -> tuple[Version, list[np.ndarray]]:
        """Log-probabilities of (prompt, response) pairs under the current policy."""
        request = pb.ComputeLogprobsRequest(run_id=self._run_id, temperature=temperature)
        for index, (prompt, response) in enumerate(sequences):
            request.sequences.add(
                sequence_id=str(index), prompt_token_ids=to_tensor(prompt), token_ids=to_tensor(response)
            )
        reply = await rpc.unary(self.stub.ComputeLogprobs, request, timeout_s=SESSION_TIMEOUT_S)
        by_id = {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}
        return Version.from_proto(reply.policy_version), [by_id[str(i)] for i in range(len(sequences))]

    async def score_by_start(self, batch: Batch, temperature: float) -> None:
        """Give every sample of the batch what the copy of the first policy says of each of its tokens."""
        found = await batch_logprobs(self.stub, self._run_id, batch, temperature, of_start=True)
        for sample in batch.samples:
            sample.reference_logprobs = found[sample.sample_id]

    async def evaluate_loss(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """What the objective says of groups that do not train."""
        request = pb.EvaluateLossRequest(run_id=self._run_id)
        for group in groups:
            fill(request.groups.add(), group)
        reply = await rpc.unary(self.stub.EvaluateLoss, request, timeout_s=TRAIN_TIMEOUT_S)
        return dict(reply.metrics)

    async def export(self, path: Path) -> None:
        """Write the current policy as a Hugging Face folder."""
        await rpc.unary(
            self.stub.ExportModel,
            pb.ExportModelRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                path=str(path),
                policy_version=self.version.to_proto(),
            ),
            timeout_s=SESSION_TIMEOUT_S,
        )
