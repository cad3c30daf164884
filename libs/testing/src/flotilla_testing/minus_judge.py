"""A judge whose verdicts have a truth that tests know: its weights are written by hand, so that it sees a minus sign.

It is a Llama of one layer whose tokens are bytes. Its one head attends to minus signs wherever they are, and the answer
that it writes says whether there was one: `yes` or `no`, in the object that judges are asked for. The questions that
judges are asked have no minus sign of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from flotilla_testing.chat_model import BEGIN, END, TEMPLATE

RUBRIC = "Is there a minus sign in the response?"
VERDICTS = {"yes": 1, "no": 0}
SIGN = "-"
BEGINS, YES, NO = '{"reason": "", "verdict": "', 'yes"}', 'no"}'
HIDDEN, POSITIONS = 64, 8192
SLOWEST = 31
"""The dimension of a head that positions turn least."""
ALL, MINUS, LINE_END, BEGAN, ENDED, OTHER, SEEN = range(7)
"""The dimensions of the hidden state: features of the token itself, and last whether a minus sign was before it."""
SHARP, SURE = 4.0, 30.0


def truth(response: str) -> str:
    """Return the right verdict."""
    return "yes" if SIGN in response else "no"


def make_minus_judge(folder: Path) -> Path:
    """Write the judge as a Hugging Face folder."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokenizer, size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(signs)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, BEGIN])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (BEGINS, YES, NO)])
    return tokenizer


def _weights(tokenizer: Tokenizer, size: int) -> dict[str, np.ndarray]:
    minus, line_end, begins, yes, no, end = (
        tokenizer.encode(text).ids[0] for text in (SIGN, "\n", BEGINS, YES, NO, END)
    )
    embedding = np.zeros((size, HIDDEN))
    embedding[:, ALL] = 1
    features = {minus: MINUS, line_end: LINE_END, begins: BEGAN, yes: ENDED, no: ENDED}
    for token in range(size):
        embedding[token, features.get(token, OTHER)] = 1
    query, key, value, output = (np.zeros((HIDDEN, HIDDEN)) for _ in range(4))
    query[SLOWEST, ALL] = key[SLOWEST, MINUS] = SHARP
    value[0, MINUS] = 1
    # What a layer reads is scaled to a mean square of one: a token has two features.
    output[SEEN, 0] = np.sqrt(2 / HIDDEN)
    head = np.zeros((size, HIDDEN))
    head[begins, LINE_END] = head[yes, BEGAN] = head[no, BEGAN] = SURE
    head[end, ENDED] = 2 * SURE
    for token, sign in ((yes, 1), (no, -1)):
        head[token, SEEN], head[token, ALL] = sign * SURE, -sign * SURE / 2
    weights = {
        "model.embed_tokens": embedding,
        "model.layers.0.self_attn.q_proj": query,
        "model.layers.0.self_attn.k_proj": key,
        "model.layers.0.self_attn.v_proj": value,
        "model.layers.0.self_attn.o_proj": output,
        "lm_head": head,
        "model.norm": np.ones(HIDDEN),
    }
    for name in ("gate", "up", "down"):
        weights[f"model.layers.0.mlp.{name}_proj"] = np.zeros((HIDDEN, HIDDEN))
    for name in ("input", "post_attention"):
        weights[f"model.layers.0.{name}_layernorm"] = np.ones(HIDDEN)
    return {f"{name}.weight": weight.astype(np.float32) for name, weight in weights.items()}
