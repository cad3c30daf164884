"""Wrong weights that are caught, and sound ones that are not refused, with a real model in one engine.

The engine of a generator takes versions of a model as in any sync, and the coordinator's own canary judges what it
samples: the trainer's model scores the tokens beside it, in its own type and in float32. First the model learns until a
stale part of it moves probabilities by 0.02 on the mean: a stale head, or half the rows of every matrix, as if one rank
had sent nothing. Each fault is put into live memory after the digests of the sync agreed, and each trial has prompts
and seeds of its own. Prints one JSON object a line and appends it to `figures.jsonl`:

- `age`: how far a fault of so many updates moves probabilities, without what rounding does;
- `sound`: checks of right weights that were refused or warned of; any refusal is an error;
- `trials`: wrong weights that the canary caught, or the check of live memory for one matrix scaled by 1.01;
- `scale`: what the canary sees of one scaled matrix.

`python bench/gpu/caught.py --model FOLDER --out DIR`; `--dtype float32` is for CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from agreement import Answer, Report, TrainerEnd, chat_prompts, distance, engine_for, sampled  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from wrong_weights import WrongWorker, matrix_layers  # noqa: E402

from flotilla.common.v1 import weights_pb2  # noqa: E402
from flotilla_coordinator.weights.canary import Canary, CanaryAnswer  # noqa: E402
from flotilla_core.agreement import DECIDING_TOKENS, SECOND_LOOK  # noqa: E402
from flotilla_core.config import CanaryConfig, StackConfig  # noqa: E402
from flotilla_core.errors import WeightsMismatch  # noqa: E402
from flotilla_core.version import Version  # noqa: E402
from flotilla_generator.engine.base import KvPolicy  # noqa: E402
from flotilla_generator.engine.vllm.engine import VllmEngine  # noqa: E402
from flotilla_generator.weights import WeightSession  # noqa: E402
from flotilla_testing.credentials import hand_ours_down  # noqa: E402
from flotilla_weights.group import Sender  # noqa: E402
from flotilla_weights.manifest import Manifest  # noqa: E402

RUN, EPOCH, TIMEOUT_S, BUCKET_BYTES = "caught", 1, 120.0, 64 << 20
MEMBER = "generator-0"
MOVED = 0.02
MOST_UPDATES = 256
SCALES = (1.02, 1.05, 1.1, 1.2, 1.5)
AT_ONCE = 10
Weights = dict[str, torch.Tensor]


class Check(NamedTuple):
    """What the canary found in one check."""

    refused: bool
    difference: float
    warn_at: float | None
    fail_at: float | None


class CaughtWorker(WrongWorker):
    """A worker one of whose matrices can be scaled by any factor, and whose head can be tied again."""

    def flotilla_tie(self) -> dict[str, Any]:
        """Give a head that shares the embeddings' memory, and got its own for a fault, the shared one again."""

        def tie(weights: Any) -> None:
            model = weights._worker.model_runner.get_model()
            tied = getattr(model.config, "tie_word_embeddings", False)
            if tied and "cpu_linear" not in vars(model.lm_head):
                model.lm_head.weight = model.model.embed_tokens.weight

        return self._flotilla_guarded(tie)

    def flotilla_scale(self, factor: float) -> dict[str, Any]:
        """Scale one matrix in the middle of the model; on CPUs, where it is packed, its products."""

        def scale(weights: Any) -> None:
            layers = weights._worker.model_runner.get_model().model.layers
            _, layer = matrix_layers(layers[len(layers) // 2])[-1]
            kernel = vars(layer).get("cpu_linear")
            if kernel is None:
                layer.weight.data.mul_(factor)
            else:
                layer.cpu_linear = lambda x, weight, bias: factor * kernel(x, weight, bias)

        return self._flotilla_guarded(scale)


class Learner:
    """The float32 weights of the model, and updates of them by the answers that it sampled."""

    def __init__(self, model: Path, dtype: torch.dtype, learning_rate: float) -> None:
        self._dtype = dtype
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.updates = 0

    def learn(self, answers: Sequence[Answer]) -> None:
        """Make one update that makes every second answer likelier and the others less likely."""
        for answer, sign in zip(answers, np.resize([1.0, -1.0], len(answers)), strict=True):
            row = np.concatenate([answer.prompt, answer.token_ids]).astype(np.int64)
            tokens = torch.from_numpy(row)[None].to(self._device)
            logits = self._model(input_ids=tokens, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
            scores = logits.float().log_softmax(-1).gather(-1, tokens[0, len(answer.prompt) :, None])
            (-float(sign) * scores.mean() / len(answers)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1

    def weights(self) -> Weights:
        """Return the weights as they are published."""
        return {n: p.detach().to(self._dtype).cpu().clone() for n, p in self._model.named_parameters()}


class Scorer:
    """The trainer's end, under the name that a canary knows it by."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._wide = TrainerEnd(model, "float32")
        self._own = self._wide if dtype == "float32" else TrainerEnd(model, dtype)

    def hold(self, weights: Weights) -> None:
        """Take a version of the weights."""
        with torch.no_grad():
            for end in {self._wide, self._own}:
                for name, parameter in end.policy.causal_lm.named_parameters():
                    parameter.copy_(weights[name])

    async def logprobs(
        self, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float, *, in_float32: bool = False
    ) -> tuple[Version, list[np.ndarray]]:
        """Score (prompt, response) pairs."""
        answers = [Answer(prompt, tokens, np.empty(0)) for prompt, tokens in sequences]
        end = self._wide if in_float32 else self._own
        return Version(0, 0), end.logprobs(answers, temperature)


class Syncs:
    """Syncs of one engine with one sender."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._session = WeightSession(engine)
        self._sender: Sender | None = None
        self._step = 0

    @property
    def version(self) -> Version:
        """The version that was committed last."""
        return Version(0, self._step)

    async def sync(self, weights: Weights) -> None:
        """Send, commit, and compare live memory."""
        if self._sender is None:
            await self._join(weights)
        sender = self._sender
        assert sender is not None
        await self.ask("flotilla_tie")
        self._step += 1
        named = [(spec.name, weights[spec.name]) for spec in self._manifest.tensors]
        digests, _ = await asyncio.gather(
            asyncio.to_thread(sender.publish, self._manifest, named),
            self._session.stage(RUN, EPOCH, self.version),
        )
        expected = weights_pb2.WeightDigests(
            version=self.version.to_proto(), manifest_digest=self._manifest.digest, tensor_digests=digests
        )
        await self._session.commit(RUN, EPOCH, self.version, KvPolicy.RECOMPUTE, expected)
        await self._session.verify(RUN, self.version)

    async def is_found(self) -> bool:
        """Return whether the check of live memory finds that it changed."""
        try:
            await self._session.verify(RUN, self.version)
        except WeightsMismatch:
            return True
        return False

    async def ask(self, method: str, *given: Any) -> None:
        """Ask the worker for a fault, or to remember what is live."""
        (answer,) = await self._engine.workers.ask(method, *given)
        assert not answer["error"], answer

    async def _join(self, weights: Weights) -> None:
        specs = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
        self._manifest = Manifest.from_named(specs, BUCKET_BYTES)
        sender = self._sender = Sender.listen("127.0.0.1", EPOCH, 2, "gloo", TIMEOUT_S)
        group = weights_pb2.WeightGroup(
            epoch=EPOCH,
            backend=weights_pb2.WEIGHT_BACKEND_GLOO,
            host="127.0.0.1",
            port=sender.port,
            secret=sender.secret,
            world_size=2,
            sender_ranks=[0],
        )
        group.timeout.FromSeconds(int(TIMEOUT_S))
        await asyncio.gather(
            asyncio.to_thread(sender.connect, self._manifest),
            self._session.join(RUN, group, 1, self._manifest),
        )


class Trials:
    """Checks of what the engine samples now, each with prompts and seeds of its own."""

    def __init__(self, asked: argparse.Namespace, engine: VllmEngine, report: Report) -> None:
        self.asked = asked
        self.engine = engine
        self.report = report
        self.syncs = Syncs(engine)
        self.scorer = Scorer(asked.model, asked.dtype)
        config = CanaryConfig()
        self.tokens, self._each = config.tokens, config.prompts
        stack = StackConfig.model_validate({e: {"dtype": asked.dtype} for e in ("trainer", "generator")})
        self._prompts = chat_prompts(asked.model, 16 * config.prompts)
        scorer: Any = self.scorer
        self._canary = Canary(RUN, config, stack, scorer, [], TIMEOUT_S)
        self._seed = 0

    async def answers(self) -> list[Answer]:
        """Let the engine answer the next prompts."""
        self._seed += 1
        first = self._seed * self._each
        prompts = [self._prompts[(first + index) % len(self._prompts)] for index in range(self._each)]
        return await sampled(self.engine, prompts, self.tokens, seed=self._seed)

    async def moved(self, rounds: int = 2) -> float:
        """Return the mean difference between what decodes and float32 by the right weights."""
        drawn = await asyncio.gather(*(self.answers() for _ in range(rounds)))
        answers = [answer for part in drawn for answer in part]
        sequences = [(answer.prompt, answer.token_ids) for answer in answers]
        _, truth = await self.scorer.logprobs(sequences, 1.0, in_float32=True)
        return float(distance([answer.logprobs for answer in answers], truth).mean())

    async def checks(self, count: int) -> list[Check]:
        """Make so many checks; the engine samples for several at once."""
        made: list[Check] = []
        for first in range(0, count, AT_ONCE):
            drawing = (self.answers() for _ in range(min(AT_ONCE, count - first)))
            for answers in await asyncio.gather(*drawing):
                made.append(await self.check(answers))
        return made

    async def check(self, answers: list[Answer]) -> Check:
        """Let the canary judge these answers, and look again as it does in a run."""
        given = [CanaryAnswer(MEMBER, a.prompt, a.token_ids, a.logprobs) for a in answers]
        found = await self._canary.judge(self.syncs.version, 1.0, given)
        if found.above:
            for drawn in await asyncio.gather(*(self.answers() for _ in range(1, SECOND_LOOK))):
                given += [CanaryAnswer(MEMBER, a.prompt, a.token_ids, a.logprobs) for a in drawn]
            found = await self._canary.judge(self.syncs.version, 1.0, given, of_tokens=DECIDING_TOKENS)
        return Check(bool(found.above), float(found.probs[MEMBER].mean()), *found.limits)

    async def counted(self, figure: str, count: int, **facts: Any) -> int:
        """Make so many checks; report them and return how many were refused."""
        started, checks = time.monotonic(), await self.checks(count)
        refused = sum(one.refused for one in checks)
        differences = [one.difference for one in checks]
        limits = [one.fail_at for one in checks if one.fail_at is not None]
        self.report.add(
            figure=figure,
            **facts,
            dtype=self.asked.dtype,
            checks=count,
            refused=refused,
            warned=sum(one.warn_at is not None and one.difference > one.warn_at for one in checks),
            difference_mean=round(float(np.mean(differences)), 5),
            difference_range=[round(min(differences), 5), round(max(differences), 5)],
            limit_range=[round(min(limits), 5), round(max(limits), 5)],
            seconds=round(time.monotonic() - started, 1),
        )
        return refused

    async def wrong(self, weights: Weights, fault: str) -> None:
        """Sync, then put a fault into live memory."""
        self.scorer.hold(weights)
        await self.syncs.sync(weights)
        await self.syncs.ask("flotilla_make_wrong", fault)

    async def aged(self, learner: Learner) -> dict[str, Weights]:
        """Learn until each stale part moves probabilities far enough; return the weights by fault."""
        first = learner.weights()
        self.scorer.hold(first)
        await self.syncs.sync(first)
        await self.syncs.ask("flotilla_remember")
        rounding = await self.moved()
        batch = await self.answers()
        old_enough: dict[str, Weights] = {}
        until = 1
        while len(old_enough) < 2 and until <= MOST_UPDATES:
            while learner.updates < until:
                learner.learn(batch)
            weights = learner.weights()
            for fault in ("stale_head", "stale_shard"):
                if fault in old_enough:
                    continue
                await self.wrong(weights, fault)
                moved = math.sqrt(max(0.0, (await self.moved()) ** 2 - rounding**2))
                self.report.add(figure="age", fault=fault, updates=until, moved=round(moved, 4))
                if moved >= MOVED:
                    old_enough[fault] = weights
            until *= 2
        return old_enough


async def measure(asked: argparse.Namespace, engine: VllmEngine, report: Report) -> bool:
    """Return whether every wrong model was caught and no sound one refused."""
    trials = Trials(asked, engine, report)
    learner = Learner(asked.model, getattr(torch, asked.dtype), asked.learning_rate)
    old_enough = await trials.aged(learner)
    weights = learner.weights()
    trials.scorer.hold(weights)
    await trials.syncs.sync(weights)
    sound = await trials.counted("sound", asked.sound) == 0
    caught = len(old_enough) == 2
    for fault, stale in {"swapped_layers": weights, **old_enough}.items():
        await trials.wrong(stale, fault)
        caught &= await trials.counted("trials", asked.trials, fault=fault) == asked.trials
    if torch.cuda.is_available():
        found = 0
        for _ in range(asked.trials):
            await trials.wrong(weights, "scaled")
            found += await trials.syncs.is_found()
        report.add(figure="trials", fault="scaled", by="live memory", checks=asked.trials, refused=found)
        caught &= found == asked.trials
    for factor in SCALES:
        trials.scorer.hold(weights)
        await trials.syncs.sync(weights)
        await trials.syncs.ask("flotilla_scale", factor)
        (seen,) = await trials.checks(1)
        report.add(figure="scale", factor=factor, **seen._asdict())
    return sound and caught


async def run(asked: argparse.Namespace) -> bool:
    """Boot, measure within the limit of time, stop."""
    engine = engine_for(asked.model, asked.dtype, extension="caught.CaughtWorker", eager=asked.eager)
    await engine.start()
    try:
        async with asyncio.timeout(asked.limit_s):
            return await measure(asked, engine, Report(asked.out))
    finally:
        await engine.stop()


def main() -> int:
    """Measure, and fail where anything was missed or refused."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", type=Path, required=True)
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    cli.add_argument("--trials", type=int, default=20)
    cli.add_argument("--sound", type=int, default=100)
    cli.add_argument("--learning-rate", type=float, default=2e-5)
    cli.add_argument("--eager", action="store_true", help="decode without graphs")
    cli.add_argument("--limit-s", type=float, default=600.0)
    asked = cli.parse_args()
    if asyncio.run(run(asked)):
        return 0
    print("wrong weights were missed, or right ones refused", file=sys.stderr)
    return 1


if __name__ == "__main__":
    hand_ours_down()
    raise SystemExit(main())
