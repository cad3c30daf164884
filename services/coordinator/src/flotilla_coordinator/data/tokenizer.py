"""Loads the tokenizer of a model folder without transformers, renders chat templates, and refuses replicas that differ.

Invariants: it reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`, `config.json` and
`chat_template.jinja`, never the network. Templates are untrusted code, so they run in jinja2's immutable sandbox, in
the environment that published templates are written for (trimmed blocks, loop controls, `raise_exception`, unescaped
`tojson`). Token ids mean the same in both processes, or the run does not begin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from flotilla_core.errors import InvalidConfig, Mismatch, NotFound
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import TOKENIZER_FILE, tokenizer_digest
from flotilla_core.rpc import Replica

ReplicaT = TypeVar("ReplicaT", bound=Replica[Any])


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's part for other tools; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders chat templates: a list of messages becomes the text that the model continues.

    One compiled template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], *, where: str) -> None:
        self._where = where
        self._special_tokens = special_tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidConfig("the chat template cannot be read", where=where, why=str(error)) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        begin_answer: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Return the messages as one text; with `begin_answer` it ends where the assistant begins to answer."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=begin_answer,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidConfig(
                "the chat template refuses the messages", where=self._where, why=str(error)
            ) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


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
        """Return the token ids of many texts at once, computed on all cores."""
        return [list(item.ids) for item in self._backend.encode_batch_fast(texts, add_special_tokens=special)]

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special))

    def decode_many(self, sequences: Sequence[list[int]], *, skip_special: bool = True) -> list[str]:
        """Return the texts of many sequences at once; other threads run meanwhile."""
        return list(self._backend.decode_batch(list(sequences), skip_special_tokens=skip_special))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        begin_answer: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Render messages by the folder's chat template, up to where the answer begins, or a whole conversation."""
        if self._chat is None:
            self._chat = ChatTemplate(self._template_source(), self._special_tokens(), where=str(self.folder))
        return self._chat.render(messages, begin_answer=begin_answer, tools=tools)

    def _template_source(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidConfig(
                    "the chat template cannot be read", where=str(path), why=str(error)
                ) from error
        source = self._settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = {item["name"]: item["template"] for item in source}.get("default")
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
            value = _read_json(self.folder / file).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(int(token) for token in found))


def _token_text(setting: object) -> str | None:
    """Return the text of a special token, which is a plain string or an object with `content`."""
    if isinstance(setting, dict):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def of_same_tokenizer(
    replicas: Sequence[ReplicaT],
    tokenizer: Tokenizer,
    model: Path | str,
    refuse: Callable[[ReplicaT, Mismatch], None],
) -> list[ReplicaT]:
    """Return the replicas with the coordinator's tokenizer, and refuse the others; raise where none is left."""
    refused: list[tuple[ReplicaT, Mismatch]] = []
    for replica in replicas:
        try:
            require_same_tokenizer(replica, tokenizer, model)
        except Mismatch as error:
            refused.append((replica, error))
    if refused and len(refused) == len(replicas):
        raise refused[0][1]
    for replica, why in refused:
        refuse(replica, why)
    strangers = {id(replica) for replica, _ in refused}
    return [replica for replica in replicas if id(replica) not in strangers]


def require_same_tokenizer(replica: Replica[Any], tokenizer: Tokenizer, model: Path | str) -> None:
    """Refuse a service that was started with another tokenizer than the coordinator's."""
    digest = replica.registration.tokenizer_digest
    if digest and digest != tokenizer.digest:
        raise Mismatch(
            f"{replica.name} has another tokenizer than the coordinator",
            where=f"model {model}",
            why=f"digest {digest[:12]} there, {tokenizer.digest[:12]} here",
            next_step="start every service of the stack with model folders that have the same tokenizer",
        )
