"""Nothing of a jail stays on the host: neither its folder nor its group, whatever was in it and however it ended."""

from __future__ import annotations

import fcntl
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


def test_what_a_check_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "__name__", "no_such_module")
    told = check.problems("nobody:loads", "[]", 20.0, Cell(NO_JAIL))
    assert isinstance(told, str) and told.startswith("the process that imports them does not start: "), told
    assert "no_such_module" in told


def test_packages_that_a_variable_names_are_found_in_a_jail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "named_by_a_variable.py").write_text("FOUND = 'found'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["relative", str(packages)]))
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    cell = Cell(Jail(Level.LANDLOCK))
    with cell.start([sys.executable, "-c", "import named_by_a_variable as one; print(one.FOUND)"]) as start:
        assert start.environment["PYTHONPATH"] == str(packages)
        told = subprocess.run(
            start.command,
            check=False,
            env=start.environment,
            pass_fds=start.descriptors,
            capture_output=True,
            text=True,
        )
    cell.close()
    assert told.stdout == "found\n", told.stderr


@pytest.mark.parametrize("holds", [True, False])
def test_a_folder_is_left_alone_while_its_owner_holds_it_whatever_the_table_of_processes_says(
    temporary: Path, holds: bool
) -> None:
    cell = Cell(Jail(Level.LANDLOCK))
    with cell.start(["true"]):
        pass
    (made,) = temporary.iterdir()
    none = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    folder = temporary / f"{groups.PREFIX}-{none}-x"  # of a container whose processes we do not see
    made.rename(folder)
    if not holds:
        assert cell._folder is not None
        fcntl.flock(cell._folder._held, fcntl.LOCK_UN)
    Cell(NO_JAIL).close()
    assert folder.exists() is holds
    cell.close()


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
