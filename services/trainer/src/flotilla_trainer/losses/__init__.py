"""Losses: pure functions of the tokens of a micro-batch, one number a token, neither weighted nor averaged here.

The front weighs every token once, by denominators of the whole update; a micro-batch adds up weight times loss.
"""

from __future__ import annotations
