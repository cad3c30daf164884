"""Learns where the tensors of a checkpoint lie in the parameters of the running model.

transformers fuses the experts of a layer into parameters of three dimensions and takes them apart when it saves a
model; so does an export. What is published has the names of a checkpoint, too, and is sent as views of the parameters.

Invariants: the layout is learned from the conversion with which transformers saves this model, on small tensors whose
every number says where it came from, and then proved on the real shapes without their numbers. Each number of each
parameter belongs to one tensor of the checkpoint. A tensor is a whole parameter, perhaps under another name, or one
expert's rows of a fused one; a model that is converted in another way is refused by the name of its parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from flotilla_core.errors import FailedPrecondition

Spec = tuple[str, torch.dtype, torch.Size]
Gather = Callable[[Iterable[list[str]]], Iterator[tuple[str, list[torch.Tensor]]]]
"""Yields the rows of the parameters of all groups, in parts and in their order."""

SMALL = 4
"""The most rows and columns of the small tensors; an even number, because gate and up lie in one parameter."""
FUSED_DIMENSIONS = 3


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint."""

    name: str
    parameter: str
    expert: int | None = None
    """The number of the expert; None where the tensor is the whole parameter."""
    first: int = 0
    """The first of its rows, of every `of_rows` of its expert."""
    last: int = 1
    of_rows: int = 1

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the whole parameter."""
        if self.expert is None:
            return parameter
        rows = parameter.shape[1]
        return parameter[self.expert, self.first * rows // self.of_rows : self.last * rows // self.of_rows]

    def rows_of(self, parameter: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensor out of a parameter whose rows come in parts; one of them holds the whole expert."""
        if self.expert is None:
            return parameter
        expert = self.expert
        for rows in parameter:
            if expert < len(rows):
                return [replace(self, expert=expert).of(rows)]
            expert -= len(rows)
        raise IndexError(f"{self.parameter} has no expert {self.expert}")


class CheckpointLayout:
    """The parts of all parameters."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.parameter, []).append(part)
        self._part = {part.name: part for found in self._parts.values() for part in found}

    @classmethod
    def of(cls, model: PreTrainedModel, specs: Iterable[Spec]) -> Self:
        """Learn the layout of a model whose parameters and saved buffers have these names and shapes."""
        shapes = {name: tuple(shape) for name, _, shape in specs}
        small = _Marked(shapes)
        try:
            stored = revert_weight_conversion(model, dict(small.tensors))
            whole = revert_weight_conversion(
                model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            )
        # A conversion may be any code of transformers, which knows nothing of our small tensors.
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise _refused(model, str(error)) from error
        layout = cls(_part(model, name, tensor, small) for name, tensor in stored.items())
        layout._require_all(
            model, small.tensors, {name: tuple(tensor.shape) for name, tensor in whole.items()}, shapes
        )
        return layout

    def specs(self, specs: Iterable[Spec]) -> list[Spec]:
        """Return name, type and shape of every tensor of the checkpoint, in the order of the parameters."""
        return [
            (part.name, dtype, part.of(torch.empty(shape, device="meta")).shape)
            for name, dtype, shape in specs
            for part in self._parts[name]
        ]

    def rows(
        self, groups: Sequence[Sequence[str]], gather: Gather
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield the rows of the checkpoint's tensors, in parts, out of those of the parameters that `gather` yields."""
        source = gather(self._parameters(groups))
        parameter, held = "", list[torch.Tensor]()
        for name in chain.from_iterable(groups):
            part = self._part[name]
            if part.parameter != parameter:
                parameter, held = next(source)
            yield name, part.rows_of(held)

    def _parameters(self, groups: Iterable[Iterable[str]]) -> Iterator[list[str]]:
        """Yield the parameters that the groups need, each once, with the first group that needs it."""
        seen: set[str] = set()
        for names in groups:
            wanted = dict.fromkeys(self._part[name].parameter for name in names)
            new = [parameter for parameter in wanted if parameter not in seen]
            seen.update(new)
            if new:
                yield new

    def _require_all(
        self,
        model: PreTrainedModel,
        small: dict[str, torch.Tensor],
        stored: dict[str, tuple[int, ...]],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        """Refuse parts that are not every number once, and those with another shape than a saved model has."""
        for name, tensor in small.items():
            parts = self._parts.get(name, [])
            if sum(part.of(tensor).numel() for part in parts) != tensor.numel():
                raise _refused(model, f"not all of {name} is saved as it is")
        ours = {
            name: tuple(shape)
            for name, _, shape in self.specs((n, torch.float32, torch.Size(s)) for n, s in shapes.items())
        }
        wrong = [name for name in ours.keys() | stored.keys() if ours.get(name) != stored.get(name)]
        if wrong:
            name = min(wrong)
            raise _refused(
                model, f"{name} is saved as {stored.get(name)}, and {ours.get(name)} of it is there"
            )


class _Marked:
    """A small tensor for each parameter, with numbers that no other one has; all experts are kept."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._starts: list[int] = []
        start = 0
        for name, shape in shapes.items():
            fused = len(shape) == FUSED_DIMENSIONS
            small = [size if fused and place == 0 else min(size, SMALL) for place, size in enumerate(shape)]
            self.tensors[name] = torch.arange(start, start + math.prod(small)).view(small)
            self._starts.append(start)
            start += math.prod(small)
        self._names = list(shapes)

    def at(self, number: int) -> tuple[str, torch.Tensor, int]:
        """Return the parameter that has a number, its small tensor, and the place of the number in it."""
        index = bisect_right(self._starts, number) - 1
        name = self._names[index]
        return name, self.tensors[name], number - self._starts[index]


def _part(model: PreTrainedModel, name: str, stored: torch.Tensor, small: _Marked) -> Part:
    """Find the tensor of the checkpoint in the marked parameters."""
    parameter, tensor, place = small.at(int(stored.flatten()[0]))
    if torch.equal(stored, tensor):
        return Part(name, parameter)
    if tensor.ndim == FUSED_DIMENSIONS:
        expert, place = divmod(place, math.prod(tensor.shape[1:]))
        first = place // tensor.shape[2]
        part = Part(name, parameter, expert, first, first + len(stored), tensor.shape[1])
        if torch.equal(stored, part.of(tensor)):
            return part
    raise _refused(model, f"{name} is neither {parameter} nor rows of one expert in it")


def _refused(model: PreTrainedModel, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the weights of {type(model).__name__} cannot be published",
        why=f"its checkpoint stores them in another form than the running model: {why}",
        next_step="use a dense model, or a mixture of experts that is stored expert by expert",
    )
