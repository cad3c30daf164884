"""One rank of the gang: `python -m flotilla_trainer.rank`, started and watched by the front."""

from __future__ import annotations
