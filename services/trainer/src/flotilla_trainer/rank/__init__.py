"""The ranks of the gang, and the fork server (`python -m flotilla_trainer.rank`) that forks them for the front."""

from __future__ import annotations
