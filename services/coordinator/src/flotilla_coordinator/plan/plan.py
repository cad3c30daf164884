"""Works out the arithmetic of a run, explains it, and lists every reason against the run.

Invariants: no figure of a run is left to the user to work out: it is derived here by the same rules as in the loop, and
explained. "At most" means the bound that no step can pass. A plan reads files and changes nothing; of data that cannot
be read where they stand it leaves a copy in the state directory for the run.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.data.training_sets import (
    HeldOut,
    JoinedSets,
    LoadedSet,
    copies_folder,
    data_remarks,
    read_held_out,
    read_sets,
    training_data,
)
from flotilla_coordinator.plan import checks, data_lines, gpu_memory, placement, size_limits, update_lines
from flotilla_coordinator.plan.batching_choice import batching_line, chosen_batching
from flotilla_coordinator.plan.checks import role_errors
from flotilla_coordinator.plan.functions import loading_problems
from flotilla_coordinator.plan.lines import shown_bytes
from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts, SequenceLimit, adapter_errors
from flotilla_coordinator.plan.trainer_memory import HostMemory, TrainerMemory, microbatch_tokens
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.model_folder import model_folder
from flotilla_trackers.follow import tracker_errors


def plan_run(config: RunConfig, stack: StackConfig) -> run_pb2.Plan:
    """Work out a run on a stack; `errors` of the plan is empty when the run would start."""
    plan = run_pb2.Plan(errors=checks.config_errors(config), warnings=checks.fleet_warnings(config, stack))
    plan.errors.extend(role_errors(config.algorithm, stack))
    plan.errors.extend(checks.sleep_errors(config, stack))
    plan.errors.extend(tracker_errors(config))
    # A service that was started elsewhere may have other packages installed than this process.
    if not stack.reward.attach and stack.trainer.attach is None:
        errors, warnings = loading_problems(config)
        plan.errors.extend(errors)
        plan.warnings.extend(warnings)
    try:
        folder = model_folder(stack.model)
        model = ModelFacts.read(folder)
        start = model  # weights in object storage are here when the run has its gangs
        if isinstance(config.initial_weights, Path):
            start = ModelFacts.read(config.initial_weights)
        tokenizer = Tokenizer.load(folder)
        plan.errors.extend(checks.model_errors(config, model, start, tokenizer.vocabulary_size))
        plan.errors.extend(update_lines.mesh_errors(config.algorithm, stack))
        plan.errors.extend(adapter_errors(model, config.lora) if config.lora else [])
        if config.algorithm.type == "sft" or config.learns_from_pairs:
            plan.warnings.extend(tokenizer.end_warnings())
        copies = copies_folder(stack)
        sets = read_sets(config.data, tokenizer, training_data(config, copies))
        data = JoinedSets(sets)
        longest = checks.longest_sequence(config, data)
        asked, gpu = config.batching, gpu_memory.gpu_of_this_host()
        trained = model.with_value_head() if config.trains_reward_model else model
        chosen = chosen_batching(config, stack, trained, longest, gpu)
        config = config.model_copy(update={"batching": chosen})
        critic = list(data_lines.critic_lines(config, stack, longest))
        held_out = read_held_out(config, tokenizer, copies)
    except FlotillaError as error:
        plan.errors.append(str(error))
        return plan
    learned = list(data_lines.learned_lines(config, data, tokenizer))
    _Planner(config, stack, trained, sets, held_out, longest, gpu, plan).write()
    batching = [] if gpu is None else [batching_line(asked, chosen, gpu)]
    trackers = [("trackers", ", ".join(one.type for one in config.trackers), "each in a process of its own")]
    for name, value, explanation in (*learned, *batching, *critic, *(trackers if config.trackers else [])):
        plan.lines.add(name=name, value=value, explanation=explanation)
    return plan


class _Planner:
    """Writes the lines of one plan."""

    def __init__(
        self,
        config: RunConfig,
        stack: StackConfig,
        model: ModelFacts,
        sets: list[LoadedSet],
        held_out: list[tuple[HeldOut, PromptFile]],
        longest: int,
        gpu: int | None,
        plan: run_pb2.Plan,
    ) -> None:
        self._config = config
        self._stack = stack
        self._model = model
        self._sets = sets
        self._data = JoinedSets(sets)
        self._held_out = held_out
        self._plan = plan
        self._given = (
            "pairs" if config.learns_from_pairs else "answers" if config.algorithm.type == "sft" else ""
        )
        self._prompts = config.rollout.prompts_per_step
        per_prompt: float = config.rollout.samples_per_prompt
        if self._given:
            # A chat may need a sequence for each of its turns.
            per_prompt = checks.answers_per_prompt(self._data) or {"pairs": 2, "answers": 1}[self._given]
        self._samples = math.ceil(self._prompts * per_prompt)
        self._memory = size_limits.host_memory()
        self._gpu = gpu
        self._step_tokens = 0
        """Tokens that are generated for a step; 0 where none are."""
        self._prompt_tokens = self._data.longest_prompt
        self._response_tokens = config.rollout.sampling.max_response_tokens
        self._longest = longest
        self._adapters = None if config.lora is None else AdapterFacts.of(model, config.lora)
        self._limit = SequenceLimit.of(model, stack.generator)

    def write(self) -> None:
        """Write all lines, warnings and errors."""
        for line in data_lines.model_lines(self._config, self._model, self._adapters, self._limit):
            self._line(*line)
        for line in update_lines.algorithm_lines(self._config.algorithm):
            self._line(*line)
        self._plan.warnings.extend(update_lines.algorithm_warnings(self._config.algorithm))
        self._data_lines()
        self._step_lines()
        self._line(*update_lines.mesh_line(self._stack.trainer))
        self._update_lines()
        self._evaluation_lines()
        self._memory_lines()
        self._disk_lines()
        answers = [(one, file.kept) for one, file in self._held_out]
        self._plan.errors.extend(
            size_limits.memory_errors(self._config, self._step_tokens, answers, self._memory)
        )

    def _evaluation_lines(self) -> None:
        for line in data_lines.evaluation_lines(self._config, self._held_out):
            self._line(*line)
        for one, file in self._held_out:
            name = one.name if len(self._held_out) > 1 else ""
            self._plan.warnings.extend(checks.overlap_warnings(self._data, file, name))
            self._plan.errors.extend(data_lines.evaluation_errors(self._config, one, file, self._limit))

    def _data_lines(self) -> None:
        config = self._config
        for line in data_lines.data_lines(config, self._sets, self._prompt_tokens):
            self._line(*line)
        read = [one.file for one in self._sets] + [file for _, file in self._held_out]
        self._plan.warnings.extend(data_remarks(read))
        self._plan.warnings.extend(checks.data_warnings(config, self._data))

    def _step_lines(self) -> None:
        config = self._config
        if self._given:
            self._line(
                "step",
                f"{self._samples} sequences",
                f"rollout.prompts_per_step prompts with their {self._given}",
            )
            self._plan.errors.extend(checks.answer_errors(self._limit, self._longest))
            return
        self._plan.errors.extend(checks.canary_errors(config, self._data.kept))
        rollout, replicas = config.rollout, max(self._stack.generator.replicas, 1)
        self._line(
            "step",
            f"{self._samples} samples",
            f"{self._prompts} prompts x {rollout.samples_per_prompt} samples; "
            f"about {math.ceil(self._samples / replicas)} for each of {replicas} generator(s)",
        )
        for line in (*data_lines.draw_lines(rollout), *data_lines.greedy_lines(config)):
            self._line(*line)
        self._plan.warnings.extend(data_lines.draw_warnings(config))
        self._step_tokens = tokens = self._samples * (self._prompt_tokens + self._response_tokens)
        self._line(
            "tokens of a step",
            f"at most {tokens:,}",
            f"{self._samples} x ({self._prompt_tokens} prompt + {self._response_tokens} response)",
        )
        for line in update_lines.quantization_lines(self._stack):
            self._line(*line)
        self._plan.errors.extend(update_lines.quantization_errors(config, self._stack))
        if config.loop == "coordinator":
            self._line(*update_lines.policy_line(config))
            self._line(*update_lines.kv_line(config, self._stack, self._prompt_tokens))
            self._line(*update_lines.groups_line(config, tokens))
            self._plan.warnings.extend(update_lines.asynchrony_warnings(config, tokens, self._memory))
        self._plan.errors.extend(
            checks.length_errors(
                self._limit,
                self._prompt_tokens,
                self._response_tokens,
                "rollout.sampling.max_response_tokens",
            )
        )

    def _update_lines(self) -> None:
        config, lanes = self._config, self._stack.trainer.lanes
        # A reward is read off after the last token, so that token is fed as well.
        longest = self._longest + (1 if config.trains_reward_model else 0)
        cut = update_lines.MicroBatches.of(self._samples, longest, config.batching.microbatch_budget, lanes)
        for line in update_lines.update_lines(config, cut, self._samples, lanes):
            self._line(*line)
        self._plan.warnings.extend(update_lines.update_warnings(config, cut, self._longest))
        self._plan.warnings.extend(update_lines.spare_budget_warnings(config, cut, lanes))

    def _memory_lines(self) -> None:
        trainer = self._stack.trainer
        compiled = gpu_memory.compiles(trainer, self._gpu)
        need = TrainerMemory.of(self._model, self._config, trainer, self._longest, compiled=compiled)
        batching = self._config.batching
        self._line(
            "memory of a trainer rank",
            f"about {shown_bytes(need.total)}",
            f"weights {shown_bytes(need.masters)}, gradients {shown_bytes(need.gradients)}, "
            f"AdamW {shown_bytes(need.moments)}, gathered {trainer.dtype} layers {shown_bytes(need.gathered)}, "
            f"activations of {microbatch_tokens(self._config, trainer, self._longest)} tokens "
            f"{shown_bytes(need.activations)}"
            + (
                f", logits of {batching.logprob_chunk_tokens} tokens {shown_bytes(need.logits)}"
                if need.logits
                else ""
            )
            + (f", frozen reference {shown_bytes(need.reference)}" if need.reference else ""),
        )
        host = HostMemory.of(self._model, self._config, trainer)
        for line in data_lines.host_lines("trainer", host, offload=self._config.optimizer.offload):
            self._line(*line)
        kept = data_lines.kept_on_host(self._config, self._stack, host)
        self._plan.errors.extend(size_limits.host_errors(kept, self._memory))
        everything = need.total + host.total
        self._plan.errors.extend(size_limits.trainer_errors(self._config, trainer, everything, self._memory))
        self._plan.warnings.extend(size_limits.bfloat16_warnings(self._stack))
        self._gpu_lines(need)
        if not self._config.trains_reward_model:
            for line in data_lines.sync_lines(self._config, self._stack, self._model, self._adapters):
                self._line(*line)

    def _gpu_lines(self, need: TrainerMemory) -> None:
        config, stack, model, gpu = self._config, self._stack, self._model, self._gpu
        if gpu is not None:
            for line in placement.seat_lines(stack, model, gpu):
                self._line(*line)
            errors, warnings = gpu_memory.gpu_problems(
                config,
                stack,
                model,
                need.total,
                gpu,
                state_bytes=need.state,
                kept_bytes=need.kept,
            )
            self._plan.errors.extend(errors)
            self._plan.warnings.extend(warnings)
        if not self._given and config.loop == "coordinator":
            kv_cache = gpu_memory.kv_cache_bytes(model, stack, gpu)
            self._plan.warnings.extend(
                gpu_memory.kv_cache_warnings(config, stack, model, self._prompt_tokens, kv_cache)
            )

    def _disk_lines(self) -> None:
        generated = 0 if self._given else self._config.steps * self._samples * self._response_tokens
        parameters = self._model.parameters
        use = size_limits.DiskUse.of(
            self._config,
            parameters=parameters,
            learning=parameters if self._adapters is None else self._adapters.parameters,
            critic=data_lines.critic_parameters(self._config, self._stack),
            generated_tokens=generated,
        )
        for line in use.lines():
            self._line(*line)
        samples = 0 if self._given else self._samples
        self._plan.errors.extend(size_limits.disk_errors(self._config, use, samples, self._stack.state_dir))
        free = shutil.disk_usage(size_limits.existing(self._stack.state_dir)).free
        if use.total > free:
            self._plan.warnings.append(
                f"the run may write {shown_bytes(use.total)}, but {self._stack.state_dir} "
                f"has {shown_bytes(free)} free"
            )

    def _line(self, name: str, value: str, explanation: str) -> None:
        self._plan.lines.add(name=name, value=value, explanation=explanation)
