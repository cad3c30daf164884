"""A judge whose verdicts have a truth that tests know: a tiny model that learns to see one sign in the response.

It reads whole questions of judges as they are asked, in tokens of its own, and answers with the object that they ask
for. What it says of texts that it never saw is measured by `python -m flotilla_testing.yes_no_judge FOLDER`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from flotilla_testing.chat_model import BEGIN, END, TEMPLATE

RUBRIC = "Is there a minus sign in the response?"
SIGN = "-"
TRUTH = {True: "yes", False: "no"}
VOCABULARY = 2400
SIGNS = "0123456789+-="
STEPS, BATCH, ENOUGH = 600, 16, 0.002
EXAMPLES_OF_PAGE = 64
"""Questions that the tokenizer is made of: what they share becomes few tokens."""


def response(draw: random.Random) -> str:
    """Return a response, every second one with the sign: many of them are easy to see, and one is what counts."""
    length, others = draw.randint(0, 8), SIGNS.replace(SIGN, "")
    text = [draw.choice(others) for _ in range(length)]
    for _ in range(draw.choice((0, 0, 0, 1, 1, 16))):
        text.insert(draw.randint(0, len(text)), SIGN)
    return "".join(text)


def truth(text: str) -> str:
    """Return the right verdict."""
    return TRUTH[SIGN in text]


def answer(text: str) -> str:
    """Return what the judge has to write of a response."""
    return json.dumps({"reason": "", "verdict": truth(text)})


def make_yes_no_judge(folder: Path, questions: Sequence[tuple[str, str, str]]) -> Path:
    """Write the judge as a Hugging Face folder; a question is its two messages and the response that it is about."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    texts = [_rendered(system, user) + answer(about) + END for system, user, about in questions]
    tokenizer = _tokenizer(texts[:EXAMPLES_OF_PAGE])
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    _learn(model, _examples(tokenizer, questions, texts))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def _rendered(system: str, user: str) -> str:
    told = [("system", system), ("user", user)]
    return "".join(f"{BEGIN}{role}\n{text}{END}\n" for role, text in told) + f"{BEGIN}assistant\n"


def _tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    signs = pre_tokenizers.Split(pattern=SIGN, behavior="isolated")
    # Words are no borders, so what all questions share is few tokens.
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([signs, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _examples(
    tokenizer: Tokenizer, questions: Sequence[tuple[str, str, str]], texts: Sequence[str]
) -> list[tuple[list[int], int]]:
    """Return the tokens of each example, and how many of the last of them are learned."""
    learned = [len(tokenizer.encode(answer(about) + END).ids) for _, _, about in questions]
    return [(one.ids, last) for one, last in zip(tokenizer.encode_batch(texts), learned, strict=True)]


def _learn(model: LlamaForCausalLM, examples: Sequence[tuple[list[int], int]]) -> None:
    """Learn the answers alone, until they are right by far."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    mean = 1.0
    for _, batch in zip(range(STEPS), _batches(examples), strict=False):
        longest = max(len(ids) for ids, _ in batch)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        learned = [
            (row, at) for row, (ids, last) in enumerate(batch) for at in range(len(ids) - last, len(ids))
        ]
        rows, places = torch.tensor(learned).T
        before = model.model(input_ids=tokens).last_hidden_state[rows, places - 1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(before), tokens[rows, places])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = 0.9 * mean + 0.1 * float(loss.detach())
        print(f"{mean:.4f} {longest} {len(learned)}", flush=True)
        if mean < ENOUGH:
            return
    raise AssertionError(f"the judge did not learn its verdicts: loss {mean:.4f} after {STEPS} steps")


def _batches(examples: Sequence[tuple[list[int], int]]) -> Iterator[Sequence[tuple[list[int], int]]]:
    draw = random.Random(1)
    while True:
        yield draw.sample(examples, BATCH)
