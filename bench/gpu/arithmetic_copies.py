"""The settings of `make demo`, tried with many seeds at once: what a run of the example would learn, in seconds.

Trains copies of the example's model on one GPU, as `sft.yaml` and then `topr.yaml`, `grpo.yaml` or `ppo.yaml` say, by a
few lines of torch of its own. It takes nothing from Flotilla. A key that it does not obey is refused.

    python bench/gpu/arithmetic_copies.py MODEL DATA --try "steps=220" --try "rollout.samples_per_prompt=4"
    python bench/gpu/arithmetic_copies.py MODEL DATA --run ppo.yaml --try "data.rest_epochs=15"
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from many_qwen3 import Cache, Shape, Weights, load, logits, states
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
PAD, END, FIRST_CHARACTER = 0, 1, 3
ALPHABET = "0123456789+-="
PROMPT_PLACES = 6
ANSWER_PLACES = 5
"""One more than the longest answer and its end: what is longer is wrong."""
OBEYED = {
    "steps",
    "algorithm.type",
    "data.rest_epochs",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "algorithm.advantage.baseline",
    "algorithm.loss.negative_cap",
    "algorithm.critic.optimizer.learning_rate",
    "algorithm.critic.warmup_steps",
    "optimizer.learning_rate",
    "optimizer.warmup_updates",
    "optimizer.final_lr_ratio",
    "optimizer.steps_per_update",
    "optimizer.epochs_per_update",
    "evaluation.every_steps",
    "evaluation.max_prompts",
    "stop.accuracy_at_least",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"rest_epochs": 0},
    "optimizer": {"steps_per_update": 1, "epochs_per_update": 1, "warmup_updates": 0},
    "algorithm": {"advantage": {"baseline": "group", "lam": 1.0}, "loss": {"negative_cap": 1.0}},
}
CLIP, DAPO_CLIP_HIGH, GSPO_CLIP = 0.2, 0.28, (3e-4, 4e-4)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rows(NamedTuple):
    """Prompts, which end at the last place, and answers with their end."""

    prompts: Tensor
    answers: Tensor


class Copies:
    """One model for each seed, and its optimizer."""

    def __init__(self, weights: Weights, shape: Shape, optimizer: dict[str, Any], updates: int) -> None:
        self.weights, self.shape = weights, shape
        self._settings, self._updates = optimizer, updates
        self._first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._steps = 0

    def step(self, losses: Tensor, update: int) -> None:
        """Go down the gradient of each copy's own loss."""
        gradients = torch.autograd.grad(losses.sum(), list(self.weights.values()))
        norms = torch.stack([one.flatten(1).pow(2).sum(1) for one in gradients]).sum(0).sqrt()
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        self._steps += 1
        rate = self._rate(update)
        for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
            clipped = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
            first = self._first[name].lerp_(clipped, 0.1)
            second = self._second[name].lerp_(clipped.square(), 0.001)
            size = (second / (1 - 0.999**self._steps)).sqrt() + 1e-8
            weight.data -= rate / (1 - 0.9**self._steps) * first / size

    def values(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """What a critic expects before each token of `answers`."""
        for weight in self.weights.values():
            weight.requires_grad_(True)
        read = states(self.weights, self.shape, *_read(prompts, answers))[:, :, PROMPT_PLACES - 1 :]
        return torch.einsum("mrth,mh->mrt", read, self.weights["head"])

    def _rate(self, update: int) -> float:
        peak, last = self._settings["learning_rate"], self._settings["final_lr_ratio"]
        warm_up = self._settings["warmup_updates"]
        if update < warm_up:
            return float(peak * (update + 1) / warm_up)
        done = (update - warm_up) / (self._updates - warm_up)
        return float(peak * (last + (1 - last) * (1 - done)))

    def logprobs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Of the tokens of `answers`; the gradient of the weights goes through them."""
        for weight in self.weights.values():
            weight.requires_grad_(True)
        told = logits(self.weights, self.shape, *_read(prompts, answers))[
            :, :, PROMPT_PLACES - 1 :
        ].log_softmax(-1)
        return told.gather(-1, answers[..., None])[..., 0]

    @torch.no_grad()
    def answers(self, prompts: Tensor, *, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Answers to `prompts`, their log-probabilities, and which of their tokens count."""
        cache: Cache = {}
        counts = prompts != PAD
        next_tokens, going_on = prompts, torch.ones_like(prompts[:, :, 0], dtype=torch.bool)
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        for _ in range(ANSWER_PLACES):
            scores = logits(self.weights, self.shape, next_tokens, counts, cache)[:, :, -1]
            noise = torch.empty_like(scores).exponential_().log()
            token = (scores if greedy else scores - noise).argmax(-1)
            logprob = scores.log_softmax(-1).gather(-1, token[..., None])[..., 0]
            drawn.append((torch.where(going_on, token, PAD), logprob, going_on))
            going_on = going_on & (token != END)
            next_tokens = token[..., None]
            counts = torch.cat([counts, torch.ones_like(counts[:, :, :1])], 2)
        tokens, logprobs, on = (torch.stack(part, 2) for part in zip(*drawn, strict=True))
        return tokens, logprobs, on

    def accuracy(self, rows: Rows, most: int) -> Tensor:
        """Share of the first held-out sums that each copy gets right."""
        asked = rows.prompts[:most].expand(self.weights["norm"].shape[0], -1, -1)
        given, _, _ = self.answers(asked, greedy=True)
        return (given == rows.answers[:most]).all(-1).float().mean(1)


def _read(prompts: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that are read to tell each token of `answers`, and which of them count."""
    tokens = torch.cat([prompts, answers], 2)[:, :, :-1]
    counts = torch.ones_like(tokens, dtype=torch.bool)
    counts[:, :, :PROMPT_PLACES] = prompts != PAD
    return tokens, counts


class Critic:
    """Learns what each copy may expect: it starts from the copy's own weights, with a head of zeros."""

    def __init__(self, run: dict[str, Any], start: tuple[Weights, Shape]) -> None:
        weights = {name: one.clone() for name, one in start[0].items()}
        weights["head"] = torch.zeros_like(weights["norm"])
        self._section = run["algorithm"]["critic"]
        settings = DEFAULTS["optimizer"] | self._section["optimizer"]
        self._copies = Copies(weights, start[1], settings, run["steps"])
        self._lam = run["algorithm"]["advantage"]["lam"]

    def advantages(self, prompts: Tensor, given: Tensor, on: Tensor, rewards: Tensor, update: int) -> Tensor:
        """Return the whitened advantage of each token, and learn from the rewards."""
        before = self._copies.values(prompts, given).detach() * on
        following = torch.cat([before[:, :, 1:], torch.zeros_like(before[:, :, :1])], 2)
        is_last = on & ~torch.cat([on[:, :, 1:], torch.zeros_like(on[:, :, :1])], 2)
        errors = (following + rewards[..., None] * is_last - before) * on
        gained, told = torch.zeros_like(errors[:, :, 0]), []
        for place in reversed(range(errors.shape[2])):
            gained = errors[:, :, place] + self._lam * gained
            told.append(gained)
        advantages = torch.stack(told[::-1], 2) * on
        returns = advantages + before
        values = self._copies.values(prompts, given)
        clip = self._section["value_clip"]
        near = before + (values - before).clamp(-clip, clip)
        lost = torch.maximum((values - returns).square(), (near - returns).square()) * on
        counts = on.sum((1, 2))
        self._copies.step(0.5 * lost.sum((1, 2)) / counts, update)
        mean = (advantages.sum((1, 2)) / counts)[:, None, None]
        centred = (advantages - mean) * on
        return centred / (centred.square().sum((1, 2)) / counts).sqrt()[:, None, None].clamp(min=1e-6)


def read(file: Path) -> Rows:
    """Read the sums of a file of the example."""
    sums = [json.loads(line) for line in file.read_text().splitlines()]
    prompts = torch.full((len(sums), PROMPT_PLACES), PAD)
    answers = torch.full((len(sums), ANSWER_PLACES), PAD)
    for row, one in enumerate(sums):
        prompt = [FIRST_CHARACTER + ALPHABET.index(character) for character in one["prompt"]]
        answer = [FIRST_CHARACTER + ALPHABET.index(character) for character in one["answer"]] + [END]
        prompts[row, PROMPT_PLACES - len(prompt) :] = torch.tensor(prompt)
        answers[row, : len(answer)] = torch.tensor(answer)
    return Rows(prompts.to(DEVICE), answers.to(DEVICE))


class Draws:
    """The rows that one seed draws, epoch by epoch in its own order; solved ones rest as `data.rest_epochs` says.

    What rests is looked up when an epoch begins, not at each draw as in Flotilla.
    """

    def __init__(self, rows: int, seed: int, rest_epochs: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._rest_epochs = rest_epochs
        self._epoch = -1
        self._left = np.zeros(0, np.int64)
        self._solved_in_a_row = np.zeros(rows, np.int64)
        self._drawn_again_in = np.zeros(rows, np.int64)

    def take(self, size: int) -> np.ndarray:
        """Return the next rows."""
        while len(self._left) < size:
            self._epoch += 1
            order = self._random.permutation(len(self._solved_in_a_row))
            self._left = np.concatenate([self._left, order[self._drawn_again_in[order] <= self._epoch]])
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def note(self, rows: np.ndarray, solved: np.ndarray) -> None:
        """Which of the rows that were taken last were solved."""
        times = np.where(solved, self._solved_in_a_row[rows] + 1, 0)
        self._solved_in_a_row[rows] = times
        rest = np.minimum(2 ** np.minimum(times, 10) - 1, self._rest_epochs)
        self._drawn_again_in[rows] = self._epoch + 1 + rest


def drawn(rows: int, seeds: list[int], size: int) -> Iterator[Tensor]:
    """`size` rows for each seed, without end."""
    draws = [Draws(rows, seed) for seed in seeds]
    while True:
        yield torch.tensor(np.stack([one.take(size) for one in draws]), device=DEVICE)


def warm_up(
    run: dict[str, Any], model: Path, train: Rows, held_out: Rows, seeds: list[int]
) -> tuple[Weights, Shape]:
    """Return each copy as it was when an evaluation of `sft.yaml` first found enough accuracy."""
    weights, shape = load(model, len(seeds), DEVICE)
    copies = Copies(weights, shape, run["optimizer"], run["steps"])
    reached = {name: weight.clone() for name, weight in weights.items()}
    found = torch.zeros(len(seeds), device=DEVICE)
    updates = torch.zeros(len(seeds), dtype=torch.long, device=DEVICE)
    for update, rows in zip(
        range(run["steps"]),
        drawn(len(train.prompts), seeds, run["rollout"]["prompts_per_step"]),
        strict=False,
    ):
        answers = train.answers[rows]
        counted = answers != PAD
        logprobs = copies.logprobs(train.prompts[rows], answers)
        copies.step(-(logprobs * counted).sum((1, 2)) / counted.sum((1, 2)), update)
        if (update + 1) % run["evaluation"]["every_steps"]:
            continue
        accuracy = copies.accuracy(held_out, run["evaluation"]["max_prompts"])
        now = (accuracy >= run["stop"]["accuracy_at_least"]) & (found == 0)
        for name, weight in copies.weights.items():
            reached[name][now] = weight.detach()[now]
        found[now], updates[now] = accuracy[now], update + 1
        if found.all():
            break
    tell({"warm-up ended after": updates.tolist(), "with": [round(one, 3) for one in found.tolist()]})
    return {name: weight[found > 0] for name, weight in reached.items()}, shape


def learn(
    run: dict[str, Any], start: tuple[Weights, Shape], train: Rows, held_out: Rows, seeds: list[int]
) -> Tensor:
    """Train every copy by rewards alone, as the file of the run does; returns the accuracy of each."""
    rollout, optimizer = run["rollout"], run["optimizer"]
    samples, parts = rollout["samples_per_prompt"], optimizer["steps_per_update"]
    copies = Copies({name: one.clone() for name, one in start[0].items()}, start[1], optimizer, run["steps"])
    critic = Critic(run, start) if run["algorithm"]["type"] == "ppo" else None
    draws = [Draws(len(train.prompts), seed, run["data"]["rest_epochs"]) for seed in seeds]
    for update in range(run["steps"]):
        taken = [one.take(rollout["prompts_per_step"]) for one in draws]
        rows = torch.tensor(np.stack(taken), device=DEVICE)
        asked = rows.repeat_interleave(samples, 1)
        prompts = train.prompts[asked]
        given, before, on = copies.answers(prompts, greedy=False)
        rewards = (given == train.answers[asked]).all(-1).float()
        solved = rewards.unflatten(1, (-1, samples)).all(2).cpu().numpy()
        for one, own, right in zip(draws, taken, solved, strict=True):
            one.note(own, right)
        if critic is None:
            advantages = compared(run, copies, prompts, rewards, train.answers[asked])[..., None]
        else:
            advantages = critic.advantages(prompts, given, on, rewards, update)
            if update < run["algorithm"]["critic"]["warmup_steps"]:
                continue
        if run["algorithm"]["type"] == "dapo":  # It leaves groups out whose rewards are equal.
            on = on & (advantages != 0)
        for part in (
            torch.arange(rewards.shape[1], device=DEVICE).chunk(parts) * optimizer["epochs_per_update"]
        ):
            logprobs = copies.logprobs(prompts[:, part], given[:, part])
            copies.step(policy_loss(run, logprobs, before[:, part], advantages[:, part], on[:, part]), update)
    return copies.accuracy(held_out, run["evaluation"]["max_prompts"])


def compared(run: dict[str, Any], copies: Copies, prompts: Tensor, rewards: Tensor, right: Tensor) -> Tensor:
    """Return how far each reward is above those that its algorithm compares it with."""
    kind, samples = run["algorithm"]["type"], run["rollout"]["samples_per_prompt"]
    if kind == "remax":
        given, _, _ = copies.answers(prompts, greedy=True)
        return rewards - (given == right).all(-1).float()
    among = (
        rewards
        if run["algorithm"]["advantage"]["baseline"] == "batch"
        else rewards.unflatten(1, (-1, samples))
    )
    beyond = among - among.mean(-1, keepdim=True)
    if kind == "rloo":
        return (beyond * samples / (samples - 1)).view_as(rewards)
    return (beyond / (among.std(-1, keepdim=True) + 1e-6)).view_as(rewards)


def policy_loss(
    run: dict[str, Any], logprobs: Tensor, before: Tensor, advantages: Tensor, on: Tensor
) -> Tensor:
    """Of each copy, as the preset of its algorithm says."""
    kind = run["algorithm"]["type"]
    tokens = on.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = (logprobs - before) * on
    if kind in ("rloo", "remax"):
        return -(advantages * logprobs * on).sum((1, 2)) / on.shape[1]
    if kind == "gspo":
        low, high = GSPO_CLIP
        ratio = (log_ratio.sum(-1, keepdim=True) / tokens).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        return -objective.sum((1, 2)) / on.shape[1]
    if kind == "topr":
        ratio = log_ratio.detach().sum(-1, keepdim=True).clamp(max=20).exp()
        weight = torch.where(advantages >= 0, 1.0, ratio.clamp(max=run["algorithm"]["loss"]["negative_cap"]))
        objective = weight * advantages * logprobs
    else:
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - CLIP, 1 + (DAPO_CLIP_HIGH if kind == "dapo" else CLIP))
        objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -(objective * on).sum((1, 2)) / on.sum((1, 2)).clamp(min=1)


def completed(run: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a run with the defaults of what its file leaves out."""
    inner = {
        name: completed(run.get(name, {}), default)
        for name, default in defaults.items()
        if isinstance(default, dict)
    }
    return {**defaults, **run, **inner}


def changed(run: dict[str, Any], settings: str) -> dict[str, Any]:
    """Return a run with keys such as `rollout.samples_per_prompt=4` set."""
    run = copy.deepcopy(run)
    for setting in settings.split():
        path, value = setting.split("=", 1)
        if path not in OBEYED:
            raise SystemExit(f"{path} is not obeyed here; what is: {', '.join(sorted(OBEYED))}")
        *sections, key = path.split(".")
        place = run
        for section in sections:
            place = place[section]
        place[key] = yaml.safe_load(value)
    return run


def main() -> None:
    """Warm up once, then train by each of the settings that were asked for."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("model", type=Path, help="what make_model.py wrote")
    cli.add_argument("data", type=Path, help="what make_data.py wrote")
    cli.add_argument("--seeds", type=int, default=24)
    cli.add_argument("--warm-up", default="", help="keys of sft.yaml, such as optimizer.learning_rate=5.0e-4")
    cli.add_argument("--try", action="append", dest="settings", help="keys of the run; once for each try")
    cli.add_argument("--run", default="topr.yaml", help="file of the example, which follows the warm-up")
    asked = cli.parse_args()
    torch.set_float32_matmul_precision("high")
    train, preferred, held_out = (read(asked.data / f"{name}.jsonl") for name in ("rl", "sft", "heldout"))
    imitation = changed(yaml.safe_load((EXAMPLE / "sft.yaml").read_text()), asked.warm_up)
    start = warm_up(imitation, asked.model, preferred, held_out, list(range(asked.seeds)))
    seeds = list(range(len(start[0]["norm"])))
    rewarded = completed(yaml.safe_load((EXAMPLE / asked.run).read_text()), DEFAULTS)
    for settings in asked.settings or [""]:
        began = time.monotonic()
        ends = learn(changed(rewarded, settings), start, train, held_out, seeds).cpu()
        spread = {"mean": ends.mean(), "deviation": ends.std(correction=0), "least": ends.min()}
        told = {name: round(float(value), 4) for name, value in spread.items()}
        below = {f"below {bar}": int((ends < bar).sum()) for bar in (0.90, 0.93)} | {"of": len(seeds)}
        tell({"run": asked.run, "try": settings, **told, **below, "s": round(time.monotonic() - began)})


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
