"""Samples that end at a text: the engine has no tokenizer of its own, so the scheduler asks here.

A token is decoded only if it may complete one of the texts. Which tokens may is worked out once for a set of texts,
from the text of every token of the vocabulary: those that hold the last character of a text, or a part of a character.
Then the last tokens of the response are decoded with it, as the coordinator decodes the whole response: special tokens
have no text.

Invariant: a sample ends with the token that completes a text, wherever the borders of tokens and characters are; it
keeps this token whole. The service and the engine process both import this module, so it needs neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

TOKENIZER_FILE = "tokenizer.json"
STOP, WRITTEN = "flotilla_stop", "flotilla_written"
"""Names of what a request carries through vLLM."""
MARGIN_TOKENS = 8
"""Tokens decoded before the longest text: the first tokens of a piece may lose a space, or the rest of a character."""
PART_OF_A_CHARACTER = "\ufffd"


def stop_arguments(texts: Sequence[str], written: int) -> dict[str, Any] | None:
    """Return what a request carries: the texts that end it, and how many tokens of its prompt are of the response."""
    return {STOP: list(texts), WRITTEN: written} if texts else None


class StopTexts:
    """The texts that end a sample."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._window = max(len(text.encode()) for text in texts) + MARGIN_TOKENS
        self.last_tokens = frozenset(self._last_tokens())
        """Tokens that may complete one of the texts."""

    def completed(self, tokens: Sequence[int], start: int, end: int) -> str | None:
        """Return the text that the last token of the response `tokens[start:end]` completes."""
        if tokens[end - 1] not in self.last_tokens:
            return None
        tail = list(tokens[max(start, end - self._window) : end])
        text, before = self._decoded(tail), self._decoded(tail[:-1]).rstrip(PART_OF_A_CHARACTER)
        for stop in self._texts:
            if text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0:
                return stop
        return None

    def _last_tokens(self) -> list[int]:
        # After a letter, because the first token of a text may lose its space.
        letter = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = self._decoded(letter)
        tokens = range(self._tokenizer.get_vocab_size(with_added_tokens=True))
        pairs = self._tokenizer.decode_batch([[*letter, token] for token in tokens])
        wanted = {PART_OF_A_CHARACTER, *(text[-1] for text in self._texts)}
        return [
            token
            for token, pair in zip(tokens, pairs, strict=True)
            if not pair.startswith(before) or not wanted.isdisjoint(pair[len(before) :])
        ]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


@lru_cache(maxsize=16)
def stop_texts(folder: Path, texts: tuple[str, ...]) -> StopTexts:
    """Return the texts, for the tokenizer of a model's folder."""
    return StopTexts(_tokenizer(folder / TOKENIZER_FILE), texts)


@lru_cache(maxsize=1)
def _tokenizer(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(file))
