"""The tokens of an episode are those that were sampled and, between them, what the template writes.

The reference knows nothing of threads or of what was there before: it renders the whole history once, encodes the
whole text at once, and puts the sampled tokens in the place of the turns that it finds there.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from flotilla_coordinator.ledger.records import FinishedSample, TokenSpan
from flotilla_coordinator.rollouts import transcript
from flotilla_coordinator.rollouts.transcript import Transcript
from flotilla_core.errors import InvalidConfig
from flotilla_core.version import Version
from flotilla_data.chat_template import Conversation
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import CHATML, GEMMA, TOOL, assistant, system, user, write_tokenizer

FOLDER = Path(__file__).parent / "templates"
MOST_TURNS = int(os.environ.get("FLOTILLA_TURNS", "180"))
"""Turns of each family that are compared; `make test-load` takes more than a hundred thousand in all."""
TOOLS = [{"type": "function", "function": TOOL}]


@dataclass(frozen=True)
class Family:
    """A family of models: its template, the tokens that end a response, and how it calls a tool."""

    template: str
    ends: tuple[str, ...]
    call: Callable[[str, random.Random], str] | None = None
    system: bool = True
    thinks: bool = False


def _spaced(value: object, chance: random.Random) -> str:
    return json.dumps(value, separators=chance.choice([(",", ":"), (", ", ": "), (" , ", " : ")]))


def _tagged(city: str, chance: random.Random) -> str:
    called = _spaced({"name": "weather", "arguments": {"city": city}}, chance)
    return chance.choice(["<tool_call>{}</tool_call>", "<tool_call>\n{}\n</tool_call>"]).format(called)


def _object(city: str, chance: random.Random) -> str:
    return _spaced({"name": "weather", "parameters": {"city": city}}, chance)


def _list(city: str, chance: random.Random) -> str:
    return "[TOOL_CALLS]" + _spaced([{"name": "weather", "arguments": {"city": city}}], chance)


def _read(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
FAMILIES = {
    "qwen3": Family(_read("qwen3"), CHATML_ENDS, _tagged, thinks=True),
    "hermes": Family(_read("hermes"), ("<|im_end|>",), _tagged),
    "llama3": Family(_read("llama3"), ("<|end_of_text|>", "<|eot_id|>"), _object),
    "mistral": Family(_read("mistral"), ("</s>",), _list, system=False),
    "smollm2": Family(CHATML, CHATML_ENDS),
    "gemma": Family(GEMMA, ("<eos>", "<end_of_turn>"), system=False),
}


@dataclass
class Player:
    """Plays both sides of an episode: the environment, and a policy whose tokens no tokenizer would write."""

    family: Family
    tokenizer: Tokenizer
    backend: Backend
    chance: random.Random
    most: int = 100_000
    played: list[tuple[dict[str, Any], list[int], bool]] = field(default_factory=list)
    """The message of each turn, its tokens, and whether an end token ends them."""

    def __post_init__(self) -> None:
        self.known: dict[str, str] = {}
        self.transcript = Transcript(self.tokenizer, self.render, self.most)
        self.history: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.turns: list[list[int]] = []

    async def render(self, asked: Sequence[Conversation]) -> list[str | InvalidConfig]:
        return self.tokenizer.render_chats(asked)

    async def hear(self, messages: list[dict[str, Any]], *, afresh: bool = False) -> np.ndarray:
        await self.transcript.hear(messages, self.tools, afresh=afresh)
        self.history = messages if afresh else [*self.history, *messages]
        return self.transcript.prompt()

    def write(self, token_ids: list[int], *, truncated: bool = False) -> dict[str, Any]:
        logprobs = -np.arange(1, len(token_ids) + 1, dtype=np.float32)
        spans = (TokenSpan(Version(0, len(self.turns)), 0, len(token_ids)),)
        piece = FinishedSample("s", np.array(token_ids, np.int32), logprobs, "", spans, truncated)
        message = self.transcript.wrote(piece).message
        self.turns.append(token_ids)
        self.history = [*self.history, message]
        self.played.append((message, token_ids, not truncated))
        return message

    def say(self, text: str, *, truncated: bool = False, split: bool = False) -> dict[str, Any]:
        parts = text if split else [text]
        token_ids = [token for part in parts for token in self.tokenizer.encode(part)]
        return self.write(token_ids + ([] if truncated else [self.end]), truncated=truncated)

    @cached_property
    def end(self) -> int:
        """The token that ends a turn where the template writes it."""
        shown = self.tokenizer.render_chat([user("a"), assistant("b")], begin_answer=False)
        return next(
            i for i, end in zip(self.tokenizer.eos_ids, self.tokenizer.end_texts, strict=True) if end in shown
        )

    def expected(self) -> list[int]:
        """Return the tokens of the history by rendering and encoding it once."""
        text = self.tokenizer.render_chat(self.history, tools=self.tools)
        whole = self.backend.encode(text, add_special_tokens=False)
        cuts: list[tuple[int, int, list[int]]] = []
        for place, message in enumerate(self.history):
            for one, token_ids, ended in self.played:
                if one is message:
                    cuts += self._cut(text, place, token_ids, ended)
        tokens: list[int] = []
        done = 0
        for begin, end, token_ids in cuts:
            tokens += [
                i for i, (b, e) in zip(whole.ids, whole.offsets, strict=True) if done <= b and e <= begin
            ]
            tokens += token_ids
            done = end
        return tokens + [i for i, (b, _) in zip(whole.ids, whole.offsets, strict=True) if done <= b]

    def _shown(self, place: int) -> str:
        """Return the text of the first messages of the history; it is asked for again before each further turn."""
        key = json.dumps([self.history[:place], self.tools])
        if key not in self.known:
            self.known[key] = self.tokenizer.render_chat(self.history[:place], tools=self.tools)
        return self.known[key]

    def _cut(
        self, text: str, place: int, token_ids: list[int], ended: bool
    ) -> list[tuple[int, int, list[int]]]:
        """Return where a turn stands in the text, if it stands there as it was sampled."""
        try:
            before = self._shown(place)
        except InvalidConfig:
            return []
        end = self.backend.id_to_token(self.end) or ""
        if not text.startswith(before):
            return []
        stop = text.index(end, len(before))
        said = self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special=False)
        if _meaning(text[len(before) : stop]) != _meaning(said):
            return []
        return [(len(before), stop + len(end) * ended, token_ids)]


def _meaning(said: str) -> object:
    """Return what a turn says, however its spaces and its calls are written."""
    for mark in ("<tool_call>", "[TOOL_CALLS]", '{"name"', '{ "name"'):
        before, found, after = said.partition(mark)
        if found and "</think>" not in after:
            called = (found + after if found.startswith("{") else after).partition("</tool_call>")[0]
            try:
                value = json.loads(called)
            except ValueError:
                continue
            calls = value if isinstance(value, list) else [value]
            if not all(isinstance(call, dict) for call in calls):
                continue
            bare = [{key: part for key, part in call.items() if key != "id"} for call in calls]
            return "".join(before.split()), bare
    return "".join(said.split())


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Player]:
    known: dict[str, tuple[Tokenizer, Backend]] = {}

    def player(name: str, seed: int = 0, most: int = 100_000) -> Player:
        family = FAMILIES[name]
        if name not in known:
            folder = write_tokenizer(tmp_path_factory.mktemp(name), family.template, family.ends)
            known[name] = Tokenizer.load(folder), Backend.from_file(str(folder / "tokenizer.json"))
        return Player(family, *known[name], random.Random(seed), most)

    return player


WORDS = [
    "blue\n",
    "sky",
    "",
    "Paris",
    "☂",
    "é",
    "<tool_call>",
    "日本",
    '{"name": 3}',
    "</think>",
    "[INST]",
    "<|im_start|>",
]


def _text(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 8)))


def _plain(chance: random.Random) -> str:
    return "".join(chance.choices("abc xyz.☂é\n", k=chance.randint(1, 20))) + "."


async def _episode(player: Player) -> None:
    """Play one episode of chance, and compare the tokens before each turn with the reference."""
    chance, family = player.chance, player.family
    player.tools = TOOLS if family.call and chance.random() < 0.7 else None
    opening = [system("Be brief.")] if family.system and chance.random() < 0.5 else []
    said = [*opening, user(_plain(chance))]
    afresh = False
    for _ in range(chance.randint(1, 6)):
        prompt = await player.hear(said, afresh=afresh)
        assert prompt.tolist() == player.expected()
        message = _turn(player)
        called = [
            {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": _plain(chance)}
            for call in message.get("tool_calls", ())
        ]
        said = called or [user(_plain(chance))]
        afresh = chance.random() < 0.15
        if afresh:
            said = _rewritten(player, said)


def _turn(player: Player) -> dict[str, Any]:
    chance, family = player.chance, player.family
    thought = f"<think>\n{_plain(chance)}\n</think>\n\n" if family.thinks and chance.random() < 0.5 else ""
    kind = chance.random()
    if kind < 0.3 and family.call and player.tools:
        return player.say(thought + family.call("Paris é", chance), split=chance.random() < 0.5)
    if kind < 0.5:
        ordinary = [i for i in range(player.tokenizer.vocabulary_size) if i not in player.tokenizer.eos_ids]
        sampled = chance.choices(ordinary, k=chance.randint(1, 12))
        return player.write([*sampled, player.end])
    return player.say(
        # A policy samples at least one token.
        thought + (chance.choice([_plain, _text])(chance) or "a"),
        truncated=chance.random() < 0.2,
        split=chance.random() < 0.5,
    )


def _rewritten(player: Player, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history of which something was rewritten: a summary in its place, or another message of the user."""
    if player.chance.random() < 0.5 or said[0]["role"] == "tool":
        return [user("In short: " + _plain(player.chance))]
    changed = [*player.history]
    place = player.chance.choice([i for i, one in enumerate(changed) if one["role"] == "user"])
    changed[place] = user("Other: " + _plain(player.chance))
    return [*changed, *said]


