"""A sample ends with the token that completes a text, wherever the borders of tokens and characters are."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from flotilla_generator.engine.vllm.stop_texts import StopTexts, stop_arguments, stop_texts

MERGES = [("<", "/"), ("a", "n"), ("an", "s"), (">", "Ċ"), ("Ġ", "a")]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, a few pieces of several, and one special token."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    made = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


def ended_at(tokenizer: tokenizers.Tokenizer, text: str, *stops: str) -> tuple[int, str | None]:
    """Tokens that a sample gets of a text before it ends, and what ends it; ended by force after the last one."""
    watched, tokens = StopTexts(tokenizer, stops), tokenizer.encode(text).ids
    for end in range(1, len(tokens) + 1):
        if (stop := watched.completed(tokens, 0, end)) is not None:
            return end, stop
    return len(tokens), None


@pytest.mark.parametrize("stop", ["</ans>", "ans", ">", " a", "s>\n", "日本", "本。", "é", "🙂"])
def test_a_sample_ends_with_the_first_token_that_completes_the_text(
    tokenizer: tokenizers.Tokenizer, stop: str
) -> None:
    text = "né 🙂 日本。</ans>\nthen an ans and 日本 more é"
    tokens = tokenizer.encode(text).ids
    expected = next(end for end in range(len(tokens) + 1) if stop in tokenizer.decode(tokens[:end]))
    assert ended_at(tokenizer, text, stop) == (expected, stop)


def test_the_token_that_completes_a_text_is_kept_whole(tokenizer: tokenizers.Tokenizer) -> None:
    end, stop = ended_at(tokenizer, "</ans>\nrest", "</ans>")
    kept = tokenizer.decode(tokenizer.encode("</ans>\nrest").ids[:end])
    assert (kept, stop) == ("</ans>\n", "</ans>")


def test_of_several_texts_the_first_that_is_complete_ends_it(tokenizer: tokenizers.Tokenizer) -> None:
    assert ended_at(tokenizer, "one. two! three?", "?", "two", "!")[1] == "two"
    assert ended_at(tokenizer, "one", "two") == (3, None)


def test_a_text_is_found_behind_special_tokens_and_within_what_another_generator_wrote(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    eos = tokenizer.token_to_id("<eos>")
    prompt, response = tokenizer.encode("say END").ids, tokenizer.encode("EN").ids
    tokens = [*prompt, *response, eos, *tokenizer.encode("D").ids]
    watched = StopTexts(tokenizer, ("END",))
    assert watched.completed(tokens, len(prompt), len(tokens)) == "END"
    assert watched.completed(tokens, len(prompt) + 1, len(tokens)) is None, "the prompt is no response"


def test_a_token_that_cannot_end_a_text_is_not_decoded(
    tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = StopTexts(tokenizer, ("</ans>",))
    monkeypatch.setattr(watched, "_decoded", lambda _: pytest.fail("decoded"))
    (letter,) = tokenizer.encode("x").ids
    assert watched.completed([letter], 0, 1) is None
    assert len(watched.last_tokens) < tokenizer.get_vocab_size() - 100


def test_a_request_without_texts_carries_nothing_and_tokenizers_are_read_once(
    tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    assert stop_arguments((), 5) is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert stop_texts(tmp_path, ("a",)) is stop_texts(tmp_path, ("a",))
