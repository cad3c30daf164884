"""Losses are pure functions of the tokens of a micro-batch: one number for each token, not weighted or averaged.

The front weighs every token once, by denominators of the whole update; a micro-batch adds up weight times loss.
"""

from __future__ import annotations
