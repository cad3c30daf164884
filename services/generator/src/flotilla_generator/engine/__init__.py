"""Engines: what samples tokens behind the service."""

from __future__ import annotations
