"""Write and load this rank's part of checkpoints: a copy in host memory, and a thread that writes it.

Invariants: once `snapshot` returns, training may change everything and the checkpoint stays the same; the writing
thread takes part in no collective, so neither it nor an update delays the other; a load changes nothing before every
rank has read all of its numbers. Of a frozen model only the adapters are kept. No random state is kept: a forward pass
has no dropout, and seeds derive from the run's.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flotilla_core import telemetry
from flotilla_core.disk import disk_full
from flotilla_core.errors import FlotillaError, Internal, Mismatch
from flotilla_core.telemetry import names
from flotilla_trainer.rank.cut import Cut, local
from flotilla_trainer.rank.export import WholeModel
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.optimizer import MOMENTS, PolicyOptimizer
from flotilla_trainer.rank.peft_folder import FOLDER as ADAPTERS
from flotilla_trainer.rank.peft_folder import AdapterFolder
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.shards import Piece, ShardReader, write_shard
from flotilla_trainer.wire.frames import Frame

PARAMETER = "parameter"
MODEL = "model"


@dataclass(frozen=True)
class _Snapshot:
    """The data that one rank writes."""

    pieces: dict[str, Piece]
    steps: dict[str, int]
    model: WholeModel | AdapterFolder


class RankCheckpoints:
    """Takes, writes and loads this rank's shards."""

    def __init__(self, model: ShardedModel, link: FrontLink) -> None:
        self._model = model
        self._link = link
        self._mesh = model.mesh

    def snapshot(self, fields: dict[str, Any], optimizer: PolicyOptimizer, source: Path) -> None:
        """Copy everything to the host, then let a thread write it; the thread reports its end to the front."""
        with telemetry.span(names.TRAINER_SAVE):
            taken = self._take(optimizer, source)
        report = Frame("report", fields["report"])
        threading.Thread(
            target=self._write,
            args=(Path(fields["folder"]), taken, report),
            name="checkpoint-writer",
            daemon=True,
        ).start()

    def load(self, folder: Path, optimizer: PolicyOptimizer, *, fresh_optimizer: bool = False) -> None:
        """Restore weights and moments from a checkpoint, whatever number of ranks wrote it.

        With `fresh_optimizer` no moment is read, and the optimizer is as before its first step.
        """
        with telemetry.span(names.TRAINER_LOAD):
            found: dict[str, tuple[dict[str, torch.Tensor], int]] = {}
            failure: FlotillaError | None = None
            try:
                found = self._read(folder, () if fresh_optimizer else MOMENTS)
            except FlotillaError as error:
                failure = error
            self._model.agree(failure)
            self._link.progress("putting the checkpoint in place")
            with torch.no_grad():
                for name, parameter in self._model.trainable().items():
                    tensors, steps = found[name]
                    local(parameter).copy_(tensors.pop(PARAMETER))
                    optimizer.restore(parameter, tensors, steps)

    def _take(self, optimizer: PolicyOptimizer, source: Path) -> _Snapshot:
        pieces: dict[str, Piece] = {}
        steps: dict[str, int] = {}
        for name, parameter in self._model.trainable().items():
            self._link.progress(f"copying {name}")
            steps[name] = optimizer.steps(parameter)
            cut = Cut.of(name, parameter)
            if not cut.counts:
                continue
            for kind, tensor in {PARAMETER: parameter, **optimizer.moments(parameter)}.items():
                pieces[f"{kind}/{name}"] = cut, local(tensor.detach()).to("cpu", copy=True)
        adapters = self._model.adapters
        whole = AdapterFolder(adapters, source) if adapters else WholeModel(source, self._model, self._link)
        return _Snapshot(pieces, steps, whole)

    def _write(self, folder: Path, taken: _Snapshot, report: Frame) -> None:
        try:
            if self._mesh.copy == 0:
                facts = {"steps": taken.steps, "base": self._model.base}
                write_shard(folder, self._mesh.shard, self._mesh.shards, taken.pieces, facts)
            if dist.get_rank() == 0:
                taken.model.write(folder / (ADAPTERS if self._model.frozen else MODEL))
        except FlotillaError as error:
            self._link.refuse(report, error)
        # No caller could catch an error of this thread; the front waits for its report while training continues.
        except Exception as error:  # noqa: BLE001
            unexpected = Internal("the checkpoint cannot be written", why=repr(error))
            self._link.refuse(report, disk_full(error, unexpected.what, folder) or unexpected)
            traceback.print_exc()
        else:
            self._link.answer(report, {})

    def _read(self, folder: Path, moments: Sequence[str]) -> dict[str, tuple[dict[str, torch.Tensor], int]]:
        """Return this rank's rows of every tensor, and the steps that each parameter has taken."""
        found = {}
        with ShardReader(folder) as shards:
            parameters = self._model.trainable()
            kept = shards.names()
            wanted = {
                name: [PARAMETER, *(kind for kind in moments if f"{kind}/{name}" in kept)]
                for name in parameters
            }
            for name, kinds in wanted.items():
                for kind in kinds:
                    shards.check(f"{kind}/{name}", tuple(parameters[name].shape))
            self._check_base(folder, shards.facts)
            for name, kinds in wanted.items():
                self._link.progress(f"reading {name}")
                cut = Cut.of(name, parameters[name])
                tensors = {kind: shards.part(f"{kind}/{name}", cut) for kind in kinds}
                found[name] = tensors, shards.facts["steps"][name]
        return found

    def _check_base(self, folder: Path, facts: dict[str, Any]) -> None:
        """Refuse a checkpoint whose adapters were trained on other weights; those weights are in no checkpoint."""
        if facts.get("base", 0) != self._model.base:
            raise Mismatch(
                "the weights under the adapters are not those that they were trained on",
                where=str(folder),
                why="the model, or the folder of initial_weights, has changed since",
                next_step="put the model back as it was when the run was started",
            )