@pytest.mark.timeout(60 + MOST_TURNS)
@pytest.mark.parametrize("name", FAMILIES)
async def test_context_is_the_render_of_the_history_and_turns_are_as_sampled(
    players: Callable[..., Player], name: str
) -> None:
    turns = branches = 0
    seed = 0
    while turns < MOST_TURNS:
        player, seed = players(name, seed), seed + 1
        await _episode(player)
        trained = [int(token) for one in player.transcript.sequences for token in one.token_ids[one.trained]]
        assert sorted(trained) == sorted(token for turn in player.turns for token in turn)
        _is_consistent(player)
        turns += len(player.turns)
        branches += player.transcript.branches.total()
    assert branches > MOST_TURNS // 20


def _is_consistent(player: Player) -> None:
    """Each turn is trained once, in order within its sequence, with its own numbers and versions."""
    left = dict(enumerate(player.turns))
    for sequence in player.transcript.sequences:
        assert len(sequence.token_ids) == len(sequence.logprobs) == len(sequence.trained)
        assert not sequence.logprobs[~sequence.trained].any()
        assert len(sequence.prompt_token_ids) and sequence.trained[0] and sequence.trained[-1]
        covered = np.zeros(len(sequence.token_ids), np.bool_)
        for span in sequence.spans:
            turn = left.pop(span.version.step)
            assert sequence.token_ids[span.start : span.end].tolist() == turn
            assert sequence.logprobs[span.start : span.end].tolist() == [
                -float(i + 1) for i in range(len(turn))
            ]
            covered[span.start : span.end] = True
        assert (covered == sequence.trained).all()
    assert not left


