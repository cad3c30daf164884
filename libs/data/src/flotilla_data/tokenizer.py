"""Loads the tokenizer of a model folder without transformers.

Invariants: it reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`, `config.json` and
`chat_template.jinja`, never the network. Whatever they hold, what is wrong is an error that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from flotilla_core.errors import FlotillaError, InvalidConfig, NotFound
from flotilla_core.files import open_regular
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import TOKENIZER_FILE, end_tokens, tokenizer_digest
from flotilla_data.chat_template import ChatTemplate, Conversation

CHARACTERS_AT_ONCE = 1 << 20
"""A token takes a hundred times the memory of a character while it is made."""
MOST_TEMPLATE_BYTES = 4 << 20

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The sign that tokenizers after SentencePiece write for a space."""


def _signs() -> dict[str, int]:
    """Return the byte for which each sign of a byte-level vocabulary stands, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_SIGNS = _signs()


@lru_cache(maxsize=8)
def _backend(file: Path, digest: str) -> tokenizers.Tokenizer:
    """Read a file with these contents once, because the library frees a tokenizer's caches only with the process."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust reader raises plain Exception whatever is wrong with the file
        raise InvalidConfig(f"{file.name} cannot be read", where=str(file.parent), why=str(error)) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer, digest: str) -> None:
        self.folder = folder
        self.digest = digest
        self._backend = backend
        self._settings = _read_json(folder / "tokenizer_config.json")
        self.eos_ids = self._end_ids()
        self.pad_id = self._id_of_setting("pad_token")
        self._chat: ChatTemplate | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder."""
        digest = tokenizer_digest(folder)
        return cls(folder, _backend(folder / TOKENIZER_FILE, digest), digest)

    @property
    def vocabulary_size(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_id(self) -> int:
        """Return the token that ends a response."""
        if not self.eos_ids:
            raise InvalidConfig(
                "the tokenizer has no end-of-sequence token",
                where=str(self.folder),
                next_step="set eos_token in tokenizer_config.json",
            )
        return self.eos_ids[0]

    @property
    def end_texts(self) -> list[str]:
        """Return the texts of the tokens that end a response."""
        return [self._backend.id_to_token(token) or "" for token in self.eos_ids]

    def end_warnings(self) -> list[str]:
        """Warn where the answers of a data set would end with a token that the model does not end responses with."""
        own, models = self._id_of_setting("eos_token"), self._models_end_ids()
        if own is None or not models or own in models:
            return []
        ends = " or ".join(f"{self._backend.id_to_token(end)!r} ({end})" for end in models)
        return [
            f"tokenizer_config.json has the eos_token {self._backend.id_to_token(own)!r} ({own}), and the model's "
            f"configuration ends responses with {ends}: answers of data sets get the former; set the right one in both"
        ]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return token ids; `special` adds the tokens that the model expects around a plain prompt."""
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def encode_many(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Return the token ids of many texts, computed on all cores."""
        return [
            list(item.ids)
            for some in _together(texts)
            for item in self._backend.encode_batch_fast(some, add_special_tokens=special)
        ]

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special))

    def decode_many(self, sequences: Sequence[list[int]], *, skip_special: bool = True) -> list[str]:
        """Return the texts of many sequences at once; other threads run meanwhile."""
        return list(self._backend.decode_batch(list(sequences), skip_special_tokens=skip_special))

    def bytes_of(self, token_ids: list[int]) -> list[bytes]:
        """Return the bytes of each token, which may be a part of a character; none for a number that is no token.

        Together they are the text, but for a space that some tokenizers leave out where a text begins.
        """
        return [self._bytes_of(token) for token in token_ids]

    def _bytes_of(self, token: int) -> bytes:
        added, decoders = self._pieces
        if token in added:
            return added[token].encode()
        text = self._backend.id_to_token(token) or ""
        if "ByteLevel" in decoders and all(sign in _SIGNS for sign in text):
            return bytes(_SIGNS[sign] for sign in text)
        if "ByteFallback" in decoders and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.replace(_SPACE, " ").encode()

    @cached_property
    def _pieces(self) -> tuple[dict[int, str], set[str]]:
        """The texts of added tokens, and the kinds of the decoders of all others."""
        added = {token: one.content for token, one in self._backend.get_added_tokens_decoder().items()}
        decoder = {} if self._backend.decoder is None else json.loads(self._backend.decoder.__getstate__())
        return added, {str(one.get("type")) for one in (decoder, *decoder.get("decoders", ()))}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        begin_answer: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render messages by the folder's chat template, up to where the answer begins, or a whole conversation."""
        return self._template().render(messages, begin_answer=begin_answer, tools=tools)

    def render_chats(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Render many conversations at once; each gives its text, or why the template refuses it."""
        return self._template().render_many(conversations)

    async def render_chats_beside(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Return what `render_chats` does, while the event loop runs."""
        return await self._template().render_beside(conversations)

    def _template(self) -> ChatTemplate:
        if self._chat is None:
            self._chat = ChatTemplate(self.template_source, self._special_tokens(), where=str(self.folder))
        return self._chat

    @cached_property
    def template_source(self) -> str:
        """The chat template of the folder; raise where it has none."""
        path = self.folder / "chat_template.jinja"
        try:
            with open_regular(path) as file:
                content = file.read(MOST_TEMPLATE_BYTES + 1)
            if len(content) > MOST_TEMPLATE_BYTES:
                raise InvalidConfig(
                    "the chat template is too large",
                    where=str(path),
                    why=f"it has more than {MOST_TEMPLATE_BYTES} bytes, the limit",
                )
            return content.decode()
        except FileNotFoundError:
            pass  # It may be in the settings.
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig("the chat template cannot be read", where=str(path), why=str(error)) from None
        source = self._settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = [item for item in source if isinstance(item, dict)]
            source = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if not isinstance(source, str):
            raise NotFound(
                "the model has no chat template",
                where=str(self.folder),
                why="neither chat_template.jinja nor chat_template in tokenizer_config.json",
                next_step="add one, or use text prompts with data.apply_chat_template: false",
            )
        return source

    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        texts = {name: _token_text(self._settings.get(name)) for name in names}
        return {name: text for name, text in texts.items() if text is not None}

    def _id_of_setting(self, name: str) -> int | None:
        text = _token_text(self._settings.get(name))
        return None if text is None else self._backend.token_to_id(text)

    def _end_ids(self) -> tuple[int, ...]:
        """Return the tokenizer's own end token first, then those that the model's configuration adds."""
        own = self._id_of_setting("eos_token")
        return tuple(dict.fromkeys((*([] if own is None else [own]), *self._models_end_ids())))

    def _models_end_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for file in ("generation_config.json", "config.json"):
            found += end_tokens(_read_json(self.folder / file), str(self.folder / file))
        return tuple(dict.fromkeys(found))


def _together(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divide texts into those that are tokenized together."""
    some: list[str] = []
    characters = 0
    for text in texts:
        if some and characters + len(text) > CHARACTERS_AT_ONCE:
            yield some
            some, characters = [], 0
        some.append(text)
        characters += len(text)
    if some:
        yield some


def _token_text(setting: object) -> str | None:
    """Return the text of a special token, which is a plain string or an object with `content`."""
    if isinstance(setting, dict):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}


class TextAlone(Tokenizer):
    """Stands where there is no model: prompts of text have no token ids, so none is too long, and chats are refused."""

    def __init__(self, refusal: FlotillaError) -> None:
        self.folder = Path()
        self.digest = ""
        self._refusal = refusal

    def encode_many(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Return no tokens for each text."""
        return [[] for _ in texts]

    def render_chats(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Refuse: the text of a chat is the model's."""
        raise self._refusal
