"""Renders the conversations of many episodes together, beside the event loop.

Invariants: who asks while a call is under way shares the next one. An error is that of the conversations that caused
it: where a call of several fails, each of them is asked for alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_data.chat_template import Conversation
from flotilla_data.tokenizer import Tokenizer

Texts = list[str | InvalidConfig]


@dataclass(frozen=True)
class _Asked:
    conversations: Sequence[Conversation]
    done: asyncio.Future[Texts]


class Renders:
    """Calls the chat template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[_Asked] = []
        self._under_way: list[_Asked] = []
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, conversations: Sequence[Conversation]) -> Texts:
        """Return the text of each conversation, or why the template refuses it."""
        asked = _Asked(conversations, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._work is None:
            self._begin()
        return await asked.done

    def _begin(self) -> None:
        self._work = asyncio.create_task(self._answer_all(), name="render")
        self._work.add_done_callback(self._ended)

    async def _answer_all(self) -> None:
        while self._waiting:
            self._under_way, self._waiting = self._waiting, []
            await self._answer([asked for asked in self._under_way if not asked.done.done()])

    def _ended(self, work: asyncio.Task[None]) -> None:
        error = None if work.cancelled() else work.exception()
        for asked in self._under_way:
            if error is not None and not asked.done.done():
                asked.done.set_exception(error)
        self._under_way, self._work = [], None
        if self._waiting:  # who asked after the last look
            self._begin()

    async def _answer(self, together: list[_Asked]) -> None:
        flat = [one for asked in together for one in asked.conversations]
        try:
            texts = iter(await self._tokenizer.render_chats_beside(flat))
        except FlotillaError as error:
            if len(together) > 1:
                for asked in together:
                    await self._answer([asked])
            elif not together[0].done.done():
                together[0].done.set_exception(error)
            return
        for asked in together:
            own = [next(texts) for _ in asked.conversations]
            if not asked.done.done():
                asked.done.set_result(own)
