"""Every service of the stack: which run has it, how it stands, and how many there are."""

from __future__ import annotations
