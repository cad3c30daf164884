"""Rows of many programs teach what their writers mean, seen in the tokens that the trainer gets and in their masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.training_sets import training_data
from flotilla_coordinator.rollouts.source import SupervisedSource
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import RunConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing import chat_templates as templates
from flotilla_testing.chat_templates import CALL, CALLING, TOOL, assistant, system, user

Row = dict[str, Any]
Models = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return the tokenizer of a model with a template, made once."""
    made: dict[str, Tokenizer] = {}

    def one(template: str) -> Tokenizer:
        if template not in made:
            made[template] = Tokenizer.load(
                templates.write_tokenizer(tmp_path_factory.mktemp("model"), template)
            )
        return made[template]

    return one


def sent(
    rows: list[Row], tokenizer: Tokenizer, source: Path, algorithm: str = "sft", **data: Any
) -> list[str]:
    """Return the samples of the first row as the trainer gets them, with what is learned in [+ +]."""
    if source.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"name": "r", "steps": 1, "algorithm": {"type": algorithm}}
    config = RunConfig.model_validate(values | {"data": {"train": source, "order": "as_written"} | data})
    prompts = PromptSource(config.data, tokenizer, seed=1, load=training_data(config))
    batch = asyncio.run(SupervisedSource("run", prompts, 1).batch(1, Version(1, 0)))
    fill(message := pb.TrainGroup(), batch.groups[0])
    return [marked(message, sample, tokenizer) for sample in message.samples]


def marked(group: pb.TrainGroup, sample: pb.TrainSample, tokenizer: Tokenizer) -> str:
    tokens = from_tensor(sample.token_ids)
    learned = from_tensor(sample.mask) if sample.mask.data else np.ones(len(tokens), np.bool_)
    assert learned.shape == tokens.shape and learned.dtype == np.bool_
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(tokens)]
    parts = [tokenizer.decode(from_tensor(group.prompt_token_ids).tolist(), skip_special=False)]
    for begin, end in pairwise(edges):
        text = tokenizer.decode(tokens[begin:end].tolist(), skip_special=False)
        parts.append(f"[+{text}+]" if learned[begin] else text)
    return "".join(parts)


