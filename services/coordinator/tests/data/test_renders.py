"""Who asks for a render while another one is under way shares the next call, and its errors with nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from flotilla_coordinator.data.renders import Renders
from flotilla_core.errors import FailedPrecondition
from flotilla_data.chat_template import Conversation
from flotilla_testing.chat_templates import user


class Template:
    """Renders a text as itself, and is held up until it may go on."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.go_on = asyncio.Event()

    async def render_chats_beside(self, asked: Sequence[Conversation]) -> list[str]:
        self.calls.append(len(asked))
        async with asyncio.timeout(10):
            await self.go_on.wait()
        texts = [str(one.messages[0]["content"]) for one in asked]
        if "endless" in texts:
            raise FailedPrecondition("the chat template passes its bounds")
        if "broken" in texts:
            raise KeyError("broken")
        return texts


def of(*texts: str) -> list[Conversation]:
    return [Conversation([user(text)]) for text in texts]


async def asked(template: Template, *several: Sequence[str]) -> list[Any]:
    made: Any = template
    renders = Renders(made)
    works = [asyncio.create_task(renders(of(*texts))) for texts in several]
    while not template.calls:
        await asyncio.sleep(0)
    template.go_on.set()
    return await asyncio.gather(*works, return_exceptions=True)


async def test_all_that_wait_share_a_call_and_get_their_own_texts() -> None:
    template = Template()
    assert await asked(template, ["a"], ["b", "c"], [], ["d"]) == [["a"], ["b", "c"], [], ["d"]]
    assert len(template.calls) <= 2 and sum(template.calls) == 4


async def test_an_error_is_that_of_who_caused_it() -> None:
    first, failed, last = await asked(Template(), ["a"], ["endless"], ["b"])
    assert (first, last) == (["a"], ["b"]) and isinstance(failed, FailedPrecondition)


async def test_a_defect_leaves_nobody_waiting() -> None:
    found = await asked(Template(), ["a"], ["broken"])
    assert any(isinstance(one, KeyError) for one in found) and len(found) == 2


async def test_a_cancelled_asker_costs_the_others_nothing() -> None:
    template = Template()
    made: Any = template
    renders = Renders(made)
    gone, stays = (asyncio.create_task(renders(of(text))) for text in "ab")
    while not template.calls:
        await asyncio.sleep(0)
    gone.cancel()
    template.go_on.set()
    assert await stays == ["b"]
    with pytest.raises(asyncio.CancelledError):
        await gone
