"""The `flotilla` command.

Invariants: results go to stdout, messages to stderr; every command has `--json` and then prints one object; exit codes
are those of `options`. Modules here import nothing heavy at their top, so that `flotilla --help` is quick.
"""

from __future__ import annotations
