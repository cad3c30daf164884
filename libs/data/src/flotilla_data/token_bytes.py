"""The bytes of single tokens: a token may be a part of a character, which no text can hold.

Invariant: the bytes of the tokens of a text, one behind the other, are the text as the tokenizer decodes it, but for a
space that some tokenizers leave out where a text begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What tokenizers after SentencePiece write for a space."""


def _signs() -> dict[str, int]:
    """Return the byte for which each sign of a byte-level vocabulary stands, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_SIGNS = _signs()


class TokenBytes:
    """The bytes of the tokens of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token: added.content for token, added in backend.get_added_tokens_decoder().items()}
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._kinds = {one.get("type") for one in (decoder, *decoder.get("decoders", ()))}

    def of(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token; none for a number that is no token."""
        return [self._bytes(token) for token in token_ids]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token) or ""
        if "ByteLevel" in self._kinds:
            if all(sign in _SIGNS for sign in text):
                return bytes(_SIGNS[sign] for sign in text)
            return text.encode()
        if "ByteFallback" in self._kinds and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.replace(_SPACE, " ").encode()
