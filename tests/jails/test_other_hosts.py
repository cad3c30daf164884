"""The suite of escapes as another user, and where the host has no groups of the kernel.

Each run is all of libs/workers/tests/jail, and agents in a jail, in a mount namespace of its own, so nothing of the
host changes: folders that root alone may enter are opened on the way to the interpreter, and /sys/fs/cgroup is empty
where the run says so.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("libs/workers/tests/jail", "services/environment/tests/agents/test_jailed_agents.py")
ANOTHER = 10_041
AS_ANOTHER = (
    "setpriv",
    f"--reuid={ANOTHER}",
    f"--regid={ANOTHER}",
    "--clear-groups",
    "--inh-caps=-all",
    "--",
)
NO_GROUPS = "mount -t tmpfs -o mode=755 none /sys/fs/cgroup"
ASKED = (
    "import os; from flotilla_workers.jail import groups;"
    "made = groups.make(1 << 30, 8); made and made.close(); print(os.getuid(), made is not None)"
)


def opened(paths: Iterable[Path], aside: Path) -> Iterator[str]:
    """Give the commands that let everybody reach these folders, whatever is closed above them."""
    above = {path: [one for one in reversed(path.parents) if not one.stat().st_mode & 1] for path in paths}
    kept = {path: aside / str(number) for number, path in enumerate(above) if above[path]}
    for path, place in kept.items():
        place.mkdir()
        yield shlex.join(["mount", "--bind", str(path), str(place)])
    for closed in dict.fromkeys(above[path][0] for path in kept):
        yield shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(closed)])
    for path, place in kept.items():
        yield shlex.join(["mkdir", "-p", str(path)])
        yield shlex.join(["mount", "--bind", str(place), str(path)])


@pytest.mark.parametrize(
    ("user", "with_groups"),
    [("another user", True), ("another user", False), ("root", False)],
    ids=["another user", "another user without groups", "root without groups"],
)
def test_no_attack_reaches_anything(user: str, with_groups: bool, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    home = Path(tempfile.mkdtemp(prefix="flotilla-jails-"))
    wanted = [*dict.fromkeys((Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT))]
    mounts = ["mount --make-rprivate /", *opened(wanted, tmp_path), *([] if with_groups else [NO_GROUPS])]
    who: tuple[str, ...] = ()
    if user != "root":
        who = AS_ANOTHER
        os.chown(home, ANOTHER, ANOTHER)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        script = " && ".join([*mounts, shlex.join(["exec", *who, *command])])
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            cwd=ROOT,
            env={**os.environ, "HOME": str(home), "TMPDIR": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    try:
        asked = run(sys.executable, "-c", ASKED)
        assert asked.stdout.split()[:1] == [str(ANOTHER if who else 0)], asked.stderr
        assert with_groups or asked.stdout.split()[1] == "False", "the host's groups are there"
        done = run(sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *SUITES)
    finally:
        subprocess.run(["rm", "-rf", "--", home], check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if skipped := re.findall(r"SKIPPED .*", done.stdout):
        pytest.skip("; ".join(skipped))
