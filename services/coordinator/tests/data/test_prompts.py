"""Prompts: every mistake in a data file is named, and the order is the same after a restart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import PromptFile, load_prompts
from flotilla_coordinator.data.training_sets import training_data
from flotilla_coordinator.rollouts.scoring import score_item
from flotilla_core.config import DataConfig, RunConfig, TrainingSet
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.generated_tasks import TaskSource
from flotilla_core.structs import to_json
from flotilla_data.chat_template import ChatTemplate
from flotilla_data.files import data_files
from flotilla_data.tokenizer import Tokenizer

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz<>|\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {
        character: index for index, character in enumerate(["<pad>", "<eos>", "<bos>", *CHARACTERS])
    }
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "<eos>"}, "pad_token": "<pad>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = (
        "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def data(tmp_path: Path, *lines: object, **options: object) -> DataConfig:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return DataConfig(train=path, **options)  # type: ignore[arg-type]


def numbers(tmp_path: Path, count: int, **options: object) -> DataConfig:
    return data(
        tmp_path, *({"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(count)), **options
    )


@pytest.mark.parametrize("path", ["/nowhere/train.jsonl", f"/{'x' * 300}", "/x" * 2500])
def test_data_file_that_no_file_system_has_is_refused(path: str) -> None:
    with pytest.raises(InvalidConfig, match="the data file"):
        data_files(Path(path), "train")


def test_a_text_prompt_keeps_its_answer_and_other_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = PromptSource(numbers(tmp_path, 3, order="as_written"), tokenizer, seed=1)
    prompt = [source.next() for _ in range(3)][2]
    assert (prompt.index, prompt.prompt_text, prompt.answer, prompt.info) == (2, "2+1=", "3", {"level": 2})
    assert prompt.token_ids.dtype == "int32"
    assert prompt.token_ids.tolist() == tokenizer.encode("2+1=", special=True)
    assert prompt.token_ids[0] == 2, "a bare text begins with the tokenizer's begin token"


def test_messages_are_rendered_once_by_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    config = data(tmp_path, {"prompt": messages})
    (prompt,) = load_prompts(config.train, config, tokenizer).prompts
    assert prompt.prompt_text == "<bos><user>1+1=<assistant>"
    assert prompt.token_ids.tolist().count(2) == 1, "the template's begin token is not doubled"
    config = data(tmp_path, {"prompt": "1+1="}, apply_chat_template=True)
    assert load_prompts(config.train, config, tokenizer).prompts[0].prompt_text == prompt.prompt_text


@pytest.mark.parametrize(
    ("row", "options", "chat", "column"),
    [
        ({"answer": 4}, {}, [], {"answer": 4}),
        ({"solution": [4]}, {"answer_field": "solution"}, [], {"solution": [4]}),
        ({"reward_model": {"ground_truth": "4"}}, {}, [], {"reward_model.ground_truth": "4"}),
        ({"answer": 2**60}, {}, [], {"answer": str(2**60)}),
        ({"prompt": [{"role": "user", "content": "1"}]}, {}, [{"role": "user", "content": "1"}], {}),
        ({}, {"apply_chat_template": True}, [{"role": "user", "content": "1+1="}], {}),
    ],
)
def test_a_prompt_keeps_its_messages_and_its_answer_as_the_row_has_it_for_functions_of_trl(
    tmp_path: Path,
    tokenizer: Tokenizer,
    row: dict[str, Any],
    options: dict[str, Any],
    chat: list[Any],
    column: dict[str, Any],
) -> None:
    config = data(tmp_path, {"prompt": "1+1="} | row, **options)
    (prompt,) = load_prompts(config.train, config, tokenizer).prompts
    assert (prompt.chat, prompt.answer_column) == (chat, column)
    item = score_item("a", prompt, "2")
    assert to_json(item.answer_column) == column
    assert [(one.role, one.content) for one in item.chat] == [(one["role"], one["content"]) for one in chat]


def test_epochs_follow_each_other_in_new_orders(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = PromptSource(numbers(tmp_path, 50), tokenizer, seed=7)
    epochs = [[source.next() for _ in range(50)] for _ in range(3)]
    orders = [tuple(prompt.index for prompt in epoch) for epoch in epochs]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 3
    assert [{prompt.epoch for prompt in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    other_seed = PromptSource(numbers(tmp_path, 50), tokenizer, seed=8)
    assert tuple(other_seed.next().index for _ in range(50)) != orders[0]


def test_the_order_is_the_same_on_every_machine(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = PromptSource(numbers(tmp_path, 8), tokenizer, seed=3)
    assert [source.next().index for _ in range(8)] == [2, 4, 0, 6, 1, 7, 5, 3]


@pytest.mark.parametrize("drawn", [0, 1, 9, 10, 11, 37])
def test_a_restored_cursor_goes_on_exactly(tmp_path: Path, tokenizer: Tokenizer, drawn: int) -> None:
    source = PromptSource(numbers(tmp_path, 10), tokenizer, seed=5)
    for _ in range(drawn):
        source.next()
    cursor = json.loads(json.dumps(source.cursor))
    restored = PromptSource(numbers(tmp_path, 10), tokenizer, seed=5)
    restored.restore(cursor)
    following = [(p.epoch, p.index) for p in (source.next() for _ in range(25))]
    assert [(p.epoch, p.index) for p in (restored.next() for _ in range(25))] == following


def test_a_cursor_of_other_data_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cursor = PromptSource(numbers(tmp_path, 10), tokenizer, seed=5).cursor
    with pytest.raises(FailedPrecondition, match="does not fit the data"):
        PromptSource(numbers(tmp_path, 11), tokenizer, seed=5).restore(cursor)


def mixture(
    tmp_path: Path, sizes: dict[str, int], weights: dict[str, float], **options: object
) -> DataConfig:
    sets = []
    for name, size in sizes.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"{name}{i}=", "level": -i}) + "\n" for i in range(size))
        )
        sets.append(TrainingSet(path=path, weight=weights[name]))
    return DataConfig(train=tuple(sets), **options)  # type: ignore[arg-type]


def test_a_mixture_draws_by_weight_and_goes_through_every_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = mixture(tmp_path, {"a": 5, "b": 400}, {"a": 3.0, "b": 1.0})
    source = PromptSource(config, tokenizer, seed=1)
    drawn = [source.next() for _ in range(400)]
    of_a = [prompt for prompt in drawn if prompt.data_set == "a"]
    assert 270 <= len(of_a) <= 330
    assert [prompt.epoch for prompt in of_a] == [place // 5 for place in range(len(of_a))]
    assert all({p.index for p in of_a[e : e + 5]} == set(range(5)) for e in range(0, len(of_a) - 5, 5))
    of_b = [prompt for prompt in drawn if prompt.data_set == "b"]
    assert {prompt.index for prompt in of_b} <= set(range(5, 405)) and len({p.index for p in of_b}) == len(
        of_b
    )
    assert len({(prompt.epoch, prompt.index) for prompt in drawn}) == 400, "so group ids differ"
    again = PromptSource(config, tokenizer, seed=1)
    assert [again.next().index for _ in range(400)] == [prompt.index for prompt in drawn]


@pytest.mark.parametrize("drawn", [0, 1, 7, 40])
def test_a_mixture_goes_on_exactly_where_its_cursor_was_taken(
    tmp_path: Path, tokenizer: Tokenizer, drawn: int
) -> None:
    config = mixture(tmp_path, {"a": 3, "b": 4, "c": 11}, {"a": 1.0, "b": 2.0, "c": 0.5})
    source = PromptSource(config, tokenizer, seed=5)
    for _ in range(drawn):
        source.next()
    restored = PromptSource(config, tokenizer, seed=5)
    restored.restore(json.loads(json.dumps(source.cursor)))
    following = [(p.epoch, p.index, p.data_set) for p in (source.next() for _ in range(30))]
    assert [(p.epoch, p.index, p.data_set) for p in (restored.next() for _ in range(30))] == following


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_whose_solved_prompts_rest_goes_on_behind_what_was_drawn(
    tmp_path: Path, tokenizer: Tokenizer, seed: int
) -> None:
    chance = random.Random(seed)
    config = mixture(tmp_path, {"a": 3, "b": 7, "c": 11}, {"a": 1.0, "b": 2.0, "c": 0.5}, rest_epochs=7)
    source = PromptSource(config, tokenizer, seed=seed)
    outcomes = []
    for _ in range(chance.randrange(60)):
        prompt = source.next()
        outcomes.append((prompt.epoch, prompt.index, chance.random() < 0.6))
        source.note(prompt.epoch, prompt.index, solved=outcomes[-1][2], reward=0.0)
    cursor = json.loads(json.dumps(source.cursor))
    since = [(p.epoch, p.index) for p in (source.next() for _ in range(chance.randrange(20)))]

    restored = PromptSource(config, tokenizer, seed=seed)
    restored.restore(cursor)
    restored.pass_by(since)
    for epoch, index, solved in outcomes:
        restored.note(epoch, index, solved=solved, reward=0.0)
    following = [(p.epoch, p.index) for p in (source.next() for _ in range(40))]
    assert [(p.epoch, p.index) for p in (restored.next() for _ in range(40))] == following
    assert len({*following, *since}) == len(following) + len(since)


def rising(tmp_path: Path, tokenizer: Tokenizer, *others: TrainingSet, **curriculum: object) -> PromptSource:
    """Three levels of five prompts each, whose rows lie in files in place of being made."""

    def load(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
        level = TaskSource.parse(path).level
        file = tmp_path / f"{level}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{level}x{i}="}) + "\n" for i in range(5)))
        return load_prompts(file, config, tokenizer)

    levels = TrainingSet(path="reasoning_gym:sums?levels=0-2")  # type: ignore[arg-type]
    config = DataConfig(train=(levels, *others), curriculum=curriculum)  # type: ignore[arg-type]
    return PromptSource(config, tokenizer, seed=1, load=load)


def test_levels_rise_by_step_and_the_last_one_stays(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rising(tmp_path, tokenizer, every_steps=3)
    drawn = [source.next(step) for step in range(12) for _ in range(2)]
    assert [prompt.data_set for prompt in drawn[::2]] == [f"sums.{min(step // 3, 2)}" for step in range(12)]
    of_last = [(prompt.epoch, prompt.index) for prompt in drawn if prompt.data_set == "sums.2"]
    assert len(set(of_last)) == len(of_last) and {index for _, index in of_last} == set(range(10, 15))


def test_the_levels_of_a_data_set_have_its_share_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = TrainingSet(path="reasoning_gym:words?level=7", weight=3)  # type: ignore[arg-type]
    source = rising(tmp_path, tokenizer, other, every_steps=100)
    drawn = [source.next(step).data_set for step in range(300)]
    assert 190 <= drawn.count("words.7") <= 260
    assert {*drawn[:100]} == {"sums.0", "words.7"} and {*drawn[200:]} == {"sums.2", "words.7"}


def test_levels_rise_by_the_rewards_of_the_level_that_is_drawn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rising(tmp_path, tokenizer, reward=0.5, prompts=4)

    def step(*rewards: float) -> str:
        drawn = [source.next() for _ in rewards]
        for prompt, reward in zip(drawn, rewards, strict=True):
            source.note(prompt.epoch, prompt.index, solved=False, reward=reward)
        return drawn[0].data_set

    late = source.next()
    assert step(0.1, 0.9, 0.9) == "sums.0"
    assert step(0.0) == "sums.0", "the mean of the last four is 0.475"
    assert step(0.9) == "sums.0", "that of 0.9, 0.9, 0.0 and 0.9 is more"
    source.note(late.epoch, late.index, solved=False, reward=-1000.0)
    assert step(0.5, 0.5, 0.5, 0.4) == "sums.1", "what the level before still brings counts for nothing"
    assert step(0.6) == "sums.1"
    assert step(*[1.0] * 9) == "sums.2" and step(1.0) == "sums.2"


@pytest.mark.parametrize("drawn", [0, 3, 8, 30])
def test_a_restart_reaches_the_same_level_by_the_same_outcomes(
    tmp_path: Path, tokenizer: Tokenizer, drawn: int
) -> None:
    source = rising(tmp_path, tokenizer, reward=0.6, prompts=5)
    chance, outcomes = random.Random(drawn), []
    for _ in range(drawn):
        prompt = source.next()
        outcomes.append((prompt.epoch, prompt.index, chance.random()))
        source.note(prompt.epoch, prompt.index, solved=False, reward=outcomes[-1][2])
    restored = rising(tmp_path, tokenizer, reward=0.6, prompts=5)
    restored.restore(json.loads(json.dumps(source.cursor)))
    for epoch, index, reward in outcomes:
        restored.note(epoch, index, solved=False, reward=reward)
    following = [(p.epoch, p.index) for p in (source.next() for _ in range(12))]
    assert [(p.epoch, p.index) for p in (restored.next() for _ in range(12))] == following


def test_the_first_set_keeps_the_order_that_it_has_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = mixture(tmp_path, {"a": 8, "b": 8}, {"a": 1.0, "b": 1.0})
    source = PromptSource(config, tokenizer, seed=3)
    drawn = [source.next() for _ in range(40)]
    assert [prompt.index for prompt in drawn if prompt.data_set == "a"][:8] == [2, 4, 0, 6, 1, 7, 5, 3]


def test_a_cursor_of_a_single_file_without_sets_is_still_understood(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = PromptSource(numbers(tmp_path, 10), tokenizer, seed=5)
    drawn = [source.next().index for _ in range(14)]
    source.restore({"epoch": 1, "position": 2, "data": "edca8a91df3ddf44"})
    assert source.next().index == drawn[12]


def test_a_curriculum_ascends_by_its_field_in_every_epoch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = mixture(tmp_path, {"a": 4}, {"a": 1.0}, order="by_field", difficulty_field="level")
    source = PromptSource(config, tokenizer, seed=1)
    assert [source.next().index for _ in range(8)] == [3, 2, 1, 0] * 2
    assert source.known(7, 3).prompt_text == "a3=" and source.known(7, 3).epoch == 7


@pytest.mark.parametrize(
    ("level", "what"), [('"hard"', "not a number"), ("true", "not a number"), (None, "missing")]
)
def test_a_curriculum_needs_a_number_in_every_row(
    tmp_path: Path, tokenizer: Tokenizer, level: str | None, what: str
) -> None:
    second = '{"prompt": "2"}' if level is None else f'{{"prompt": "2", "level": {level}}}'
    config = data(tmp_path, {"prompt": "1", "level": 1}, second, order="by_field", difficulty_field="level")
    with pytest.raises(InvalidConfig, match=rf"column 'level' is {what} \(.*line 2\)"):
        PromptSource(config, tokenizer, seed=1)


def choosing(field: str) -> RunConfig:
    advantage = {"teachers": {"math": 1, "code": 1}, "teacher_field": field}
    algorithm = {"type": "distillation", "advantage": advantage}
    return RunConfig.model_validate(
        {"name": "run", "steps": 1, "data": {"train": "train.jsonl"}, "algorithm": algorithm}
    )


def test_a_prompt_has_the_teacher_that_its_column_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1", "domain": "code"}, {"prompt": "2", "domain": "math"}]
    config = data(tmp_path, *rows)
    loaded = training_data(choosing("domain"))(config.train, config, tokenizer).prompts
    assert [prompt.teacher for prompt in loaded] == ["teacher-code", "teacher-math"]
    assert loaded[0].info == {"domain": "code"}
    assert {prompt.teacher for prompt in load_prompts(config.train, config, tokenizer).prompts} == {""}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "2"}, "is missing"),
        ({"prompt": "2", "domain": "maths"}, "is the text 'maths', which names no teacher of the run"),
        ({"prompt": "2", "domain": ["math"]}, "is a list, which names no teacher of the run"),
        ({"prompt": "2", "domain": None}, "is nothing, which names no teacher of the run"),
    ],
)
def test_a_prompt_without_a_teacher_of_the_run_is_refused_before_it_is_drawn(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, object], what: str
) -> None:
    right = {"prompt": "1", "domain": "code"}
    first = tmp_path / "first.jsonl"
    first.write_text(json.dumps(right))
    second = data(tmp_path, right, row).train
    assert isinstance(second, Path)
    config = DataConfig(train=(TrainingSet(path=first), TrainingSet(path=second)))
    with pytest.raises(InvalidConfig) as caught:
        PromptSource(config, tokenizer, seed=1, load=training_data(choosing("domain")))
    said = str(caught.value)
    assert f"column 'domain' {what}" in said and f"({second}, line 2)" in said
    assert "algorithm.advantage.teachers names math, code" in said


def test_overlong_prompts_are_dropped_truncated_or_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"prompt": "1+1="}, {"prompt": "100000+100000="}]
    config = data(tmp_path, *lines, max_prompt_tokens=6)
    dropped = load_prompts(config.train, config, tokenizer)
    assert (len(dropped.prompts), dropped.dropped, dropped.truncated) == (1, 1, 0)
    config = data(tmp_path, *lines, max_prompt_tokens=6, overlong_prompts="truncate")
    cut = load_prompts(config.train, config, tokenizer)
    assert (len(cut.prompts), cut.dropped, cut.truncated) == (2, 0, 1)
    assert tokenizer.decode(cut.prompts[1].token_ids) == "00000="
    config = data(tmp_path, *lines, max_prompt_tokens=6, overlong_prompts="error")
    with pytest.raises(InvalidConfig, match=r"15 tokens, more than data.max_prompt_tokens = 6 \(.*line 2\)"):
        load_prompts(config.train, config, tokenizer)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "1"}, "{not json"], r"the line is not JSON \(.*line 2\).* write one JSON object a line"),
        (["prompt,answer", "1+1,2"], r"the line is not JSON \(.*line 1\).* which ends in .parquet"),
        ([{"prompt": "1"}, "", "[1]"], r"not a JSON object \(.*line 3\): it is a list"),
        ([{"question": "1"}], r"column 'prompt' is missing \(.*line 1\): the line has question"),
        ([{"prompt": 3}], r"neither text nor a list of chat messages \(.*line 1\)"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            r"a part that is not text \(.*line 1\): it is 'image'",
        ),
        (
            [{"prompt": [{"role": "user", "content": [{"text": "What is this?"}, {"image": "cat.png"}]}]}],
            r"a part that is not text \(.*line 1\): it is 'image'",
        ),
        (
            [{"prompt": [{"role": "user", "content": {"text": "a part without a list"}}]}],
            r"a part that is not text \(.*line 1\): it is 'dict'",
        ),
        ([{"prompt": ""}], r"the prompt is empty \(.*line 1\)"),
        ([], r"the data set has no rows"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Tokenizer, lines: list[object], message: str) -> None:
    config = data(tmp_path, *lines)
    with pytest.raises(InvalidConfig, match=message):
        load_prompts(config.train, config, tokenizer)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"prompt": "1+1="}'), ("a.json", '[{"prompt": "1+1="}]')]
)
def test_a_mark_of_utf8_before_the_first_row_is_read_past(
    tmp_path: Path, tokenizer: Tokenizer, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    loaded = load_prompts(tmp_path / name, DataConfig(train=tmp_path / name), tokenizer)
    assert [prompt.prompt_text for prompt in loaded.prompts] == ["1+1="]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = DataConfig(train=tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidConfig, match=r"does not exist \(.*nowhere.jsonl\)"):
        load_prompts(config.train, config, tokenizer)


def test_a_template_that_refuses_says_why(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('no system role') }}", {}, where="model")
    with pytest.raises(InvalidConfig, match="no system role"):
        template.render([{"role": "system", "content": ""}])


def test_a_template_cannot_reach_pythons_insides() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}, where="model")
    with pytest.raises(InvalidConfig, match="unsafe"):
        template.render([])


def test_published_template_constructs_work() -> None:
    source = (
        "{%- for m in messages %}\n{%- if loop.index0 == 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{%- endfor %}"
    )
    rendered = ChatTemplate(source, {}, where="model").render([{"role": "user", "content": "<a&b>"}, {}])
    assert rendered.strip() == '{"role": "user", "content": "<a&b>"}'


def test_data_sets_of_one_name_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = numbers(tmp_path, 2).train
    config = DataConfig(train=(TrainingSet(path=path), TrainingSet(path=path)))  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="several data sets are called 'train'"):
        PromptSource(config, tokenizer, seed=1)
