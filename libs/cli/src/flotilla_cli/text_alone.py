"""Reads the rows of a trial where no model is: what is text already needs none.

Invariant: nothing is made up. A prompt has no token ids, so none is too long, and no reward sees any. A chat, which the
template of a model writes, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_data.chat_template import Conversation
from flotilla_data.tokenizer import Tokenizer


class TextAlone(Tokenizer):
    """Stands where the tokenizer of a model would, and refuses what takes one."""

    def __init__(self, refusal: NotFound) -> None:
        self.folder = Path()
        self.digest = ""
        self._refusal = refusal

    def encode_many(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Return no tokens for each text."""
        return [[] for _ in texts]

    def render_chats(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Refuse: the text of a chat is the model's."""
        raise self._refusal
