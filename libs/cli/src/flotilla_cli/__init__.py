"""The `flotilla` command.

Commands that ask a coordinator need no package of it. What reads the files of a stack, plans or checks imports
`flotilla_coordinator`: whole modules, which `main` loads when they are called, or a function. `failures` says what to
install where that is missing.

Invariants: results go to stdout, messages to stderr; every command has `--json` and then prints one object; exit codes
are those of `options`. `main` lists the commands, and imports the module of the one that is called. Inside a function
stays an import that takes long and that most calls of its module do not need: numpy, data and plans where a fleet
answers, rich where there is no terminal, gRPC where a shell completes a word.
"""

from __future__ import annotations
