"""Implements `flotilla init`, which writes a stack file and a run file for a model, a data set and this host.

Invariants: nothing is written before the model fits on this host and the data can be read, and no file is overwritten
without --force. What is written is loaded from the disk and planned by the code of `flotilla run plan`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.coordinator.v1.run_pb2 import Plan
from flotilla_cli.init_environment import Episodes
from flotilla_cli.init_files import (
    ANSWER_IN_TAGS,
    HELD_OUT_MOST,
    HELD_OUT_SHARE,
    HELDOUT,
    SPLIT_FROM,
    TRAIN,
    Draft,
    Host,
    held_out_of,
    stack_text,
)
from flotilla_cli.options import Json
from flotilla_cli.output import print_json, print_line, say
from flotilla_coordinator.data.training_sets import JoinedSets, read_held_out, read_sets, training_data
from flotilla_coordinator.plan import plan_run
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.placement import placed, seats
from flotilla_coordinator.plan.run_facts import longest_sequence
from flotilla_coordinator.plan.size_limits import host_memory, processor_computes_bfloat16
from flotilla_coordinator.plan.trainer_memory import resident_bytes
from flotilla_core.config import EvaluationConfig, PolicyConfig, RunConfig, StackConfig, load, load_text
from flotilla_core.config.model import data_source
from flotilla_core.errors import AlreadyExists, FlotillaError, InvalidConfig, InvalidRequest, NotFound
from flotilla_core.files import write_atomically
from flotilla_core.generated_tasks import TASKS, TaskSource, is_generated
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import section_of
from flotilla_data.columns import Reads
from flotilla_data.files import data_files
from flotilla_data.formats import no_rows
from flotilla_data.recognition import ANSWERS, PAIRS, Answers, Fields, kind_of_answers, recognised
from flotilla_data.rows import open_rows
from flotilla_data.tokenizer import Tokenizer
from flotilla_launch.gpus import Gpus

if TYPE_CHECKING:
    from flotilla_coordinator.data.prompts import Prompt, PromptFile

FIRST_ROWS = 1000
TAUGHT_BY = {"pairs": ("dpo", "reward_model"), "answers": ("sft",), "prompts": ("grpo",)}
"""The algorithms by what they read from a row, the one to begin with first."""
ANSWER_TOKENS = 16
"""The least of a response that is the answer alone."""
RESPONSE_TOKENS = {"numbers": 512, "formulas": 2048, "marked": 512, "long": 256, "missing": 256, "tasks": 512}
"""The least of other responses by the kind of answers: the way to a number is written as well."""
TASK_ROWS = {True: 2000, False: 500}
"""Rows of a task on a host with GPUs and without: as many as the steps draw, because some tasks take long to make."""
ON_CPU = 4
"""The factor by which they may be shorter on a CPU."""


def init(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Hugging Face folder, or organisation/model.")
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="File, folder, pattern or hub:owner/name.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", metavar="TASK", help="reasoning_gym:TASK in place of data; once for each."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="[FOLDER]",
            show_default="the current one",
            help="Folder for the files.",
            file_okay=False,
        ),
    ] = Path(),
    held_out: Annotated[
        str | None, typer.Option("--heldout", metavar="DATA", help="Held-out data, for evaluations.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="TYPE",
            show_default="dpo for pairs, sft for chats and long answers, else grpo",
            help="grpo, sft, dpo or any other algorithm.type.",
        ),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            "--environment",
            metavar="ENVIRONMENT",
            help="Play episodes: a name, one such as gymnasium:FrozenLake-v1, or path.py:Class; a file that is not "
            "there is written.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files, but no Python file.")] = False,
    as_json: Json = False,
) -> None:
    """Write stack.yaml and run.yaml for a model and data, by the GPUs of this host, and plan the run."""
    _refuse_existing([folder / "stack.yaml", folder / "run.yaml"], force)
    named = tasks or ([data] if data and is_generated(data) else [])
    if bool(data) == bool(tasks) or (named and held_out):
        raise InvalidRequest(
            "name --data or --tasks; tasks bring held-out rows of their own, so --heldout is for other data",
            where="flotilla init",
        )
    if environment and (named or not _plays(algorithm)):
        raise InvalidRequest(
            "an environment plays with rows of --data, by an algorithm that learns from rewards",
            where="--environment",
            next_step="leave --tasks out, and --algorithm or name grpo there",
        )
    made = _tasks(named)
    # A name of the hub is one wherever it is read from now on, and in the files.
    data, held_out = (str(data_source(source or "")) for source in (data, held_out))
    episodes = Episodes.of(environment, folder) if environment else None
    draft = _fitted(_drafted(folder, model, data, held_out, algorithm, made, episodes))
    _refuse_existing([*draft.files], force)
    # A reward that exists is the user's work.
    written = {path: text for path, text in draft.files.items() if path.suffix != ".py" or not path.exists()}
    for path, text in written.items():
        write_atomically(path, text)
    plan, seats = _planned(draft)
    if plan.errors:
        raise InvalidConfig(
            f"{' and '.join(path.name for path in written)} are written, and the run could not start",
            where=str(draft.run),
            why="; ".join(plan.errors),
            next_step="change what is named, then: flotilla run plan run.yaml",
        )
    if as_json:
        print_json(_as_json(draft, plan))
        return
    for path in draft.files:
        print_line(f"wrote {path}" if path in written else f"kept {path}")
    for line in (*_choices(draft), *seats, *(f"warning: {text}" for text in plan.warnings)):
        say(line)
    say("\n  ".join(["next:", *_following(draft)]))


def _plays(algorithm: str | None) -> bool:
    """Return whether an algorithm learns from what a policy answers."""
    return not any(algorithm in TAUGHT_BY[reads] for reads in ("pairs", "answers"))


def _refuse_existing(paths: Sequence[Path], force: bool) -> None:
    found = [str(path) for path in paths if os.path.exists(path)]
    if found and not force:
        raise AlreadyExists(
            f"{' and '.join(found)} would be overwritten",
            next_step="name another folder, or overwrite by --force",
        )


def _tasks(names: Sequence[str]) -> tuple[TaskSource, ...]:
    """Return the tasks of an option, with more rows than a source has by default."""
    try:
        sources = [TaskSource.parse(name) for name in names]
    except ValueError as error:
        raise InvalidRequest(str(error), where="--tasks", next_step=f"write {TASKS}countdown") from None
    for one in sources:
        if one.highest is not None:
            raise InvalidRequest(
                f"{one} names a range of levels, and init writes no data.curriculum",
                where="--tasks",
                next_step=f"name level={one.level}, then write levels and data.curriculum into run.yaml",
            )
    rows = TASK_ROWS[bool(Gpus.of_host().names)]
    return tuple(
        one if re.search(r"[?&]size=", name) else replace(one, size=rows)
        for one, name in zip(sources, names, strict=True)
    )


def _drafted(
    folder: Path,
    model: str,
    data: str,
    held_out: str,
    algorithm: str | None,
    tasks: tuple[TaskSource, ...] = (),
    episodes: Episodes | None = None,
) -> Draft:
    """Look at the model, the data and the host, and choose what the files say."""
    if tasks:
        data, held_out = str(tasks[0]), str(held_out_of(tasks[0]))
        rows = sum(one.size for one in tasks)
        say(f"making {rows:,} rows and those to hold out; some tasks take minutes, and the rows are kept")
    with _named_by(
        "--model", "a folder with config.json, tokenizer.json and *.safetensors, or organisation/model", model
    ):
        found = model_folder(model)
    facts, tokenizer = ModelFacts.read(found), Tokenizer.load(found)
    if episodes is not None:
        algorithm = algorithm or TAUGHT_BY["prompts"][0]
    fields = _look_at(data, "train", "--data", algorithm)
    algorithm = algorithm or TAUGHT_BY[fields.teaches][0]
    held_out = held_out or (data if _has_test_split(data) else "")
    held_out_fields = fields
    if held_out:
        # Held-out prompts of sft are answered and judged, as those of all but pairs.
        held_out_fields = _look_at(held_out, "test", "--heldout", "grpo" if algorithm == "sft" else algorithm)
    _require_answers(fields, held_out_fields, held_out)
    chat = (fields.texts or held_out_fields.texts) and _has_template(tokenizer)
    config = _reading(data, algorithm, fields, chat, facts.longest_sequence, tasks, episodes)
    with _named_by("--data", f"rows with prompts of at most {facts.longest_sequence} tokens"):
        sets = JoinedSets(read_sets(config.data, tokenizer, training_data(config)))
    draft = Draft(
        folder=folder,
        model=model,
        data=data,
        held_out=held_out,
        algorithm=algorithm,
        gangs=_gangs(config),
        fields=fields,
        held_out_fields=held_out_fields,
        chat=chat,
        host=Host(bool(Gpus.of_host().names), processor_computes_bfloat16()),
        parameters=facts.parameters,
        longest_sequence=facts.longest_sequence,
        rows=sets.kept,
        prompt_tokens=0,
        response_tokens=0,
        model_tokens=0,
        answers=None,
        tasks=tasks,
        episodes=episodes,
        split={} if held_out or not fields.prompts else _split(data, sets),
    )
    return _measured(draft, config, sets, tokenizer)


def _has_test_split(source: str) -> bool:
    """Return whether a data set brings held-out rows of its own."""
    try:
        return data_files(Path(source), "test") != data_files(Path(source), "train")
    except FlotillaError:
        return False


def _split(source: str, data: PromptFile) -> dict[str, list[str]]:
    """Return the lines to train and those to hold out; nothing where the rows are too many to copy, or too few.

    A row is held out by a digest of its prompt: rows of one prompt stay together, whatever their order in the file.
    """
    if data.streamed:
        return {}
    by_prompt: dict[bytes, list[int]] = {}
    for prompt in data.prompts:
        digest = blake2b(prompt.token_ids.tobytes(), digest_size=8).digest()
        by_prompt.setdefault(digest, []).append(prompt.index)
    if len(by_prompt) < SPLIT_FROM:
        return {}
    held_out: set[int] = set()
    most = min(HELD_OUT_MOST, data.kept // HELD_OUT_SHARE)
    for digest in sorted(by_prompt):
        if len(held_out) + len(by_prompt[digest]) <= most:
            held_out.update(by_prompt[digest])
    if not held_out:
        return {}
    rows = open_rows(Path(source), "train", None)
    # Times and decimal numbers of columns become text here, as they do for rewards.
    lines = [json.dumps(row.values, default=str) for row in rows.read(range(len(rows)))]
    parts: dict[str, list[str]] = {TRAIN: [], HELDOUT: []}
    for number, line in enumerate(lines):
        parts[HELDOUT if number in held_out else TRAIN].append(line)
    return parts


@contextmanager
def _named_by(option: str, meant: str, value: str = "") -> Iterator[None]:
    """Let an error that speaks of a configuration name the option instead: there is no file yet."""
    try:
        yield
    except FlotillaError as error:
        step = error.next_step
        raise type(error)(
            error.what,
            where=f"{option} {value}" if value else error.where,
            why=error.why,
            next_step=f"name {meant} by {option}" if step.startswith(("set ", "raise ")) else step,
        ) from None


def _look_at(source: str, split: str, option: str, algorithm: str | None) -> Fields:
    """Return the columns of a data set by its first rows, as the algorithm reads them."""
    with _named_by(option, "a file, a folder, a pattern or hub:owner/name"):
        rows = open_rows(Path(source), split, None)
    read = rows.read(range(min(FIRST_ROWS, len(rows))))
    values = [row.values for row in read if row.error is None]
    if not values:
        raise (read[0].error if read else None) or no_rows(source)
    if algorithm is None:
        return recognised(values, source)
    reads = next((reads for reads, taught in TAUGHT_BY.items() if algorithm in taught), "prompts")
    return _with_answers(recognised(values, source, Reads(reads)), algorithm, source, values[0])


def _with_answers(fields: Fields, algorithm: str, source: str, row: dict[str, Any]) -> Fields:
    """Refuse data without the answers from which the algorithm learns."""
    there = f"the rows have {', '.join(sorted(row))}"
    if fields.pairs and not fields.answered:
        raise InvalidConfig(
            f"{algorithm} needs columns {' and '.join(PAIRS)}",
            where=source,
            why=there,
            next_step="rename those with the preferred answer and the other one, or choose another --algorithm",
        )
    if algorithm == "sft" and not fields.answered:
        raise InvalidConfig(
            "sft needs a column with answers",
            where=source,
            why=there,
            next_step=f"rename it to {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}",
        )
    return fields


def _require_answers(fields: Fields, held_out: Fields, source: str) -> None:
    """Refuse held-out data that the reward of the run cannot judge."""
    if fields.answer and not fields.pairs and not held_out.answered:
        raise InvalidConfig(
            "the held-out data have no answers",
            where=source,
            why=f"the training data have them in column {fields.answer!r}",
            next_step="add the column, or leave --heldout out",
        )


def _require_all_answers(prompts: Sequence[Prompt], draft: Draft) -> None:
    """Refuse data of which only some rows have answers: without one there is no reward, and nothing to imitate."""
    without = sum(not prompt.answer.strip() for prompt in prompts)
    if 0 < without < len(prompts):
        raise InvalidConfig(
            f"{without} of the first {len(prompts):,} prompts have no answer",
            where=draft.data,
            why=f"the others have one in column {draft.fields.answer!r}",
            next_step="add the answers, or leave these rows out",
        )


def _has_template(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}])
    except NotFound:
        return False
    return True


def _reading(
    source: str,
    algorithm: str,
    fields: Fields,
    chat: bool,
    longest: int,
    tasks: tuple[TaskSource, ...],
    episodes: Episodes | None,
) -> RunConfig:
    """Return a run that reads the data as the one that is written will."""
    data: dict[str, Any] = {"train": source, "apply_chat_template": chat, "max_prompt_tokens": longest}
    if tasks:
        data["train"] = [{"path": str(one)} for one in tasks]
        data["system_prompt"] = ANSWER_IN_TAGS if chat and algorithm != "sft" else ""
    if not fields.layout:
        data |= {"prompt_field": fields.prompt, "answer_field": fields.answer or "answer"}
    rewards = [{"reward": "exact"}] if _plays(algorithm) and episodes is None else []
    values = {"name": "init", "steps": 1, "data": data, "algorithm": {"type": algorithm}, "rewards": rewards}
    if episodes is not None:
        values["environment"] = {"name": episodes.name}
    return load_text(RunConfig, json.dumps(values), source="--algorithm")


def _gangs(config: RunConfig) -> tuple[str, ...]:
    """Return the sections of the gangs that the algorithm needs beside the policy's."""
    if not isinstance(config.algorithm, PolicyConfig):
        return ()
    if config.algorithm.teachers_needed:
        raise InvalidRequest(
            f"{config.algorithm.type} learns from a teacher, and this command chooses none",
            where="--algorithm",
            next_step="begin with grpo; docs/roles.md says what a teacher needs",
        )
    return tuple(map(section_of, config.algorithm.gangs_beside_the_policy))


