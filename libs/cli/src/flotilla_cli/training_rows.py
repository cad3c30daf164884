"""Makes rows to learn from of a run's samples: answers for `sft`, and pairs of answers for `dpo` and `reward_model`.

Invariants: the code that reads rows for these algorithms has read each row, and made of it the tokens that the policy
read and wrote; every other sample is left out for a reason with a name. Where the tokens are not on record any more,
their numbers are compared. A response that a stop text ended gets the end token. Equal rows are written once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from flotilla_coordinator.data.given import GivenAnswers
from flotilla_coordinator.data.prompts import LeftOut, Made, PromptMaker
from flotilla_core.config import DataConfig, RunConfig
from flotilla_core.terminal import visible_json
from flotilla_data.columns import Columns, Reads
from flotilla_data.rows import Row
from flotilla_data.tokenizer import Tokenizer

Values = dict[str, Any]
AT_ONCE = 512
LONGEST = 10_000_000
FACTS = ("turn", "tokens", "versions", "cut_off", "unparsed", "state", "thread")
"""Keys of a message in the record of an episode that are no part of the message."""
NO_REWARD = "no sample has a reward"
CUT_OFF = "the response was cut off"
CUT_PROMPT = "the prompt was cut, or the number of its tokens is not known"
OTHER_TOKENS = "the text gives other tokens than those that the policy read and wrote"
FORGOTTEN = "the conversation of the episode is not on record any more"
REWRITTEN = "the history of the episode was rewritten, so no single chat has its turns"
OTHER_TOOLS = "both episodes have different tools"
TOOLS = "the record of the episode does not describe its tools"
ALONE = "there is no other sample to compare with"
EQUAL_REWARDS = "all rewards are equal"
REPEATED = "equal to another row"


class Choice(NamedTuple):
    """Says which samples become rows."""

    pairs: bool
    at_least: float
    """The least reward of an answer to learn."""
    best: int
    """The most answers to learn of one prompt."""
    margin: float
    """The least difference of the rewards of a pair."""


@dataclass
class Draft:
    """A row before it is written."""

    sample: Mapping[str, Any]
    """The sample whose answer is learned, or preferred."""
    row: Values = field(default_factory=dict)
    facts: Values = field(default_factory=dict)
    """The columns that no algorithm reads."""
    reason: str = ""
    """The reason why it is left out; empty where it is not."""
    by_numbers: bool = False
    """True where the numbers of tokens were compared alone."""
    prompt_tokens: int = 0

    @property
    def key(self) -> str:
        """The text of what is learned."""
        return json.dumps(self.row, sort_keys=True)


@dataclass
class TrainingRows:
    """The rows of a run's samples."""

    rows: list[Values] = field(default_factory=list)
    prompts: int = 0
    """The number of prompts, or of the groups of pairs, that have a row."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The number of those that have none, by reason."""
    by_numbers: int = 0
    """The number of rows of which the numbers of tokens were compared alone."""
    longest_prompt: int = 0
    """The most tokens of a prompt."""
    best_reward: float | None = None
    """The best reward of all samples."""

    def text(self) -> str:
        """Return the rows as JSON Lines."""
        return "".join(visible_json(row) + "\n" for row in self.rows)


def training_rows(
    samples: Sequence[Mapping[str, Any]], choice: Choice, tokenizer: Tokenizer, config: RunConfig | None
) -> TrainingRows:
    """Return the rows of samples, prompt by prompt."""
    plays = config is not None and config.environment is not None
    sampling = None if config is None else config.rollout.sampling
    stops = sampling is not None and bool(sampling.stop or sampling.stop_token_ids)
    reader = _Reader(tokenizer, plays=plays, stops=stops)
    drafts = [Draft(sample, reason=_why_unasked(sample, choice)) for sample in samples]
    reader.judge([draft for draft in drafts if not draft.reason])
    own = [sorted(one, key=_reward, reverse=True) for one in _by_prompt(drafts, choice.pairs)]
    if choice.pairs:
        own = [[_pair(one, choice.margin)] for one in own]
        reader.judge_pairs([one[0] for one in own if not one[0].reason])
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    made = TrainingRows(best_reward=max(rewards, default=None))
    seen: set[str] = set()
    for one in own:
        _take(one, made, seen, 1 if choice.pairs else choice.best)
    return made


