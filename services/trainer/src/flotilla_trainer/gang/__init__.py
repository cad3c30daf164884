"""The process group of ranks as the front holds it: started, commanded, watched, replaced. Free of torch."""

from __future__ import annotations
