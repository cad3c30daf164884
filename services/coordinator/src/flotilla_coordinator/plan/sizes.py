"""Numbers of bytes as people read them."""

from __future__ import annotations


def shown_bytes(number: float) -> str:
    """In the largest unit that leaves at least one of it, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
