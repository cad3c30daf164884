"""The engine that decodes with vLLM."""

from __future__ import annotations
