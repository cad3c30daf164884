"""Writes the training data that `flotilla samples --to` makes of samples, and says what was left out.

Invariant: a file is whole or not there, and one that exists is overwritten by --force alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_cli.options import make_folder_of
from flotilla_cli.output import print_json, print_line, say
from flotilla_cli.recorded import how_kept
from flotilla_cli.stack import load_stack_with_model, with_models_here
from flotilla_core.config import DataConfig, RunConfig
from flotilla_core.errors import AlreadyExists, InvalidRequest, NotFound
from flotilla_core.files import write_atomically
from flotilla_core.model_folder import model_folder
from flotilla_data.samples import ROLLOUTS

if TYPE_CHECKING:
    from flotilla_cli.training_rows import TrainingRows

NOT_RECORDED = "they were not trained, so they are not recorded"


class Kind(StrEnum):
    """Kinds of rows that `--to` makes of samples."""

    SFT = "sft"
    PAIRS = "pairs"
    TRACE = "trace"


@dataclass(frozen=True)
class TrainingFile:
    """The file that was asked for, and which samples go into it."""

    path: Path
    kind: Kind
    at_least: float | None
    best: int | None
    margin: float | None

    def write(
        self,
        run_id: str,
        config: RunConfig | None,
        samples: Sequence[Mapping[str, Any]],
        stack: str | None,
        directory: Path,
        *,
        as_json: bool,
    ) -> None:
        """Write the rows of samples; raise where there is none."""
        if self.kind is Kind.TRACE:
            self._write_traces(run_id, samples, directory, as_json=as_json)
            return
        # A command that only shows samples needs no package of the coordinator.
        from flotilla_cli.training_rows import FORGOTTEN, Choice, training_rows
        from flotilla_data.tokenizer import Tokenizer

        if samples and "prompt_index" in samples[0]:
            say("these are held-out prompts: an evaluation on them says nothing of a model that learned them")
        tokenizer = Tokenizer.load(model_folder(with_models_here(load_stack_with_model(stack)).model))
        evaluation = None if config is None else config.evaluation
        right_at = 1.0 if evaluation is None else evaluation.success_at
        at_least = right_at if self.at_least is None else self.at_least
        choice = Choice(self.kind is Kind.PAIRS, at_least, self.best or 1, self.margin or 0.0)
        made = training_rows(samples, choice, tokenizer, config)
        if not made.rows:
            raise NotFound(
                f"no sample of run {run_id} makes a row",
                why=_left_out(made) or "there are no such samples",
                next_step=how_kept(config, directory)
                if FORGOTTEN in made.left_out
                else self._way(made, at_least),
            )
        make_folder_of(self.path)
        write_atomically(self.path, made.text())
        self._say(run_id, made, config, as_json=as_json)

    def _write_traces(
        self, run_id: str, samples: Sequence[Mapping[str, Any]], directory: Path, *, as_json: bool
    ) -> None:
        """Write what the run recorded of the samples."""
        from flotilla_coordinator.records.traces import traces

        record = directory / ROLLOUTS
        if not record.is_dir():
            raise NotFound(
                f"run {run_id} recorded no samples",
                where=str(record),
                next_step="runs with rollout.record do",
            )
        found = dict(traces(record, {str(sample["sample_id"]) for sample in samples}))
        if not found:
            raise NotFound(f"no such sample of run {run_id} is recorded", where=str(record))
        make_folder_of(self.path)
        write_atomically(
            self.path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found.values())
        )
        missing = len(samples) - len(found)
        if as_json:
            groups = {name.rpartition("/")[0] for name in found}
            left_out = {NOT_RECORDED: missing} if missing else {}
            about = {"run_id": run_id, "file": str(self.path), "to": self.kind.value, "rows": len(found)}
            print_json(about | {"prompts": len(groups), "left_out": left_out})
            return
        print_line(f"{self.path}: {len(found)} traces of samples of run {run_id}")
        if missing:
            say(f"{missing} samples have no trace: {NOT_RECORDED}")

    def _way(self, made: TrainingRows, at_least: float) -> str:
        best = made.best_reward
        if self.kind is Kind.PAIRS or best is None or best >= at_least:
            return "look at the samples: flotilla samples RUN --full"
        return f"the best reward is {best:.4g}: name a lower one by --at-least"

    def _say(self, run_id: str, made: TrainingRows, config: RunConfig | None, *, as_json: bool) -> None:
        if as_json:
            print_json(
                {
                    "run_id": run_id,
                    "file": str(self.path),
                    "to": self.kind.value,
                    "rows": len(made.rows),
                    "prompts": made.prompts,
                    "left_out": dict(made.left_out.most_common()),
                    "by_numbers": made.by_numbers,
                    "longest_prompt": made.longest_prompt,
                }
            )
            return
        unit = "groups" if self.kind is Kind.PAIRS else "prompts"
        print_line(f"{self.path}: {len(made.rows)} rows of {made.prompts} {unit} of run {run_id}")
        if made.left_out:
            say(f"{made.left_out.total()} {unit} have no row: {_left_out(made)}")
        if made.by_numbers:
            say(
                f"the tokens of {made.by_numbers} rows are not on record any more: their numbers are those of the "
                "policy's"
            )
        most = DataConfig.model_fields["max_prompt_tokens"].default
        if made.longest_prompt > most:
            say(f"set data.max_prompt_tokens to at least {made.longest_prompt}: longer prompts are dropped")
        if config is not None and (config.data.apply_chat_template or config.data.system_prompt):
            say(
                "leave out data.apply_chat_template and data.system_prompt: the prompts are as the template wrote them"
            )


def training_file(
    kind: Kind | None,
    path: Path | None,
    *,
    force: bool,
    at_least: float | None,
    best: int | None,
    margin: float | None,
) -> TrainingFile | None:
    """Return the file that the options ask for; None where they ask for none."""
    for own, value, option in (
        (Kind.SFT, at_least, "--at-least"),
        (Kind.SFT, best, "--best"),
        (Kind.PAIRS, margin, "--margin"),
    ):
        if value is not None and kind is not own:
            raise InvalidRequest(f"{option} chooses rows of --to {own}", where=option)
    if (kind is None) != (path is None):
        raise InvalidRequest("--to and -o go together", where="flotilla samples", next_step="name both")
    if kind is None or path is None:
        return None
    if os.path.exists(path) and not force:
        raise AlreadyExists(
            f"{path} would be overwritten", next_step="name another file, or overwrite by --force"
        )
    return TrainingFile(path, kind, at_least, best, margin)


def _left_out(made: TrainingRows) -> str:
    return "; ".join(f"{count}: {reason}" for reason, count in made.left_out.most_common())
