"""Our programs work in UTF-8 whatever the locale, and so do the processes that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, subprocess, sys, tempfile
from flotilla_core.files import speak_utf8
speak_utf8()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, sys.argv[1])
    with open(path, "w") as file:  # as libraries do, which name no encoding
        file.write(sys.argv[1])
    text = open(path, "rb").read().decode()
told = "import json, locale, sys; print(json.dumps([locale.getpreferredencoding().lower(), sys.argv[1]]))"
child = subprocess.run([sys.executable, "-c", told, sys.argv[1]], capture_output=True, text=True, check=True)
print(json.dumps([sys.argv[1:], text, json.loads(child.stdout), os.getpid()]))
"""
NAME = "Zoë 日本 🚢"


@pytest.mark.parametrize(
    "given",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"LC_ALL": "no_SUCH.locale", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
@pytest.mark.parametrize("flags", [[], ["-I"]], ids=str)
def test_a_program_and_its_children_read_and_write_utf8(given: dict[str, str], flags: list[str]) -> None:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))
    }
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", PROGRAM, NAME],
        env=kept | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode(errors="replace")
    assert json.loads(out) == [[NAME], NAME, ["utf-8", NAME], process.pid]
