"""The scheduler that hands out whole samples says what vLLM's own says token by token, to the bit.

Through all that can happen to a request: prompts in pieces, preemption, a cache that is emptied with tokens on their
way, stops, aborts, pauses. A step that ends no sample says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from flotilla_core.config.generators import GeneratorConfig
from flotilla_generator.engine.vllm.boot import prepare_environment
from flotilla_testing.stack import example_model

if TYPE_CHECKING:
    from scheduler_twins import Twins


@pytest.fixture(scope="module")
def twins_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Twins]:
    prepare_environment(GeneratorConfig())
    from scheduler_twins import LONGEST, Twins, engine_config

    model = example_model(tmp_path_factory.mktemp("model"), positions=LONGEST)
    return partial(Twins, engine_config(model))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["one step at a time", "a step ahead"])
@pytest.mark.parametrize("seed", range(6))
def test_whole_samples_are_those_that_vllm_tells_token_by_token(
    twins_of: Callable[..., Twins], asynchronous: bool, seed: int
) -> None:
    twins = twins_of(asynchronous=asynchronous, seed=seed, newer_runner=seed % 2 == 1)
    streams = seed % 3 == 2
    random = np.random.default_rng(seed)
    for number in range(24):
        stream = streams and number % 5 == 0
        twins.add(str(number), int(random.integers(1, 56)), client=number % 2, stream=stream)
        for _ in range(int(random.integers(0, 8))):
            twins.step()
        living = [name for name in twins.ours.requests if not twins.expected[name].end]
        match random.integers(0, 8):
            case 0 if living:
                twins.abort(str(random.choice(living)))
            case 1:
                twins.pause(empty_cache=bool(random.integers(0, 2)))
            case 2 if living:
                twins.pause(empty_cache=True, aborted=(str(random.choice(living)),))
            case 3:
                twins.empty_cache()  # with tokens on their way, where steps overlap
    twins.finish()
    assert len(twins.expected) == 24 and twins.preemptions
    for name, expected in twins.expected.items():
        heard, streamed = twins.heard[name], streams and int(name) % 5 == 0
        assert (heard.tokens, heard.end) == (expected.tokens, expected.end), name
        if streamed:
            assert heard.bits == expected.bits and name not in twins.records
            continue
        record = twins.records[name]
        assert heard.messages == 1 and not heard.logprobs
        assert record.logprobs.tobytes() == expected.bits
        assert [position for _, position in record.resumed] == twins.resumed[name]
        assert (record.first_token_at is None) == (not expected.tokens)


def test_all_is_left_to_a_vllm_that_was_not_tested(
    twins_of: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for release, left in (((0, 25, 1), True), ((0, 32, 9), False), ((0, 33, 0), True)):
        caplog.clear()
        monkeypatch.setattr("vllm.__version_tuple__", release)
        twins = twins_of(asynchronous=True, seed=0)
        assert ("allocate_slots" not in vars(twins.ours.kv_cache_manager)) == left
        assert ("was not tested" in caplog.text) == left
        twins.add("0", 20)
        twins.finish()
        assert twins.heard["0"].tokens == twins.expected["0"].tokens != []


def test_the_last_sample_says_how_many_wait(twins_of: Callable[..., Twins]) -> None:
    twins = twins_of(asynchronous=False, seed=0)
    for number in range(6):
        twins.add(str(number), 2)
    twins.step()
    twins.pause(empty_cache=False, aborted=("0",))
    assert twins.records["0"].waiting == 2
