"""This package holds the gang for the front: it starts, commands, watches and replaces the ranks, without torch."""

from __future__ import annotations
