"""Write a Qwen3 of a real size with random weights, and a tokenizer that takes a character for a token.

Every token of the vocabulary is a character, so prompts have an exact length, and a reward sees every sampled token.
`python bench/gpu/random_model.py 4b FOLDER`; in place of a name, JSON may say what differs from the shape of 0.6B. It
is a process of its own, so that the GPU which draws the weights is free again afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from qwen3_shape import QWEN3_0_6B, QWEN3_8B  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.6b": QWEN3_0_6B,
    "1.7b": QWEN3_0_6B | {"hidden_size": 2048, "intermediate_size": 6144},
    "4b": QWEN3_0_6B
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "8b": QWEN3_8B,
}
PAD, EOS = "<pad>", "<eos>"
FIRST_CHARACTERS = "0123456789+-*/=() "
SURROGATES = range(0xD800, 0xE000)
POSITIONS = 32_768


def characters(count: int) -> list[str]:
    """Return so many characters: those of the prompts first, then letters of all scripts, none a surrogate."""
    found = dict.fromkeys(FIRST_CHARACTERS)
    code = 0x4E00
    while len(found) < count:
        if code not in SURROGATES:
            found[chr(code)] = None
        code += 1
    return list(found)[:count]


def build_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer of so many tokens: two special ones, and a character each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    ids = {token: index for index, token in enumerate([PAD, EOS, *characters(vocabulary - 2)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=PAD))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS)])
    return tokenizer


def write_model(folder: Path, shape: dict[str, Any], dtype: str) -> None:
    """Write the weights, drawn on a GPU where there is one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    limits = {"max_position_embeddings": POSITIONS, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3Config(**{"tie_word_embeddings": True} | shape | limits)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    print(
        json.dumps({"model": str(folder), "parameters": sum(p.numel() for p in model.parameters())}),
        flush=True,
    )


def main() -> int:
    """Write weights and tokenizer."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("shape", help=f"{', '.join(SHAPES)}, or JSON")
    cli.add_argument("folder", type=Path)
    asked = cli.parse_args()
    shape = SHAPES[asked.shape] if asked.shape in SHAPES else QWEN3_0_6B | json.loads(asked.shape)
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_model(asked.folder, shape, "float32" if asked.shape == "tiny" else "bfloat16")
    build_tokenizer(shape["vocab_size"]).save(str(asked.folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (asked.folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
