"""Writes the records of a run for people and scripts: its directory, its plots and its Parquet files."""

from __future__ import annotations