@pytest.mark.parametrize("name", FAMILIES)
async def test_plain_turns_make_one_sequence(players: Callable[..., Player], name: str) -> None:
    player = players(name)
    for text in ("What colour?", "And that?", "Then?"):
        await player.hear([user(text)])
        player.say("It is blue.", split=True)
    (only,) = player.transcript.sequences
    assert not player.transcript.branches and only.trained.sum() == sum(map(len, player.turns))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
async def test_a_call_and_its_result_go_on_in_one_sequence_however_the_call_is_spaced(
    players: Callable[..., Player], name: str
) -> None:
    player = players(name)
    player.tools = TOOLS
    await player.hear([user("Weather?")])
    assert player.family.call is not None
    message = player.say(player.family.call("Paris", random.Random(5)).replace(":", " :"), split=True)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    await player.hear([{"role": "tool", "tool_call_id": call["id"], "content": "sunny"}])
    player.say("Sunny.")
    assert len(player.transcript.sequences) == 1 and not player.transcript.branches


async def test_a_template_that_drops_reasoning_opens_a_branch(players: Callable[..., Player]) -> None:
    player = players("qwen3")
    await player.hear([user("One?")])
    player.say("<think>\nhm\n</think>\n\n1")
    prompt = await player.hear([user("Two?")])
    assert "hm" not in player.tokenizer.decode(prompt.tolist())
    player.say("<think>\nho\n</think>\n\n2")
    first, second = player.transcript.sequences
    assert player.transcript.branches == {transcript.REASONING: 1}
    assert first.trained.all() and second.trained.all()
    assert second.prompt_token_ids.tolist() == prompt.tolist()
    assert {"branch": "reasoning", "kept": 2} in player.transcript.record


