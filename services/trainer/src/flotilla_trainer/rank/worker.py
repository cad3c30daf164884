"""The rank's main thread: it runs one command after the other, the same commands in the same order on every rank.

Invariants: a FlotillaError is raised by all ranks together or outside every collective, so the gang stays usable after
it; any other exception ends this process, and the front replaces the gang.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from opentelemetry import context
from transformers import AutoConfig

from flotilla_core import telemetry
from flotilla_core.config import OptimizerConfig
from flotilla_core.errors import Exhausted, FailedPrecondition, FlotillaError
from flotilla_core.telemetry import names
from flotilla_trainer.rank.checkpoint import RankCheckpoints
from flotilla_trainer.rank.compilation import Compilation, one_pass
from flotilla_trainer.rank.cut import RankMesh, gathered
from flotilla_trainer.rank.device_memory import PROBE_SEQUENCE, MicroBatchMemory
from flotilla_trainer.rank.export import export
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.meeting import Meeting
from flotilla_trainer.rank.model_checks import check_sequence_parallel
from flotilla_trainer.rank.objective import RankObjective, rank_objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.publisher import Publisher
from flotilla_trainer.rank.reference_weights import ReferenceDistribution, ReferenceWeights
from flotilla_trainer.rank.scoring import score, values_of
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, UpdateSteps, finish
from flotilla_trainer.rank.value_model import RewardModel, ScoreModel, ValueModel
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.objective import ObjectiveSettings
from flotilla_trainer.wire.settings import (
    REWARD_HEAD,
    SCORE_HEAD,
    VALUE_HEAD,
    VOCABULARY_HEAD,
    RankSetup,
    SessionSettings,
)

MODELS: dict[str, type[PolicyModel] | type[ValueModel]] = {
    VOCABULARY_HEAD: PolicyModel,
    VALUE_HEAD: ValueModel,
    REWARD_HEAD: RewardModel,
    SCORE_HEAD: ScoreModel,
}
Answer = tuple[dict[str, Any], dict[str, Array]]


class RankWorker:
    """One rank with its model, session and weight group."""

    def __init__(self, setup: RankSetup, link: FrontLink, meeting: Meeting) -> None:
        self._setup = setup
        self._link = link
        self._folder = Path(setup.model)
        self._device = _device(setup)
        link.progress("meeting the other ranks")
        meeting.join(setup)
        link.progress("building the model")
        self._compilation = Compilation(setup.compile, self._device, link.progress)
        self._mesh = RankMesh.form(
            self._device.type, replicate=setup.replicate, sequence_parallel=setup.sequence_parallel
        )
        self._build(setup.head, frozen=False)
        self._packing_refusal = ""
        self._settings: SessionSettings | None = None
        self._objective: RankObjective | None = None
        self._optimizer: PolicyOptimizer | None = None
        self._reference: ReferenceWeights | None = None
        self._distribution: ReferenceDistribution | None = None
        self._pending: Update | None = None
        link.urgent("abort_group", lambda frame: self._publisher.abort(frame.fields["why"]))
        self._commands = {
            "load": self._load,
            "open_session": self._open_session,
            "train": self._train,
            "evaluate": self._evaluate,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "gradients": self._gradients,
            "score": self._score,
            "values": self._values,
            "open_group": lambda command: (self._publisher.open(command.fields), {}),
            "publish": lambda command: (self._publisher.publish(command.fields), {}),
            "export": self._export,
            "snapshot": self._snapshot,
            "load_checkpoint": self._load_checkpoint,
        }

    def serve(self) -> NoReturn:
        """Run the commands of the front for ever."""
        while True:
            command = self._link.next_command()
            self._link.progress(command.kind)
            caller = context.attach(telemetry.from_carrier(command.fields.pop("carrier")))
            try:
                fields, arrays = self.run(command)
            except FlotillaError as error:
                self._link.refuse(command, error)
            else:
                self._link.answer(command, fields, arrays)
            finally:
                context.detach(caller)

    def run(self, command: Frame) -> Answer:
        """Run a command; before its answer, who is next on this GPU has the memory that torch would keep."""
        try:
            return self._commands[command.kind](command)
        finally:
            if self._setup.returns_memory and self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self, command: Frame) -> Answer:
        folder = Path(command.fields["model"])
        wanted = command.fields["head"], command.fields["frozen"]
        if wanted != (self._head, self._model.frozen):
            self._rebuild(*wanted)
        self._link.progress(f"loading {folder}")
        with telemetry.span(names.TRAINER_LOAD):
            self._model.load(folder)
        self._folder = folder
        self._link.progress("checking the head")
        self._model.check_head()
        check_sequence_parallel(self._model.policy, self._mesh.width, self._model.dtype, self._model.device)
        facts = self._model.packing_facts()
        self._packing_refusal = facts["packing_refusal"]
        facts |= self._compile(folder, packed=not facts["packing_refusal"])
        config = self._model.causal_lm.config
        return {
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "vocabulary": config.vocab_size,
            "max_sequence_tokens": self._model.longest_sequence,
            "torch": torch.__version__,
            "device": str(self._model.device),
            **facts,
        }, {}

    def _open_session(self, command: Frame) -> Answer:
        settings = SessionSettings.from_fields(command.fields)
        self._forget_session()
        self._settings = settings
        torch.manual_seed(settings.seed)
        self._model.adapt(settings.lora, settings.seed)
        self._model.recomputed_layers.on = settings.batching.recomputes_layers
        self._model.selective_layers.on = settings.batching.recomputes_wide_parts
        self._model.recomputed_layers.inputs_rest_on_host = settings.batching.activation_offload
        self._optimizer = self._with_moments(settings.optimizer)
        self._memory.forget()
        self._reference = ReferenceWeights(self._model) if settings.objective.keeps_reference else None
        if self._reference is not None:
            self._distribution = ReferenceDistribution(self._model, self._reference)
        self._objective = rank_objective(settings.objective, self._distribution)
        budget = settings.batching.microbatch_budget
        # Generators that sleep in updates are awake now, and have the memory that updates get; other gangs of this GPU
        # open their sessions.
        return {"fits": budget if self._setup.returns_memory else self._memory.fitting(budget)}, {}

    def _with_moments(self, settings: OptimizerConfig) -> PolicyOptimizer:
        """Build the optimizer with all that it keeps; refused by all ranks alike where one lacks the memory."""
        optimizer, lacking = None, ""
        try:
            optimizer = PolicyOptimizer(self._model, settings)
        except torch.OutOfMemoryError as error:
            lacking = str(error).partition("\n")[0]
        lacks = torch.tensor(int(bool(lacking)), device=self._device)
        dist.all_reduce(lacks)
        if optimizer is not None and not lacks.item():
            return optimizer
        del optimizer
        raise Exhausted(
            "the state of the optimizer does not fit into the memory of the GPU",
            where="optimizer.offload",
            why=lacking or "another rank lacks the memory for it",
            next_step="set it or trainer.cpu_offload to true, or raise trainer.nproc",
        )

    def _train(self, command: Frame) -> Answer:
        settings, objective, optimizer = self._session()

        def accumulated(command: Frame, part: range) -> Update:
            update = Update(self._model, settings, objective, self._link, self._memory)
            self._accumulate(update, command, part=part)
            return update

        taken = UpdateSteps(optimizer, accumulated, self._refuse_above(command)).take(command)
        taken["metrics"] |= self._compilation.metrics()
        return taken, {}

    def _forward_backward(self, command: Frame) -> Answer:
        """Add sums of gradients to the pending ones; the step divides them by the units of all calls."""
        settings, objective, _ = self._session()
        asked = ObjectiveSettings.from_fields(command.fields["objective"])
        units, started = command.fields["units"], time.monotonic()
        own = rank_objective(asked, self._distribution)
        update = Update(self._model, replace(settings, objective=asked), own, self._link, self._memory)
        self._accumulate(update, command, factor=units)
        if self._pending is None:
            self._pending = Update(self._model, settings, objective, self._link)
        self._pending.absorb(update)
        update.scale_loss(_over(units))
        metrics, _ = update.reduced()
        metrics["time/forward_backward_s"] = time.monotonic() - started
        metrics |= self._compilation.metrics()
        return {"metrics": metrics}, {}

    def _optim_step(self, command: Frame) -> Answer:
        _, _, optimizer = self._session()
        # The front refuses a step before any call succeeded, so a step on nothing is a defect.
        assert self._pending is not None
        update, self._pending = self._pending, None
        if not command.fields["units"]:
            optimizer.discard_gradients()
            return {"metrics": update.reduced()[0], "skipped": ""}, {}
        scale = _over(command.fields["units"])
        update.scale_loss(scale)
        optimizer.scale_gradients(scale)
        limit = self._refuse_above(command)
        metrics, skipped = finish(update, optimizer, command.fields["learning_rate"], limit)
        return {"metrics": metrics, "skipped": skipped}, {}

    def _refuse_above(self, command: Frame) -> float | None:
        """Return the limit of a step: what the run measured meanwhile, or that of the session."""
        measured: float | None = command.fields["refuse_above"]
        return self._session()[0].refuse_above if measured is None else measured

    def _evaluate(self, command: Frame) -> Answer:
        settings, objective, _ = self._session()
        update = Update(self._model, settings, objective, self._link)
        update.accumulate(command, backward=False)
        metrics, _ = update.reduced()
        return {"metrics": metrics}, {}

    def _gradients(self, command: Frame) -> Answer:
        """Return the loss and, from rank 0, the whole gradient of a batch; no step follows."""
        settings, objective, optimizer = self._session()
        update = Update(self._model, settings, objective, self._link)
        update.accumulate(command, backward=True)
        optimizer.complete_gradients()
        metrics, _ = update.reduced()
        arrays = {}
        for name, parameter in self._model.trainable().items():
            # A parameter that no sample of the batch reaches, such as an expert, has no gradient.
            whole = gathered(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            if self._setup.rank == 0:
                arrays[name] = whole.cpu().numpy()
        optimizer.discard_gradients()
        return {"metrics": metrics}, arrays

    def _score(self, command: Frame) -> Answer:
        with telemetry.span(names.TRAINER_LOGPROBS):
            if not command.fields.get("reference"):
                return {}, score(command, self._model, self._link)
            # The front asks for reference scores only where the session keeps the reference.
            assert self._reference is not None
            with self._reference.in_place():
                return {}, score(command, self._model, self._link)

    def _values(self, command: Frame) -> Answer:
        with telemetry.span(names.TRAINER_VALUES):
            return {}, values_of(command, self._model, self._link)

    def _export(self, command: Frame) -> Answer:
        name = command.fields["dtype"]
        dtype = getattr(torch, name) if name else self._model.dtype
        return export(Path(command.fields["path"]), self._folder, self._model, self._link, dtype), {}

    def _snapshot(self, command: Frame) -> Answer:
        _, _, optimizer = self._session()
        self._checkpoints.snapshot(command.fields, optimizer, self._folder)
        return {}, {}

    def _load_checkpoint(self, command: Frame) -> Answer:
        _, _, optimizer = self._session()
        folder, fresh = Path(command.fields["folder"]), command.fields["fresh_optimizer"]
        self._checkpoints.load(folder, optimizer, fresh_optimizer=fresh)
        self._drop_gradients()
        return {}, {}

    def _compile(self, folder: Path, *, packed: bool) -> dict[str, Any]:
        """Compile the layers if that is wanted; return the refusal, if any, and the time it took."""
        # `batching.packing: auto` packs rows so; a session with the other layout compiles in its first update.
        packed = packed and self._device.type != "cpu"
        if not self._compilation.begin(self._model, packed=packed):
            self._rebuild(self._head, self._model.frozen)
            self._model.load(folder)
        took = self._compilation.metrics().get("time/compile_s", 0.0)
        return {"compile_refusal": self._compilation.refusal, "compile_s": took}

    def _build(self, head: str, *, frozen: bool) -> None:
        """Build the model, the publisher and the checkpoints; a load brings the weights."""
        dtype = getattr(torch, self._setup.dtype)
        self._head = head
        self._model = ShardedModel(
            Path(self._setup.model),
            dtype,
            self._mesh,
            self._device,
            MODELS[head],
            frozen=frozen,
            cpu_offload=self._setup.cpu_offload,
        )
        self._model.report_progress(self._link.moved)
        self._memory = MicroBatchMemory(self._device, self._probe)
        self._publisher = Publisher(self._model, self._link)
        self._checkpoints = RankCheckpoints(self._model, self._link)

    def _probe(self, tokens: int, again: Callable[[], None]) -> None:
        """Run two passes over so many zeros, laid out as updates are on GPUs, and call back between them."""
        self._link.progress("measuring the memory of a micro-batch")
        length = min(PROBE_SEQUENCE, self._model.longest_sequence or PROBE_SEQUENCE)
        one_pass(self._model, [length] * (tokens // length), not self._packing_refusal, again)

    def _rebuild(self, head: str, frozen: bool) -> None:
        """Build the model again, after the old one is freed: the device may hold only one. No session is open then."""
        self._link.progress("building the model again")
        if head != self._head:
            # A model that cannot have this head is refused while the old model still exists.
            with torch.device("meta"):
                MODELS[head].skeleton(AutoConfig.from_pretrained(self._setup.model), torch.float32)
        self._forget_session()
        del self._model, self._publisher, self._checkpoints
        gc.collect()
        self._build(head, frozen=frozen)

    def _forget_session(self) -> None:
        """Free what an earlier session kept: the device may hold only one optimizer and one reference."""
        self._settings = self._objective = self._optimizer = self._pending = None
        self._reference = self._distribution = None

    def _accumulate(
        self, update: Update, command: Frame, *, factor: float = 1.0, part: range | None = None
    ) -> None:
        """Run forward and backward; an error drops the unfinished gradients and all pending ones."""
        try:
            update.accumulate(command, backward=True, factor=factor, part=part)
        except FlotillaError:
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        _, _, optimizer = self._session()
        optimizer.discard_gradients()
        self._pending = None

    def _session(self) -> tuple[SessionSettings, RankObjective, PolicyOptimizer]:
        # The front sends these commands only in a session; anything else is a defect and ends the process.
        assert self._settings is not None and self._objective is not None and self._optimizer is not None
        return self._settings, self._objective, self._optimizer


def _over(units: float) -> float:
    """Return the factor that divides sums by their units, which weights of samples make smaller than 1 or larger."""
    return 1 / units if units else 1.0


def _device(setup: RankSetup) -> torch.device:
    if setup.backend != "nccl":
        return torch.device("cpu")
    if torch.cuda.device_count() < setup.ranks_here:
        raise FailedPrecondition(
            f"{setup.ranks_here} ranks need {setup.ranks_here} GPUs",
            why=f"this process sees {torch.cuda.device_count()}, and nccl takes one rank a GPU",
            next_step="lower trainer.nproc, or set trainer.backend to gloo to train on the CPU",
        )
    device = torch.device("cuda", setup.place)
    torch.cuda.set_device(device)
    if setup.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(setup.memory_fraction, device)
    return device
