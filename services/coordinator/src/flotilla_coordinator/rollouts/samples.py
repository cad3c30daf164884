"""A finished sample: from the wire to the loop, and from the loop to the ledger."""

from __future__ import annotations

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.ledger.records import ScoredSample, TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import Generated
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version


def rollout_sample(generated: Generated, tokenizer: Tokenizer) -> RolloutSample:
    """The sample that a generator delivered, still without a reward."""
    sample = generated.sample
    token_ids = from_tensor(sample.token_ids)
    return RolloutSample(
        sample_id=sample.sample_id,
        token_ids=token_ids,
        logprobs=from_tensor(sample.logprobs),
        text=tokenizer.decode(token_ids.tolist()),
        spans=tuple(
            TokenSpan(Version.from_proto(span.version), span.start, span.end) for span in sample.version_spans
        ),
        truncated=sample.finish_reason == gen.FINISH_REASON_LENGTH,
        generator=generated.generator,
        attempt=generated.attempt,
    )


def ledger_sample(sample: RolloutSample) -> ScoredSample:
    """What the ledger keeps of a scored sample until a checkpoint covers it: enough to train from."""
    assert sample.logprobs is not None, "rollouts always carry logprobs"
    return ScoredSample(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        generator=sample.generator,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        text=sample.text,
        spans=sample.spans,
        truncated=sample.truncated,
        reward=sample.reward,
        reward_terms=sample.reward_terms,
        greedy_reward=sample.greedy_reward,
    )