QUESTION, SYSTEM = "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>system\n"
DEFAULT = f"{SYSTEM}You are a helpful AI assistant.<|im_end|>\n"
BRIEF = f"{SYSTEM}Be brief.<|im_end|>\n"
BLUE, GREEN = "[+Blue.<|im_end|>+]", "[+Green.<|im_end|>+]"
GRASS = "\n<|im_start|>user\nGrass?<|im_end|>\n<|im_start|>assistant\n"
TURNS = [user("Sky?"), assistant("Blue."), user("Grass?"), assistant("Green.")]
PAIR = [DEFAULT + QUESTION + BLUE, DEFAULT + QUESTION + GREEN]
CHOSEN = {"chosen": [assistant("Blue.")], "rejected": [assistant("Green.")]}
LAYOUTS: dict[str, tuple[str, Row, list[str]]] = {
    "TRL: text": ("sft", {"text": "The sky is blue."}, ["The[+ sky is blue.<|im_end|>+]"]),
    "TRL: messages": ("sft", {"messages": TURNS[:2]}, [DEFAULT + QUESTION + BLUE]),
    "TRL: prompt and completion": (
        "sft",
        {"prompt": "The sky is", "completion": " blue."},
        ["The sky is[+ blue.<|im_end|>+]"],
    ),
    "TRL: prompt and completion of messages": (
        "sft",
        {"prompt": [user("Sky?")], "completion": [assistant("Blue.")]},
        [DEFAULT + QUESTION + BLUE],
    ),
    "TRL: a completion of several turns, after a turn in the prompt": (
        "sft",
        {"prompt": [user("Hi?"), assistant("Hm."), user("Sky?")], "completion": TURNS[1:]},
        [
            f"{DEFAULT}<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHm.<|im_end|>\n"
            + QUESTION
            + BLUE
            + GRASS
            + GREEN
        ],
    ),
    "TRL: preference": (
        "dpo",
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        ["The sky is[+ blue.<|im_end|>+]", "The sky is[+ green.<|im_end|>+]"],
    ),
    "TRL: preference of messages": ("dpo", {"prompt": [user("Sky?")], **CHOSEN}, PAIR),
    "TRL: preference without a prompt": (
        "dpo",
        {"chosen": "The sky is blue.", "rejected": "The sky is green.", "score": 1.0},
        ["The sky is[+ blue.<|im_end|>+]", "The sky is[+ green.<|im_end|>+]"],
    ),
    "TRL: whole chats as a preference": (
        "dpo",
        {"chosen": TURNS[:2], "rejected": [user("Sky?"), assistant("Green.")]},
        PAIR,
    ),
    "whole chats that differ from an earlier turn on": (
        "dpo",
        {"chosen": TURNS, "rejected": [user("Sky?"), assistant("Green.")]},
        [DEFAULT + QUESTION + BLUE + GRASS + GREEN, DEFAULT + QUESTION + GREEN],
    ),
    "ultrafeedback: whole chats beside their prompt": (
        "dpo",
        {
            "prompt": "Sky?",
            "score_chosen": 8.5,
            "messages": TURNS[:2],
            "chosen": TURNS[:2],
            "rejected": [user("Sky?"), assistant("Green.")],
        },
        PAIR,
    ),
    "hh-rlhf: dialogues as text": (
        "dpo",
        {"chosen": "\n\nHuman: Sky?\n\nAssistant: Blue.", "rejected": "\n\nHuman: Sky?\n\nAssistant: Blank."},
        [
            "\n\nHuman: Sky?\n\nAssistant:[+ Blue.<|im_end|>+]",
            "\n\nHuman: Sky?\n\nAssistant:[+ Blank.<|im_end|>+]",
        ],
    ),
    "OpenAI: several turns": (
        "sft",
        {"messages": [system("Be brief."), *TURNS]},
        [BRIEF + QUESTION + BLUE + GRASS + GREEN],
    ),
    "OpenAI: instructions of a developer": (
        "sft",
        {"messages": [{"role": "developer", "content": "Be brief."}, *TURNS[:2]]},
        [BRIEF + QUESTION + BLUE],
    ),
    "OpenAI: a turn of weight 0": (
        "sft",
        {
            "messages": [
                user("Sky?"),
                assistant("Blue.", weight=0),
                user("Grass?"),
                assistant("Green.", weight=1),
            ]
        },
        [DEFAULT + QUESTION + "Blue.<|im_end|>" + GRASS + GREEN],
    ),
    "OpenAI: content in parts": (
        "sft",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "S"}, {"type": "text", "text": "ky?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
            ]
        },
        [DEFAULT + QUESTION + BLUE],
    ),
    "OpenAI: preference": (
        "dpo",
        {
            "input": {"messages": [user("Sky?")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [assistant("Blue.")],
            "non_preferred_output": [assistant("Green.")],
        },
        PAIR,
    ),
    "ShareGPT": (
        "sft",
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "Sky?"},
                {"from": "gpt", "value": "Blue."},
                {"from": "human", "value": "Grass?"},
                {"from": "gpt", "value": "Green."},
            ],
        },
        [BRIEF + QUESTION + BLUE + GRASS + GREEN],
    ),
    "ShareGPT: preference": (
        "dpo",
        {
            "conversations": [{"from": "human", "value": "Sky?"}],
            "chosen": {"from": "gpt", "value": "Blue."},
            "rejected": {"from": "gpt", "value": "Green."},
        },
        PAIR,
    ),
    "Alpaca": (
        "sft",
        {"instruction": "Name the colour.", "input": "Sky?", "output": "Blue."},
        ["Name the colour.\n\nSky?[+Blue.<|im_end|>+]"],
    ),
    "ultrachat: the first prompt beside the chat": (
        "sft",
        {"prompt": "Sky?", "prompt_id": "0", "messages": TURNS},
        [DEFAULT + QUESTION + BLUE + GRASS + GREEN],
    ),
    "verl: chats": (
        "sft",
        {"messages": TURNS, "tools": None, "enable_thinking": False},
        [DEFAULT + QUESTION + BLUE + GRASS + GREEN],
    ),
    "verl: rows of a reward": (
        "sft",
        {
            "data_source": "x",
            "prompt": [user("Sky?")],
            "reward_model": {"style": "rule", "ground_truth": "Blue."},
        },
        [DEFAULT + QUESTION + BLUE],
    ),
    "verl: a question and its answer beside others": (
        "sft",
        {"data_source": "x", "extra_info": {"index": 0, "question": "1+1=", "answer": "So #### 2"}},
        ["1+1=[+So #### 2<|im_end|>+]"],
    ),
    "a class beside an answer": (
        "sft",
        {"prompt": "1+1=", "answer": "2", "label": 3},
        ["1+1=[+2<|im_end|>+]"],
    ),
    "a number as the answer": ("sft", {"prompt": "1+1=", "answer": 2}, ["1+1=[+2<|im_end|>+]"]),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_teaches_what_its_writer_means(
    layout: str, ending: str, tmp_path: Path, model: Models
) -> None:
    algorithm, row, expected = LAYOUTS[layout]
    found = sent([row], model(templates.CHATML), tmp_path / f"rows.{ending}", algorithm)
    assert found == expected


