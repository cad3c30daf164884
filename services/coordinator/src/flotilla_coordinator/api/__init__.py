"""Implements the gRPC services of the coordinator."""

from __future__ import annotations
