"""An update on recorded samples is the update that was made on them when they were drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.data.recorded import load_recorded
from flotilla_coordinator.ledger.records import Branch, Episode, TokenSpan
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample, recorded_group
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import DataConfig
from flotilla_core.version import Version
from flotilla_testing.tiny_qwen3 import VOCABULARY

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
TEMPERATURE = 0.7
EXACT = 1e-6


def drawn(groups: int, samples: int) -> Batch:
    """A batch of the version that is trained: single responses, one that was cut, and episodes with two histories."""
    rng = np.random.default_rng(5)

    def ids(tokens: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, tokens).astype(np.int32)

    def sample(group: int, place: int) -> RolloutSample:
        tokens = int(rng.integers(6, 20))
        made = RolloutSample(
            sample_id=f"run/0/{group}/{place}",
            token_ids=ids(tokens),
            logprobs=rng.normal(-3.0, 0.7, tokens).astype(np.float32),
            text="",
            spans=(TokenSpan(Version(0, 0), 0, tokens),),
            truncated=place == 1,
            reward=float(rng.normal()),
            generator="generator-0",
        )
        if group == 0:
            branches = (Branch(0, ids(4)), Branch(tokens // 2, ids(6)))
            made.trained = np.arange(tokens) % 3 != 0
            made.episode = Episode("completed", 2, (), "[]", branches)
        return made

    made = [
        RolloutGroup(f"run/0/{group}", "", ids(5), [sample(group, place) for place in range(samples)])
        for group in range(groups)
    ]
    return Batch(0, made, {})


def recorded(batch: Batch, folder: Path) -> list[RolloutGroup]:
    """The batch as a later run reads it."""
    RolloutRecord(folder, "run", TEMPERATURE, "digest").write(batch, Version(0, 0))
    config = DataConfig(train=folder, recorded=True)
    tokenizer: Any = SimpleNamespace(digest="digest", vocabulary_size=1 << 20)
    asked = {"temperature": TEMPERATURE, "least_samples": 2, "greedy": False}
    file = load_recorded(folder, config, tokenizer, None, **asked)
    return [recorded_group("later", prompt) for prompt in file.prompts]


def messages(groups: list[RolloutGroup]) -> list[pb.TrainGroup]:
    filled = [pb.TrainGroup() for _ in groups]
    for message, group in zip(filled, groups, strict=True):
        fill(message, group)
    return filled


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"correction": {"proximal": "trainer", "importance": "token"}}],
    ids=["the ratio to the sampler", "importance weights"],
)
async def test_training_recorded_samples_equals_training_them_when_they_were_drawn(
    trainer: Any, policy_of: Any, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    batch = drawn(groups=4, samples=3)
    weights, metrics = [], []
    for name, groups in (("online", batch.groups), ("recorded", recorded(batch, tmp_path / "rollouts"))):
        await trainer.open(policy_of(**algorithm), steps_per_update=2)
        metrics.append(dict((await trainer.train(0, messages(groups))).metrics))
        folder = await trainer.export(tmp_path / name, 1, "float32")
        weights.append(load_file(folder / "model.safetensors"))
    online, later = weights
    start = load_file(trainer.model / "model.safetensors")
    assert online.keys() == later.keys()
    for name in online:
        np.testing.assert_allclose(later[name], online[name], rtol=0, atol=EXACT, err_msg=name)
    assert any(np.abs(online[name] - start[name]).max() > 100 * EXACT for name in online)
    # Versions of another run say nothing: no token counts as one that the trained policy wrote itself.
    assert metrics[0]["tokens/fresh_share"] == 1 and metrics[1]["tokens/fresh_share"] == 0
    for measured in ("loss", "grad_norm", "rollout_kl", "probs_diff/mean"):
        assert metrics[1][measured] == pytest.approx(metrics[0][measured], rel=1e-6)