def _take(drafts: Sequence[Draft], made: TrainingRows, seen: set[str], most: int) -> None:
    """Add the first rows of a prompt that no other row is equal to, at most so many."""
    good = [draft for draft in drafts if not draft.reason]
    taken: list[Draft] = []
    for draft in good:
        if len(taken) < most and draft.key not in seen:
            seen.add(draft.key)
            taken.append(draft)
    if not taken:
        made.left_out[REPEATED if good else drafts[0].reason] += 1
        return
    made.prompts += 1
    made.rows += [draft.row | draft.facts for draft in taken]
    made.by_numbers += sum(draft.by_numbers for draft in taken)
    made.longest_prompt = max(made.longest_prompt, *(draft.prompt_tokens for draft in taken))


def _why_unasked(sample: Mapping[str, Any], choice: Choice) -> str:
    if sample["reward"] is None:
        return NO_REWARD
    if not choice.pairs and sample["reward"] < choice.at_least:
        return f"no reward of at least {choice.at_least:g}"
    return ""


def _reward(draft: Draft) -> tuple[bool, float]:
    """Return the key that drafts are sorted by; those without a reward are behind all others."""
    reward = draft.sample["reward"]
    return reward is not None, reward or 0.0


def _by_prompt(drafts: Iterable[Draft], of_group: bool) -> list[list[Draft]]:
    """Divide drafts by their prompts, or by the groups of samples that were drawn together."""
    found: dict[Hashable, list[Draft]] = {}
    for draft in drafts:
        found.setdefault(_place(draft.sample, of_group), []).append(draft)
    return [*found.values()]


def _place(sample: Mapping[str, Any], of_group: bool) -> Hashable:
    # Rows of many environments differ, and the texts of their prompts do not; a loop of a client numbers its own.
    if "prompt_index" in sample:
        return sample["prompt"], sample.get("set"), sample["prompt_index"], of_group and sample["step"]
    group = str(sample["sample_id"]).rpartition("/")[0]
    return sample["prompt"], group if of_group else group.rpartition("/")[2]


def _pair(drafts: Sequence[Draft], margin: float) -> Draft:
    """Return the pair of the best and the worst sample of a group, or the reason why there is none."""
    good = [draft for draft in drafts if not draft.reason]
    bad = next((draft.reason for draft in drafts if draft.reason), ALONE)
    if len(good) < 2:
        return Draft(drafts[0].sample, reason=bad)
    chosen, rejected = good[0], good[-1]
    rewards = [float(one.sample["reward"]) for one in (chosen, rejected)]
    difference = rewards[0] - rewards[1]
    if not difference:
        return Draft(chosen.sample, reason=EQUAL_REWARDS)
    if difference < margin:
        return Draft(chosen.sample, reason=f"the rewards differ by less than {margin:g}")
    if chosen.row.get("tools") != rejected.row.get("tools"):
        return Draft(chosen.sample, reason=OTHER_TOOLS)
    column = "messages" if "messages" in chosen.row else "answer"
    prompt = {name: value for name, value in chosen.row.items() if name != column}
    return Draft(
        chosen.sample,
        prompt | {"chosen": chosen.row[column], "rejected": rejected.row[column]},
        {"chosen_reward": rewards[0], "rejected_reward": rewards[1]},
        by_numbers=chosen.by_numbers or rejected.by_numbers,
    )


