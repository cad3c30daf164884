"""Leases the services of the stack to runs, and reports their state and their number."""

from __future__ import annotations