def _measured(draft: Draft, config: RunConfig, data: PromptFile, tokenizer: Tokenizer) -> Draft:
    """Choose lengths and the reward by the first prompts, as the model gets them."""
    supervised, limit = config.algorithm.type == "sft", draft.longest_sequence
    prompts = data.prompts if draft.tasks else data.first(FIRST_ROWS)
    if not config.learns_from_pairs:
        if not supervised and not draft.tasks and not draft.episodes:
            _require_all_answers(prompts, draft)
        if (draft.holds_out or not supervised) and not draft.episodes:
            kind = Answers.tasks if draft.tasks else kind_of_answers([prompt.answer for prompt in prompts])
            draft = replace(draft, answers=kind)
    asked = [*prompts, *_held_out_prompts(draft, config, tokenizer)]
    longest = _rounded(max(len(prompt.token_ids) for prompt in asked) * 5 // 4)
    response = min(_response_tokens(draft, prompts, tokenizer), max(limit - longest, limit // 2))
    prompt_tokens = min(longest, limit - response)
    whole = prompt_tokens + response
    if draft.episodes:
        whole = draft.episodes.tokens(prompt_tokens, response)
    if config.learns_from_pairs or supervised:
        whole = max(whole, longest_sequence(config, data))
    return replace(
        draft,
        prompt_tokens=prompt_tokens,
        response_tokens=response,
        model_tokens=min(_rounded(whole), limit),
    )


def _held_out_prompts(draft: Draft, config: RunConfig, tokenizer: Tokenizer) -> Sequence[Prompt]:
    """Return the first held-out prompts where they may be longer than those that are trained.

    A chat is trained from its first answer on, and asked up to its last one.
    """
    if not draft.held_out and not (draft.split and config.algorithm.type == "sft"):
        return ()
    fields = draft.held_out_fields
    columns = {} if fields.layout else {"prompt_field": fields.prompt, "answer_field": fields.answer}
    source = (
        {"data": draft.held_out, "split": "test"}
        if draft.held_out
        else {"data": draft.data, "split": "train"}
    )
    evaluation = EvaluationConfig.model_validate({**source, **columns, "max_prompts": FIRST_ROWS})
    limit = f"rows with prompts of at most {draft.longest_sequence} tokens"
    with _named_by("--heldout" if draft.held_out else "--data", limit):
        sets = read_held_out(config.model_copy(update={"evaluation": evaluation}), tokenizer)
    return [prompt for _, file in sets for prompt in file.prompts]


def _response_tokens(draft: Draft, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> int:
    """Return the length of a response: as long as the answers of the data, or what it takes to arrive at one."""
    if draft.episodes:
        return RESPONSE_TOKENS["missing"] // (1 if draft.host.gpus else ON_CPU)
    longest = max(map(len, tokenizer.encode_many([prompt.answer for prompt in prompts])))
    given = _rounded(longest * 5 // 4 + 1)
    kind = str(draft.answers or "")
    if draft.algorithm == "sft" or kind not in RESPONSE_TOKENS:
        return max(ANSWER_TOKENS, given)
    least = RESPONSE_TOKENS[kind] // (1 if draft.host.gpus else ON_CPU)
    return max(least, given) if kind == "long" else least


def _rounded(tokens: int) -> int:
    """Return the next multiple of 16."""
    return -(-tokens // 16) * 16


def _fitted(draft: Draft) -> Draft:
    """Let adapters learn where all weights of the model cannot; raise where not even these fit."""
    stack = placed(load_text(StackConfig, stack_text(draft), source=str(draft.stack)))
    if draft.host.gpus:
        too_large = bool(seats(stack)[1])
    else:
        facts = ModelFacts.read(model_folder(stack.model))
        too_large = resident_bytes(facts, stack.trainer) > host_memory()
    return replace(draft, adapters=too_large and draft.algorithm != "reward_model")


def _planned(draft: Draft) -> tuple[Plan, list[str]]:
    """Plan what was written, and say who sits on which GPU."""
    # The commands that follow are given in the folder of the files, so the stack's state is there.
    state = json.dumps(str((draft.folder / ".flotilla").absolute()))
    stack = placed(load(StackConfig, [draft.stack], [f"state_dir={state}"], resolve_paths=True))
    plan = plan_run(load(RunConfig, [draft.run], resolve_paths=True), stack)
    return plan, [f"GPU {gpu}: {who}" for gpu, who in seats(stack)[0]]


def _choices(draft: Draft) -> Iterator[str]:
    """Say what was recognised."""
    fields, (reward, why) = draft.fields, draft.reward
    answers = (
        "pairs" if fields.pairs else f"answers from {fields.answer!r}" if fields.answer else "no answers"
    )
    columns = fields.layout or f"prompts from {fields.prompt!r}, {answers}"
    yield f"data: {draft.rows:,} prompts; {columns}"
    if draft.split:
        yield f"held out: {len(draft.split[HELDOUT]):,} of them, written to {HELDOUT}, the others to {TRAIN}"
    elif not draft.held_out:
        yield "held out: none, so nothing shows what the model learns for other prompts; name data by --heldout"
    if reward:
        yield f"reward: {reward}, because {why}"
    if reward.endswith(":reward"):
        yield "rewards.py is a start: read it, and write what you want from a response"
    if draft.episodes:
        yield f"environment: {draft.episodes.name}, which gives the rewards"
    if draft.episodes and draft.episodes.file:
        yield f"{draft.episodes.file} is a start: read it, and write what the policy shall play"
    if draft.adapters:
        yield "lora: adapters learn, because all weights and their moments do not fit on this host"


def _following(draft: Draft) -> list[str]:
    """Return the commands that come next."""
    there = "" if draft.folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(draft.folder))} && "
    first = "reward test run.yaml" if draft.answers else "run plan run.yaml"
    if draft.episodes:
        train = draft.path(TRAIN, of_folder=True) if draft.split else draft.path(draft.data)
        first = f"env test {shlex.quote(draft.episodes.name)} --data {shlex.quote(train)}"
    # The variable would lead these commands to another stack.
    of = " --stack stack.yaml" if os.environ.get("FLOTILLA_STACK") else ""
    return [
        f"{there}flotilla {first}",
        f"flotilla up{of}",
        f"flotilla run start run.yaml --wait{of}",
    ]


def _as_json(draft: Draft, plan: Plan) -> dict[str, Any]:
    return {
        "files": [str(path) for path in draft.files],
        "algorithm": draft.algorithm,
        "prompt_field": draft.fields.prompt,
        "answer_field": draft.fields.answer or None,
        "reward": draft.reward[0] or None,
        "adapters": draft.adapters,
        "warnings": list(plan.warnings),
        "next": _following(draft),
    }
