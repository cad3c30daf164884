"""Nothing of a jail stays on the host: neither its folder nor its group, whatever was in it and however it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flotilla_workers import check
from flotilla_workers.jail import groups
from flotilla_workers.jail.jail import NO_JAIL, Cell, Jail
from flotilla_workers.jail.level import Level
from flotilla_workers.process import WorkerProcess

LEAVES = """
import os
from flotilla_workers.jail.jail import Cell, Jail
from flotilla_workers.jail.level import Level
starts = Cell(Jail(Level.LANDLOCK)).start(["true"])
starts.__enter__()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left(temporary: Path, pid: int) -> list[Path]:
    made = [parent for parents in groups._parents() for parent in parents.values()]
    of_groups = [folder for parent in made for folder in parent.glob(f"{groups.PREFIX}-{pid}-*")]
    return [*temporary.iterdir(), *of_groups]


def test_a_tree_that_is_deep_or_closed_to_its_owner_is_removed(temporary: Path) -> None:
    cell = Cell(Jail(Level.LANDLOCK))
    with cell.start(["true"]):
        pass
    (folder,) = temporary.iterdir()
    (folder / "closed" / "below").mkdir(parents=True)
    (folder / "closed").chmod(0o300)
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('below')\n    os.chdir('below')"
    subprocess.run([sys.executable, "-c", deep], cwd=folder, check=True)
    cell.close()
    assert not left(temporary, os.getpid())


async def test_a_jail_whose_command_cannot_start_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        await WorkerProcess.start("nobody:loads", Cell(Jail(Level.LANDLOCK)))
    with pytest.raises(FileNotFoundError):
        check.problems("nobody:loads", "[]", 1.0, Cell(Jail(Level.LANDLOCK)))
    assert not left(temporary, os.getpid())


def test_what_a_killed_worker_left_of_its_own_jails_goes_with_it_and_that_of_others_stays(
    temporary: Path,
) -> None:
    ours = Cell(Jail(Level.LANDLOCK))
    with ours.start(["true"]):
        pass
    kept = left(temporary, os.getpid())
    killed = subprocess.Popen([sys.executable, "-c", LEAVES])
    killed.wait()
    assert len([*temporary.iterdir()]) == 2
    Cell(NO_JAIL).close()
    assert left(temporary, killed.pid) == [*temporary.iterdir()] and left(temporary, os.getpid()) == kept
    ours.close()