ANSWERED = [*CALLING, assistant("Sunny.")]
CALLED = [
    '[+<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>+]',
    "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n[+Sunny.<|im_end|>+]",
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("tools", [[{"type": "function", "function": TOOL}], json.dumps([TOOL]), None])
def test_calls_of_tools_are_learned_as_the_template_writes_them(
    tools: object, ending: str, tmp_path: Path, model: Models
) -> None:
    row = {"messages": ANSWERED} | ({"tools": tools} if tools else {})
    (found,) = sent([row], model(templates.QWEN25), tmp_path / f"rows.{ending}")
    prompt, *learned = found.partition("[+")
    assert "".join(learned) == "".join(CALLED)
    assert ('{"type": "function", "function": {"name": "weather"' in prompt) == bool(tools)


def test_calls_of_functions_in_old_files_are_the_same(tmp_path: Path, model: Models) -> None:
    chat = [
        ANSWERED[0],
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "weather", "content": "sunny"},
        ANSWERED[3],
    ]
    (found,) = sent(
        [{"messages": chat, "functions": [TOOL]}], model(templates.QWEN25), tmp_path / "rows.jsonl"
    )
    assert found.endswith("".join(CALLED)) and '{"type": "function", "function": {"name": "weather"' in found


def test_calls_in_sharegpts_files_are_the_same(tmp_path: Path, model: Models) -> None:
    chat = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ]
    (found,) = sent([{"conversations": chat}], model(templates.QWEN25), tmp_path / "rows.jsonl")
    assert found.endswith("".join(CALLED))


