"""Makes the model of this example: a Qwen3 of 0.8 million parameters and its character tokenizer, or one with experts.

The same seed always writes the same weights. The folder is an ordinary Hugging Face one: transformers, vLLM
and the bare `tokenizers` library load it unchanged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

HERE = Path(__file__).resolve().parent

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+-="
SPECIAL = (PAD, EOS, UNKNOWN)
MAX_POSITIONS = 64
# A conversation is its messages, one after the other: "12+34=" in, "46" out.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "eos_token": EOS,
    "unk_token": UNKNOWN,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
}


def build_tokenizer(phrases: Sequence[str] = (), alphabet: str = ALPHABET) -> Tokenizer:
    """One token a character, and one for each phrase; a character outside the alphabet is `<unk>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    ids = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def build_config(
    vocabulary: int = len((*SPECIAL, *ALPHABET)), *, experts: bool = False, positions: int = MAX_POSITIONS
) -> PretrainedConfig:
    """Small enough for two CPU cores, with what real models have: grouped heads, q/k norms, a tied head."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        # Smaller and training is slow to start and fragile; larger and it memorises instead of generalising.
        "initializer_range": 0.03,
        "pad_token_id": SPECIAL.index(PAD),
        "eos_token_id": SPECIAL.index(EOS),
        "bos_token_id": None,
        "dtype": "float32",
    }
    if not experts:
        return Qwen3Config(**shape)
    # The two experts that a token visits are together as wide as the layer of the dense model.
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    return Qwen3MoeConfig(**shape, **routed, norm_topk_prob=True)


def make_model(
    out: Path,
    *,
    seed: int = 0,
    experts: bool = False,
    phrases: Sequence[str] = (),
    alphabet: str = ALPHABET,
    template: str = CHAT_TEMPLATE,
    positions: int = MAX_POSITIONS,
) -> None:
    """Write the untrained model and its tokenizer to `out`, which is there in full or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = build_tokenizer(phrases, alphabet)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = build_config(tokenizer.get_vocab_size(), experts=experts, positions=positions)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        pad_token_id=SPECIAL.index(PAD), eos_token_id=SPECIAL.index(EOS), bos_token_id=None
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".making-") as temporary:
        folder = Path(temporary) / out.name
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        own = {"model_max_length": positions, "chat_template": template}
        settings = json.dumps(TOKENIZER_CONFIG | own, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to write (model/, or with --moe model-moe/)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (%(default)s)")
    parser.add_argument(
        "--moe", action="store_true", help="8 experts in each layer, of which a token visits 2"
    )
    arguments = parser.parse_args()
    out = arguments.out or HERE / ("model-moe" if arguments.moe else "model")
    make_model(out, seed=arguments.seed, experts=arguments.moe)
    print(json.dumps({"model": str(out), "seed": arguments.seed}))


if __name__ == "__main__":
    main()
