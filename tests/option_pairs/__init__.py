"""Every value of an option beside every value of every other, tried on updates that the options are meant for.

`make test-contract` tries the options themselves and `make test-chaos` their details as well, by the same rules.
"""

from __future__ import annotations
