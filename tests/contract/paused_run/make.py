"""Makes a state directory with a paused run, which `tests/older_fleet.py` resumes.

.venv/bin/python make.py VERSION.tar.xz        in a checkout of the version that the state is to be of
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

from flotilla_testing.stack import sim_stack, wait_until

SEEN = 4
"""Steps before the pause."""


def make_model(folder: Path) -> None:
    """A model of few weights with the tokenizer of the arithmetic example."""
    sys.path.insert(0, str(Path.cwd() / "examples" / "arithmetic"))
    import make_model as example
    import torch
    from transformers import Qwen3ForCausalLM

    example.make_model(folder)
    config = example.build_config()
    config.update({"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"]})
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Pause a run between two checkpoints and pack what its machine would leave if it lost power now."""
    root = Path(tempfile.mkdtemp(prefix="flotilla-"))
    make_model(root / "model")
    prompts = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(10, 42)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = {
        "name": "old",
        "steps": 10,
        "data": {"train": str(root / "prompts.jsonl")},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "sampling": {"max_response_tokens": 6}},
        "rewards": [{"reward": "exact"}],
        "algorithm": {
            "type": "grpo",
            "loss": {"type": "ppo", "clip_high": 0.28},
            "kl": {"placement": "loss"},
            "entropy_coefficient": 0.001,
            "correction": {"warn_at": None, "fail_at": None},
        },
        "optimizer": {"learning_rate": 1.0e-3},
        "checkpoint": {"every_steps": 3},
        "weights": {"canary": {"prompts": 0}},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(run))
    sim = {"sim": {"response_tokens": 6, "seconds_per_token": 0.1}}
    with sim_stack(root / "model", root, generator=sim) as stack:
        started = stack.ok("run", "start", str(root / "run.yaml"))
        wait_until("some steps", lambda: len(stack.metrics(started)) >= SEEN)
        stack.ok("run", "pause", started["run_id"])
        wait_until("the pause", lambda: stack.state(started) == "paused")
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(root, arcname=root.name, filter=_needed)


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name in ("plots", "logs", "nats.log") else member


if __name__ == "__main__":
    main()
