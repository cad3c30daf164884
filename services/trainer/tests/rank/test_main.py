"""A rank that ends with an unexpected error writes it to its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDS_BY_AN_ERROR = """
import sys
import torch.distributed as dist
from flotilla_trainer.rank.main import end_at_once
sys.excepthook = end_at_once
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
raise ValueError("the layers disagree")
"""


def test_an_unexpected_error_is_in_the_log_of_a_rank_that_has_joined_its_gang(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_BY_AN_ERROR, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ValueError: the layers disagree" in ended.stderr
