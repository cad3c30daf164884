"""The words that the front and the ranks share: frames, settings, and functions of the user's. Free of torch."""

from __future__ import annotations
