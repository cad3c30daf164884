"""Judges that the fleet holds: what their generators read, which of them is asked, and when none is no verdict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.generator.v1 import generator_pb2_grpc
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core import rpc
from flotilla_core.config import BindConfig, FleetJudgeConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidRequest, Mismatch, Unavailable
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.trust import Credential
from flotilla_data.tokenizer import Tokenizer
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.judges.judge import Judges
from flotilla_testing.chat_model import make_chat_model
from flotilla_testing.credentials import credential
from flotilla_workers.jail.jail import no_jail

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
YES = '{"reason": "polite", "verdict": "yes"}'


class Generator(generator_pb2_grpc.GeneratorServiceServicer):
    """Answers every request with a text, or with an error."""

    def __init__(self, tokenizer: Tokenizer, says: str | FlotillaError) -> None:
        self.requests: list[gen.GenerateRequest] = []
        self.says = says
        self._tokenizer = tokenizer

    async def Generate(
        self, request: gen.GenerateRequest, context: Any
    ) -> AsyncIterator[gen.GenerateResponse]:
        self.requests.append(request)
        if isinstance(self.says, FlotillaError):
            raise self.says
        tokens = to_tensor(np.array(self._tokenizer.encode(self.says), np.int32))
        sample = gen.GeneratedSample(
            sample_id=request.samples[0].sample_id, token_ids=tokens, finish_reason=gen.FINISH_REASON_STOP
        )
        yield gen.GenerateResponse(samples=[sample])

    def read(self) -> str:
        """The text of the only request."""
        (request,) = self.requests
        ids = from_tensor(request.prompt_token_ids).tolist()
        return self._tokenizer.decode(ids, skip_special=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("judge") / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def trusted(tmp_path: Path) -> Iterator[Credential]:
    yield credential(tmp_path)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(0, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


@asynccontextmanager
async def served(generator: Generator, trusted: Credential) -> AsyncIterator[str]:
    """The address of a generator."""
    server = rpc.RpcServer(BindConfig(), credential=trusted)
    name = gen.DESCRIPTOR.services_by_name["GeneratorService"].full_name
    server.add(generator_pb2_grpc.add_GeneratorServiceServicer_to_server, generator, name)
    address = await server.start()
    server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


def judges_in(folder: Path, trusted: Credential, **keys: Any) -> Judges:
    config = FleetJudgeConfig.model_validate({"model": str(folder), "timeout_s": 20, **keys})

    async def folder_of(judge: str) -> Path:
        assert judge == "j"
        return folder

    return Judges({"j": config}, lambda address: rpc.connect(address, credential=trusted), folder_of)


def spec(*addresses: str, stamp: str = "s", digest: str = "") -> pb.RewardSpec:
    held = pb.JudgeGenerators(addresses=addresses, weights_stamps=[stamp], tokenizer_digest=digest)
    found = pb.RewardSpec(reward="judge:j", judge=held)
    found.parameters.update({"rubric": "Is it polite?", "verdicts": {"yes": 1, "no": 0}})
    return found


async def scored(
    judges: Judges, pool: Workers, asked: pb.RewardSpec, response: str = "thanks"
) -> pb.ScoreOutcome:
    terms = scoring.resolve([asked], judges=judges)
    assert not [sign async for sign in scoring.load(terms, pool) if sign.outcomes]
    items = [pb.ScoreItem(sample_id="s0", prompt="Hello", response=response)]
    (outcome,) = [one async for each in scoring.score_items(items, terms, pool) for one in each.outcomes]
    return outcome


def parts(outcome: pb.ScoreOutcome) -> dict[str, float]:
    return {part.name: part.value for part in outcome.value.components[0].parts}


async def test_the_generator_reads_the_judges_own_template_and_decodes_greedily(
    folder: Path, tokenizer: Tokenizer, trusted: Credential, pool: Workers
) -> None:
    generator = Generator(tokenizer, YES)
    async with served(generator, trusted) as address:
        judges = judges_in(folder, trusted, max_tokens=50)
        outcome = await scored(judges, pool, spec(address, digest=tokenizer.digest))
        await judges.close()
    assert outcome.value.components[0].value == 1.0
    (request,) = generator.requests
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, 50)
    assert [*request.sampling.stop_token_ids] == [*tokenizer.eos_ids]
    text = generator.read()
    assert text.startswith("<|im_start|>system\nYou judge") and text.endswith("<|im_start|>assistant\n")
    assert "Is it polite?" in text and "\nthanks\n" in text
    written = from_tensor(request.prompt_token_ids).size + len(tokenizer.encode(YES))
    assert parts(outcome) == {"tokens": written, "kept": 0.0}


async def test_a_template_that_refuses_a_system_message_gets_all_in_that_of_the_user(
    folder: Path, tokenizer: Tokenizer, trusted: Credential, pool: Workers, tmp_path: Path
) -> None:
    own = make_chat_model(tmp_path / "strict")
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": NO_SYSTEM}))
    generator = Generator(tokenizer, YES)
    async with served(generator, trusted) as address:
        judges = judges_in(own, trusted)
        await scored(judges, pool, spec(address))
        await judges.close()
    assert generator.read().startswith("<|im_start|>user\nYou judge")


async def test_a_verdict_is_kept_for_the_same_weights_wherever_they_are_and_for_no_others(
    folder: Path, tokenizer: Tokenizer, trusted: Credential, pool: Workers
) -> None:
    first, second = Generator(tokenizer, YES), Generator(tokenizer, YES.replace("yes", "no"))
    judges = judges_in(folder, trusted)
    async with served(first, trusted) as one, served(second, trusted) as other:
        await scored(judges, pool, spec(one))
        again = await scored(judges, pool, spec(other))
        assert parts(again) == {"tokens": 0.0, "kept": 1.0} and not second.requests
        changed = await scored(judges, pool, spec(other, stamp="new weights"))
        assert changed.value.components[0].value == 0.0
        assert changed.value.components[0].version != again.value.components[0].version
        await judges.close()


async def test_a_generator_that_is_gone_is_passed_over_and_without_any_the_judge_is_away(
    folder: Path, tokenizer: Tokenizer, trusted: Credential, pool: Workers
) -> None:
    draining, well = Generator(tokenizer, Unavailable("the replica is draining")), Generator(tokenizer, YES)
    judges = judges_in(folder, trusted)
    async with served(draining, trusted) as gone, served(well, trusted) as address:
        assert (await scored(judges, pool, spec(gone, address))).value.components[0].value == 1.0
        with pytest.raises(Unavailable, match=r"judge j is away .*generators of judge j.*draining"):
            await scored(judges, pool, spec(gone), "please")
    with pytest.raises(Unavailable, match="judge j is away"):
        await scored(judges, pool, spec(address), "pardon")
    await judges.close()


async def test_what_a_generator_refuses_is_an_error_of_the_sample_and_no_score(
    folder: Path, tokenizer: Tokenizer, trusted: Credential, pool: Workers
) -> None:
    generator = Generator(tokenizer, InvalidRequest("a prompt of 9000 tokens leaves no room for a response"))
    judges = judges_in(folder, trusted)
    async with served(generator, trusted) as address:
        outcome = await scored(judges, pool, spec(address))
        assert "the generators of judge j gave no verdict: a prompt of 9000 tokens" in outcome.error.message
        generator.says = "I think yes"
        outcome = await scored(judges, pool, spec(address))
        assert "gave no verdict, 2 times; it ended with: I think yes" in outcome.error.message
        await judges.close()


async def test_a_call_that_names_no_generator_or_another_tokenizer_scores_nothing(
    folder: Path, trusted: Credential, pool: Workers
) -> None:
    judges = judges_in(folder, trusted)
    with pytest.raises(FailedPrecondition, match="judge j is held by the fleet, which has to run"):
        await scored(judges, pool, spec())
    with pytest.raises(Mismatch, match="another tokenizer than the generators of judge j"):
        await scored(judges, pool, spec("localhost:1", digest="f" * 64))