SAID = ("Paris.", "Rome.")
CHAT = [user("Of France?"), assistant(SAID[0]), user("Of Italy?"), assistant(SAID[1])]
WRITTEN = {
    "QWEN25": "<|im_end|>",
    "LLAMA3": "<|eot_id|>",
    "MISTRAL": "</s>",
    "GEMMA": "<end_of_turn>",
    "PHI3": "<|end|>",
    "VICUNA": "</s>",
    "CHATML": "<|im_end|>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_turns_with_their_ends_are_learned_and_nothing_else(name: str, tmp_path: Path, model: Models) -> None:
    tokenizer = model(getattr(templates, name))
    (found,) = sent([{"messages": CHAT}], tokenizer, tmp_path / "rows.jsonl")
    learned = [part.partition("+]")[0] for part in found.split("[+")[1:]]
    assert learned == [f"{text}{WRITTEN[name]}" for text in SAID]
    whole = tokenizer.render_chat(CHAT, begin_answer=False)
    assert whole.startswith(found.replace("[+", "").replace("+]", ""))


def test_a_template_that_rewrites_history_gets_a_sequence_for_each_turn(
    tmp_path: Path, model: Models
) -> None:
    chat = [
        user("2+2?"),
        assistant("4", reasoning_content="Two twice."),
        user("3+3?"),
        assistant("<think>\nThree twice.\n</think>\n\n6"),
    ]
    begin = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert sent([{"messages": chat}], model(templates.QWEN3), tmp_path / "rows.jsonl") == [
        f"{begin}[+<think>\nTwo twice.\n</think>\n\n4<|im_end|>+]",
        f"{begin}4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
        "[+<think>\nThree twice.\n</think>\n\n6<|im_end|>+]",
    ]


def test_a_template_without_ends_gets_a_sequence_for_each_turn_which_ends(
    tmp_path: Path, model: Models
) -> None:
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    assert sent([{"messages": TURNS}], model(template), tmp_path / "rows.jsonl") == [
        "Sky? [+Blue.</s>+]",
        "Sky? Blue. Grass? [+Green.</s>+]",
    ]


THINKS = {"messages": [user("2+2?"), assistant("4", reasoning_content="Two twice.")]}
REFUSED: dict[str, tuple[str, str, Row, str, Row]] = {
    "a mapping as the answer": (
        "CHATML",
        "sft",
        {"prompt": "a", "answer": {"text": "b"}},
        "neither text nor a list of chat messages",
        {"prompt": "a", "answer": "b"},
    ),
    "a list of texts as the answer": (
        "CHATML",
        "sft",
        {"prompt": "a", "answer": ["b"]},
        "write what the model should answer as text",
        {"prompt": "a", "answer": [assistant("b")]},
    ),
    "a flag as the answer": (
        "CHATML",
        "sft",
        {"prompt": "a", "answer": True},
        "it is a bool",
        {"prompt": "a", "answer": "true"},
    ),
    "no answer": (
        "CHATML",
        "sft",
        {"prompt": "a"},
        r"column 'answer' is missing.*data\.answer_field",
        {"prompt": "a", "answer": "b"},
    ),
    "a chat without an answer": (
        "CHATML",
        "sft",
        {"messages": [user("a")]},
        "no turn of the assistant to learn",
        {"messages": [user("a"), assistant("b")]},
    ),
    "a chat that begins with an answer": (
        "CHATML",
        "sft",
        {"messages": [assistant("a"), user("b"), assistant("c")]},
        'give this message "weight": 0',
        {"messages": [assistant("a", weight=0), user("b"), assistant("c")]},
    ),
    "tools that the template leaves out": (
        "CHATML",
        "sft",
        {"messages": [user("a"), assistant("b")], "tools": [TOOL]},
        "leaves out the tool 'weather'.*describe the tools in a system message",
        {"messages": [system("You may call weather(city)."), user("a"), assistant("b")]},
    ),
    "calls that the template leaves out": (
        "CHATML",
        "sft",
        {"messages": ANSWERED},
        "leaves out a part of a call.*write the call into its message",
        {"messages": [user("a"), assistant('weather(city="Paris")'), *ANSWERED[2:]]},
    ),
    "calls in the prompt that the template leaves out": (
        "CHATML",
        "dpo",
        {"prompt": ANSWERED[:3], **CHOSEN},
        "leaves out a part of a call.*write the call into",
        {"prompt": [user("a"), assistant('weather(city="Paris")'), ANSWERED[2]], **CHOSEN},
    ),
    "thoughts that the template leaves out": (
        "CHATML",
        "sft",
        THINKS,
        "what an assistant thought.*between <think> and </think>",
        {"messages": [user("2+2?"), assistant("<think>Two twice.</think>4")]},
    ),
    "thoughts that the template takes away": (
        "R1",
        "sft",
        {"messages": [user("2+2?"), assistant("<think>\nTwo twice.\n</think>4")]},
        "does not write column 'messages' after the prompt.*write the answer as text",
        {"prompt": [user("2+2?")], "answer": "Two twice.\n</think>4"},
    ),
    "a system message that the template refuses": (
        "GEMMA",
        "sft",
        {"messages": [system("Be brief."), user("a"), assistant("b")]},
        "System role not supported.*may go into the first user's message",
        {"messages": [user("Be brief.\na"), assistant("b")]},
    ),
    "a system message that the template leaves out": (
        "VICUNA",
        "sft",
        {"messages": [system("Be brief."), user("a"), assistant("b")]},
        "a message of 'system'.*write this into a message that the template keeps",
        {"messages": [user("Be brief.\na"), assistant("b")]},
    ),
    "an end token inside an answer": (
        "CHATML",
        "sft",
        {"messages": [user("a"), assistant("b<|im_end|>c")]},
        "leaves out a part of column 'messages'",
        {"prompt": [user("a")], "answer": "b<|im_end|>c"},
    ),
    "messages and an answer beside them": (
        "CHATML",
        "sft",
        {"prompt": [user("a"), assistant("b")], "answer": "c"},
        "leave the last message out",
        {"prompt": [user("a")], "answer": "c"},
    ),
    "half a weight": (
        "CHATML",
        "sft",
        {"messages": [user("a"), assistant("b", weight=0.5)]},
        "the weight of a message is 0.5",
        {"messages": [user("a"), assistant("b", weight=1)]},
    ),
    "an unknown speaker": (
        "CHATML",
        "sft",
        {"conversations": [{"from": "narrator", "value": "a"}]},
        "from 'narrator'.*human",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ),
    "earlier turns in Alpaca's history": (
        "CHATML",
        "sft",
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        "to a column messages",
        {"messages": [user("c"), assistant("d"), user("a"), assistant("b")]},
    ),
    "a preference whose prompt has another name": (
        "CHATML",
        "dpo",
        {"question": "a", "chosen": "I say b", "rejected": "I say c"},
        r"data\.prompt_field",
        {"prompt": "a", "chosen": "I say b", "rejected": "I say c"},
    ),
    "a prompt that both chats leave out": (
        "CHATML",
        "dpo",
        {
            "prompt": "Be brief.",
            "chosen": [user("a"), assistant("b")],
            "rejected": [user("a"), assistant("c")],
        },
        "is not in the messages with which both answers begin.*leave out one",
        {"prompt": "Be brief. a", "chosen": [assistant("b")], "rejected": [assistant("c")]},
    ),
    "a call that is no call": (
        "QWEN25",
        "sft",
        {"messages": [user("a"), assistant("", tool_calls=5)]},
        "a call of a tool names no function",
        {"messages": [user("a"), assistant("", tool_calls={"name": "f", "arguments": {}})]},
    ),
    "a speaker that is no text": (
        "CHATML",
        "sft",
        {"conversations": [{"from": ["human"], "value": "a"}]},
        "neither text nor a list of chat messages",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ),
    "a role that is no text": (
        "CHATML",
        "sft",
        {"messages": [{"role": ["user"], "from": "human", "value": "a"}]},
        "neither text nor a list of chat messages",
        {"messages": [user("a"), assistant("b")]},
    ),
    "turns of a pair that history changes": (
        "QWEN3",
        "dpo",
        {"chosen": TURNS, "rejected": [user("Sky?"), assistant("Green.")]},
        "put everything before the last message into the prompt",
        {"prompt": TURNS[:3], "chosen": [assistant("Green.")], "rejected": [assistant("Red.")]},
    ),
    "tools of running text": (
        "QWEN25",
        "sft",
        {"messages": [user("a"), assistant("b")], "tools": "hammer, nails"},
        "the tools are a text that is not JSON.*as its JSON text",
        {"messages": [user("a"), assistant("b")], "tools": json.dumps(TOOL)},
    ),
    "unpaired preferences for dpo": (
        "CHATML",
        "dpo",
        {"prompt": "a", "completion": "b", "label": True},
        "column 'chosen' is missing.*keep the good answers",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_learned_is_refused_with_a_way_that_works(
    case: str, tmp_path: Path, model: Models
) -> None:
    template, algorithm, row, said, followed = REFUSED[case]
    tokenizer = model(getattr(templates, template))
    with pytest.raises(InvalidConfig, match=said) as caught:
        sent([row], tokenizer, tmp_path / "rows.jsonl", algorithm)
    assert "rows.jsonl, line 1" in str(caught.value) and caught.value.next_step
    assert all("[+" in text for text in sent([followed], tokenizer, tmp_path / "rows.jsonl", algorithm))


def test_a_pair_that_goes_on_from_its_prompt_keeps_it(tmp_path: Path, model: Models) -> None:
    begun = [assistant("Blue."), user("Grass?")]
    row: Row = {
        "prompt": "Sky?",
        "chosen": [*begun, assistant("Green.")],
        "rejected": [*begun, assistant("Red.")],
    }
    for text in sent([row], model(templates.CHATML), tmp_path / "rows.jsonl", "dpo"):
        assert QUESTION.removeprefix("<|im_start|>") in text


def test_a_judge_of_whole_answers_gets_no_mask(tmp_path: Path, model: Models) -> None:
    row = {"chosen": TURNS, "rejected": [user("Sky?"), assistant("Green.")]}
    first, _ = sent([row], model(templates.CHATML), tmp_path / "rows.jsonl", "reward_model")
    assert first.startswith(f"{DEFAULT}{QUESTION}[+Blue.<|im_end|>\n") and first.endswith(GREEN[2:])


def test_long_prompts_lose_their_beginning_and_keep_all_that_is_learned(
    tmp_path: Path, model: Models
) -> None:
    data = {"max_prompt_tokens": 5, "overlong_prompts": "truncate"}
    (found,) = sent([{"messages": TURNS}], model(templates.CHATML), tmp_path / "rows.jsonl", **data)
    assert found.endswith("assistant\n" + BLUE + GRASS + GREEN)
    assert "Sky?" not in found
