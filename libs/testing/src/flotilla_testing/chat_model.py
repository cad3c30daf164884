"""A chat model that is small enough for tests of whole fleets: its weights are random, its tokens those of a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, BEGIN = "<|im_end|>", "<|im_start|>"
TEXT = Path(__file__).resolve().parents[4] / "README.md"
VOCABULARY = 512
HIDDEN, MIDDLE, LAYERS, HEAD, POSITIONS = 64, 128, 2, 32, 1024
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_chat_model(folder: Path) -> Path:
    """Write a Llama with a chat template as a Hugging Face folder."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.read_text("utf-8").splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=END,
        pad_token=END,
        chat_template=TEMPLATE,
    )
    end = tokenizer.token_to_id(END)
    ends = {"eos_token_id": end, "pad_token_id": end}
    _write(folder / "generation_config.json", **ends)
    _write(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"embed_tokens": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"layers.{layer}.self_attn.k_proj": (HEAD, HIDDEN),
            f"layers.{layer}.self_attn.v_proj": (HEAD, HIDDEN),
            f"layers.{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"layers.{layer}.mlp.gate_proj": (MIDDLE, HIDDEN),
            f"layers.{layer}.mlp.up_proj": (MIDDLE, HIDDEN),
            f"layers.{layer}.mlp.down_proj": (HIDDEN, MIDDLE),
        }
    norms = [
        f"layers.{layer}.{name}_layernorm" for layer in range(LAYERS) for name in ("input", "post_attention")
    ]
    weights = {name: random.normal(0, 0.05, shape) for name, shape in shapes.items()}
    weights |= {name: np.ones(HIDDEN) for name in (*norms, "norm")}
    return {f"model.{name}.weight": value.astype(np.float32) for name, value in weights.items()}


def _write(file: Path, **content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