class _Reader:
    """Reads rows as a run reads its data, and compares what it makes of them with the samples."""

    def __init__(self, tokenizer: Tokenizer, *, plays: bool, stops: bool) -> None:
        self._tokenizer = tokenizer
        self._plays = plays
        self._stops = stops
        self._prompts: dict[tuple[str, int], tuple[str, list[int]]] = {}
        """The prompts so far with their tokens, by text and number of tokens."""
        self._first = tokenizer.decode(tokenizer.encode("", special=True), skip_special=False)

    def judge(self, drafts: Sequence[Draft]) -> None:
        """Give each draft its row, or the reason why its sample can have none."""
        for draft in drafts:
            self._write(draft)
        written = [draft for draft in drafts if not draft.reason]
        for draft, made in zip(written, self._read(written, Reads.answers), strict=True):
            draft.reason = _why_refused(made) if isinstance(made, LeftOut) else self._fault(draft, made)
            draft.prompt_tokens = 0 if isinstance(made, LeftOut) else len(made.prompt.token_ids)

    def judge_pairs(self, drafts: Sequence[Draft]) -> None:
        """Give each pair that cannot be compared the reason."""
        for draft, made in zip(drafts, self._read(drafts, Reads.pairs), strict=True):
            draft.reason = _why_refused(made) if isinstance(made, LeftOut) else ""
            draft.prompt_tokens = 0 if isinstance(made, LeftOut) else len(made.prompt.token_ids)

    def _read(self, drafts: Sequence[Draft], reads: Reads) -> list[Made | LeftOut]:
        config = DataConfig(train=Path("rows.jsonl"), max_prompt_tokens=LONGEST)
        given = GivenAnswers(config, self._tokenizer, reads)
        found: list[Made | LeftOut] = []
        for start in range(0, len(drafts), AT_ONCE):
            some = drafts[start : start + AT_ONCE]
            columns = Columns.of(config, some[0].row, reads)
            maker = PromptMaker(columns, config, self._tokenizer, reads, (given,))
            found += maker.make(
                [Row(n, draft.sample["sample_id"], draft.row) for n, draft in enumerate(some)]
            )
        return found

    def _write(self, draft: Draft) -> None:
        sample, tokens = draft.sample, draft.sample.get("token_ids")
        draft.by_numbers = tokens is None
        draft.facts = {"reward": sample["reward"], "sample_id": sample["sample_id"]}
        if sample["truncated"]:
            draft.reason = CUT_OFF
        elif episode := sample.get("episode"):
            draft.row, draft.reason = _chat(episode)
        elif self._plays:
            draft.reason = FORGOTTEN
        elif not self._prompt(sample)[1]:
            draft.reason = CUT_PROMPT
        else:
            draft.row = {
                "prompt": self._prompt(sample)[0],
                "answer": self._answer(sample["response"], tokens),
            }

    def _prompt(self, sample: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return the text that is read as a prompt, and its tokens; none where they are not all of the prompt."""
        text, count = sample["prompt"], sample["prompt_tokens"]
        if (text, count) not in self._prompts:
            plain, rendered = (self._tokenizer.encode(text, special=special) for special in (True, False))
            # What the template wrote has its special tokens already: a plain text would get them again.
            own = (text, plain) if len(plain) == count else (text.removeprefix(self._first), rendered)
            self._prompts[text, count] = own if len(own[1]) == count else ("", [])
        return self._prompts[text, count]

    def _answer(self, response: str, tokens: Sequence[int] | None) -> str:
        """Return the text of a response; what is shown of it lacks special tokens, and what follows a stop text."""
        if tokens is None:
            return response
        own = [*tokens]
        ended = own[-1:] == [self._tokenizer.eos_id]
        return self._tokenizer.decode(own[:-1] if ended else own, skip_special=False)

    def _fault(self, draft: Draft, made: Made) -> str:
        """Return why a row is not what the policy read and wrote; empty where it is."""
        sample, given = draft.sample, made.prompt.given
        if len(given) != 1:
            return REWRITTEN
        got = given[0].token_ids.tolist()
        marks = [True] * len(got) if given[0].trained is None else given[0].trained.tolist()
        if not self._is_written(sample, got):
            return OTHER_TOKENS
        if episode := sample.get("episode"):
            own = [entry["tokens"] for entry in episode["messages"] if entry.get("tokens")]
            learned = [len([*run]) for mark, run in groupby(marks) if mark]
            if learned:  # The end token that the reader added is no token of the policy.
                learned[-1] -= len(got) - _tokens(sample)
            return "" if learned == own else OTHER_TOKENS
        return "" if made.prompt.token_ids.tolist() == self._prompt(sample)[1] else OTHER_TOKENS

    def _is_written(self, sample: Mapping[str, Any], got: list[int]) -> bool:
        """Return whether tokens are those of the response, with the end token where none ended it."""
        tokens = sample.get("token_ids")
        if tokens is None:
            return len(got) in (_tokens(sample), _tokens(sample) + self._stops)
        return got in ([*tokens], [*tokens, self._tokenizer.eos_id])


def _tokens(sample: Mapping[str, Any]) -> int:
    """Return the number of tokens of a response; the answers of an evaluation have another name for it."""
    return int(sample.get("tokens", sample.get("response_tokens")) or 0)


def _why_refused(left_out: LeftOut) -> str:
    return "the row is refused" if left_out.error is None else left_out.error.what


def _chat(episode: Mapping[str, Any]) -> tuple[Values, str]:
    """Return the row of an episode, or the reason why its messages do not tell what the policy read."""
    entries = episode["messages"]
    if episode["branches"] != 1:
        return {}, REWRITTEN
    tools: list[Any] = next((entry["tools"] for entry in entries if "tools" in entry), [])
    if any(isinstance(tool, str) for tool in tools):  # An earlier release recorded names.
        return {}, TOOLS
    if any(entry.get("cut_off") for entry in entries):
        return {}, CUT_OFF
    messages = []
    for entry in entries:
        if "role" in entry:
            message = {name: value for name, value in entry.items() if name not in FACTS}
            # An environment may show what others answered.
            given = entry["role"] == "assistant" and "turn" not in entry
            messages.append(message | ({"weight": 0} if given else {}))
    return {"messages": messages} | ({"tools": tools} if tools else {}), ""