async def test_reasoning_that_the_template_keeps_between_calls_opens_none(
    players: Callable[..., Player],
) -> None:
    player = players("qwen3")
    player.tools = TOOLS
    await player.hear([user("Weather?")])
    message = player.say('<think>\nhm\n</think>\n\n<tool_call>{"name":"weather","arguments":{}}</tool_call>')
    await player.hear([{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}])
    player.say("<think>\nho\n</think>\n\nSunny.")
    assert len(player.transcript.sequences) == 1


async def test_other_reasons_of_branches_are_told_apart(players: Callable[..., Player]) -> None:
    found = []
    for name, wrong in (("history", "h"), ("tools", "t"), ("end_token", "e")):
        player = players("qwen3")
        await player.hear([user("One?")])
        other_end = player.tokenizer.eos_ids[1]
        player.write([*player.tokenizer.encode("1"), other_end if wrong == "e" else player.end])
        player.tools = TOOLS if wrong == "t" else None
        await player.hear([user("In short.")] if wrong == "h" else [user("Two?")], afresh=wrong == "h")
        found.append((name, dict(player.transcript.branches)))
    assert found == [(name, {name: 1}) for name, _ in found]


async def test_turns_that_a_rewritten_history_keeps_are_not_encoded_again(
    players: Callable[..., Player],
) -> None:
    player = players("smollm2")
    await player.hear([user("One?")])
    player.say("blue sky", split=True)
    await player.hear([user("Two?")])
    player.say("Paris", split=True)
    last = player.history[-1]
    prompt = await player.hear([*player.history[:2], user("Other?"), last, user("Three?")], afresh=True)
    sampled = [player.turns[0], player.turns[1]]
    assert player.transcript.branches == {transcript.HISTORY: 1}
    assert prompt.tolist() == player.expected()
    for turn in sampled:
        assert any(prompt.tolist()[i : i + len(turn)] == turn for i in range(len(prompt)))


async def test_a_history_that_is_said_again_whole_goes_on(players: Callable[..., Player]) -> None:
    player = players("llama3")
    await player.hear([user("One?")])
    player.say(" blue ", split=True)
    await player.hear([*player.history, user("Two?")], afresh=True)
    player.say("sky")
    assert len(player.transcript.sequences) == 1 and not player.transcript.branches


async def test_threads_have_histories_of_their_own(players: Callable[..., Player]) -> None:
    player = players("smollm2")
    await player.hear([user("One?")])
    player.say("blue")
    await player.transcript.hear([user("Search.")], thread="searcher")
    piece = FinishedSample("s", np.array([5, 6], np.int32), np.zeros(2, np.float32), "")
    player.transcript.wrote(piece, thread="searcher")
    await player.hear([user("Two?")])
    player.say("sky")
    main, searcher = player.transcript.sequences
    assert main.trained.sum() == len(player.turns[0]) + len(player.turns[1])
    assert searcher.token_ids.tolist() == [5, 6] and player.transcript.branches == {transcript.THREAD: 1}


async def test_a_turn_that_was_cut_off_is_ended_by_context(players: Callable[..., Player]) -> None:
    player = players("gemma")
    await player.hear([user("One?")])
    player.say("blue  ", truncated=True)
    prompt = await player.hear([user("Two?")])
    assert prompt.tolist() == player.expected()
    player.say("sky")
    (only,) = player.transcript.sequences
    after = len(player.turns[0])
    assert only.token_ids[after] == player.end and not only.trained[after]


async def test_a_history_without_room_is_told_of_and_a_huge_one_is_not_encoded(
    players: Callable[..., Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    player = players("smollm2", most=100)
    assert await player.transcript.hear([user("One?")]) in range(1, 100)
    player.say("blue")
    assert await player.transcript.hear([user("sky " * 60)]) == 0
    monkeypatch.setattr(player.tokenizer, "encode", None)
    assert await player.transcript.hear([user("sky " * 10_000)], thread="other") == 0


async def test_what_the_template_refuses_or_leaves_out_is_an_error_that_names_it(
    players: Callable[..., Player],
) -> None:
    with pytest.raises(InvalidConfig, match="refuses the messages"):
        await players("gemma").hear([system("Be brief.")])
    player = players("smollm2")
    player.tools = TOOLS
    with pytest.raises(InvalidConfig, match="leaves out the tool 'weather'"):
        await player.hear([user("Weather?")])
