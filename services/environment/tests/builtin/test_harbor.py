"""Task folders of Harbor are played in rooms and scored by their own tests; what needs an image is refused by name."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_environment.builtin.harbor_task import BASES, read_task
from flotilla_environment.holders import Holders
from flotilla_workers.functions import Refusal
from flotilla_workers.jail.jail import NO_JAIL, Jail
from flotilla_workers.jail.level import Level

FILES = {
    "instruction.md": "Write the sum of data/numbers.txt into /app/sum.txt.\n",
    "task.toml": """schema_version = "1.4"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
[verifier.env]
RIGHT = "42"
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
memory_mb = 2048
""",
    "environment/Dockerfile": """# A base, files and a folder.
FROM ubuntu:24.04
WORKDIR /app
ENV UNIT=one \\
    TWO="2 words"
COPY data/ /app/data/
COPY --chmod=755 run.sh extra/*.txt ./
COPY run.sh /opt/tools/start
""",
    "environment/data/numbers.txt": "1\n2\n39\n",
    "environment/run.sh": "echo $UNIT $TWO\n",
    "environment/extra/a.txt": "a\n",
    "environment/extra/b.txt": "b\n",
    "solution/solve.sh": "awk '{s+=$1} END {print s}' data/numbers.txt > /app/sum.txt\n",
    "tests/test.sh": """#!/bin/bash
# apt-get install is not needed here.
if [ "$(cat /app/sum.txt)" = "$RIGHT" ] && [ -f /tests/more/right.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/more/right.txt": "42\n",
}
SOLVE = {"bash": {"command": FILES["solution/solve.sh"]}}


def made(folder: Path, **changed: str | None) -> Path:
    """Write the task, with other files by their names, where `__` is a slash; None leaves one out."""
    for name, text in (FILES | {name.replace("__", "/"): text for name, text in changed.items()}).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


async def test_a_task_is_worked_at_in_a_room_and_scored_by_its_own_tests(
    played: Any, namespaces: Jail, tmp_path: Path, holders: Holders
) -> None:
    look = (
        "cat data/numbers.txt a.txt; ls -R /tests /solution; bash /opt/tools/start; ls -l run.sh | cut -c1-10"
    )
    answers = [{"bash": {"command": look}}, SOLVE, "done"]
    said = await played("harbor", {"tasks": str(made(tmp_path))}, answers, prompt="any")
    assert said.heard[0] == ["Write the sum of data/numbers.txt into /app/sum.txt."]
    assert [tool["name"] for tool in said.tools] == ["bash"]
    (seen,) = said.heard[1]
    assert seen.startswith("1\n2\n39\na\n") and "test.sh" not in seen and "cannot access '/solution'" in seen
    assert "one 2 words" in seen and seen.endswith("-rwxr-xr-x")
    assert said.heard[2] == ["nothing was printed"]
    assert said.ended.rewards == {"reward": 1.0}, said.ended
    assert not holders.pids


async def test_whoever_does_nothing_or_is_stopped_is_tested_too(
    played: Any, namespaces: Jail, tmp_path: Path
) -> None:
    tasks = made(tmp_path / "sum").parent
    none = await played("harbor", {"tasks": str(tasks)}, ["I did."], info={"task": "sum"})
    assert none.ended.rewards == {"reward": 0.0}
    stopped = await played("harbor", {"tasks": str(tasks)}, [SOLVE], info={"task": "sum"})
    assert stopped.ended.ending == pb.ENDING_MAX_TURNS and stopped.ended.rewards == {"reward": 1.0}


FORGED = (
    "echo 1 > /logs/verifier/reward.txt; (while true; do echo 1 > /logs/verifier/reward.txt; done) &",
    "mkdir -p /tests/more; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "for p in /proc/[0-9]*; do cat $p/mem $p/environ $p/fd/* 2>/dev/null | head -c 9; done; echo 41 > sum.txt",
    "ln -s /proc/self/fd/1 /logs/verifier/reward.txt; setsid nohup sleep 60 & disown",
)


@pytest.mark.parametrize("command", FORGED, ids=["loop", "tests", "memory", "link"])
async def test_a_reward_that_the_policy_writes_itself_is_none(
    played: Any, namespaces: Jail, tmp_path: Path, command: str
) -> None:
    said = await played("harbor", {"tasks": str(made(tmp_path))}, [{"bash": {"command": command}}, "done"])
    assert said.ended.rewards == {"reward": 0.0}, said.ended


async def test_the_policy_reads_no_variable_of_the_service(
    played: Any, namespaces: Jail, tmp_path: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_A_HEADER", "secret")
    holders.jail = replace(holders.jail, environment=("TOKEN_OF_A_HEADER",))
    look = {"bash": {"command": "env; cat /proc/[0-9]*/environ; echo looked"}}
    said = await played("harbor", {"tasks": str(made(tmp_path))}, [look, "done"])
    (seen,) = said.heard[1]
    assert "UNIT=one" in seen and "looked" in seen and "secret" not in seen


async def test_commands_are_bounded_and_leave_files_and_processes(
    played: Any, namespaces: Jail, tmp_path: Path
) -> None:
    commands = (
        "sleep 30 & echo $! > pid; echo begun",
        "kill -0 $(cat pid) && echo lives",
        "head -c 99999 /dev/zero | tr '\\0' x",
        "sleep 20",
        "exit 7",
        "cat < /dev/tcp/1.1.1.1/80",
    )
    answers = [{"bash": {"command": command}} for command in commands]
    said = await played(
        "harbor", {"tasks": str(made(tmp_path)), "limit_s": 1.0}, [*answers, {"shell": {}}, "x"]
    )
    texts = [one for (one,) in said.heard[1:]]
    assert texts[:2] == ["begun", "lives"] and "95,999 bytes are left out" in texts[2]
    assert "took longer than 1 s, and was ended" in texts[3] and texts[4].endswith("exit code 7")
    assert "unreachable" in texts[5] and texts[6].startswith("error: there is one tool, bash")
    assert said.ended.metrics == {"tool_calls": 7.0, "tool_errors": 4.0}


async def test_several_rewards_are_read_and_what_is_no_reward_is_an_error(
    played: Any, namespaces: Jail, tmp_path: Path
) -> None:
    async def of(script: str, name: str) -> pb.EpisodeEnded:
        task = made(tmp_path / name, **{"tests/test.sh": None})
        (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{script}\n")
        said = await played("harbor", {"tasks": str(task)}, ["done"])
        assert isinstance(said.ended, pb.EpisodeEnded)
        return said.ended

    both = await of("""echo '{"a": 1, "b": 0.5}' > /logs/verifier/reward.json""", "both")
    assert both.rewards == {"a": 1.0, "b": 0.5}
    long = f"""echo '{{"a": {"9" * 400}}}' > /logs/verifier/reward.json"""
    none, wrong, huge = await asyncio.gather(
        of("echo oh; exit 3", "none"), of("echo x > /logs/verifier/reward.txt", "wrong"), of(long, "huge")
    )
    assert "as reward a, expected a finite number" in huge.failure.what
    assert none.ending == wrong.ending == pb.ENDING_ERROR and not none.rewards
    assert "wrote neither reward.txt nor reward.json" in none.failure.what and "oh" in none.failure.what
    assert "wrote a reward.txt that is none: 'x" in wrong.failure.what


async def test_eight_episodes_of_a_task_are_apart(played: Any, namespaces: Jail, tmp_path: Path) -> None:
    task = {"tasks": str(made(tmp_path))}
    said = await asyncio.gather(
        *(played("harbor", task, [SOLVE, "done"] if number % 2 else ["done"]) for number in range(8))
    )
    assert [one.ended.rewards["reward"] for one in said] == [0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"environment__Dockerfile": "FROM ruby:3.4\n"},
            "asks for the image ruby:3.4: name ruby in the parameter",
        ),
        ({"environment__Dockerfile": "FROM evil.io/x/python:3\n"}, "name evil.io/x/python in the parameter"),
        ({"environment__Dockerfile": "FROM x/python@sha256:0\n"}, "name x/python in the parameter bases"),
        ({"environment__Dockerfile": "FROM a:5000/python\n"}, "name a:5000/python in the parameter bases"),
        ({"environment__Dockerfile": "FROM --platform=linux/amd64\n"}, "asks for the image --platform"),
        (
            {"environment__Dockerfile": "FROM python:3.12-slim\nRUN pip \\\n install x\n"},
            r"environment/Dockerfile, line 2, asks for an image by RUN pip   ?install x",
        ),
        ({"environment__Dockerfile": "FROM debian\nCOPY --from=x /a /b\n"}, "line 2, copies with --from=x"),
        (
            {"environment__Dockerfile": "FROM debian\nCOPY ../a /b\n"},
            "copies from outside of its folder: ../a",
        ),
        ({"environment__Dockerfile": "FROM debian\nCOPY none /b\n"}, "copies none, which is not there"),
        (
            {"environment__Dockerfile": "FROM debian\nFROM debian\n"},
            "line 2, asks for an image by FROM debian",
        ),
        (
            {"environment__Dockerfile": 'FROM debian\nENV PATH="/root/.local/bin:$PATH"\n'},
            r"line 2, has a variable in ENV PATH=\"/root/.local/bin:\$PATH\": write its value there",
        ),
        (
            {"environment__Dockerfile": "FROM debian\nENV A=/a\nWORKDIR ${A}/b\n"},
            r"line 3, has a variable in WORKDIR \${A}/b",
        ),
        (
            {"environment__Dockerfile": "FROM debian\nENV A=/a\nCOPY run.sh $A/\n"},
            r"line 3, has a variable in COPY run.sh \$A/",
        ),
        ({"environment__docker-compose.yaml": ""}, "it has environment/docker-compose.yaml"),
        ({"task.toml": '[environment]\ndocker_image = "a"\n'}, "sets environment.docker_image"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "sets environment.gpus"),
        ({"task.toml": '[environment]\nos = "windows"\n'}, "sets environment.os: windows"),
        (
            {"task.toml": '[environment.env]\nKEY = "${KEY}"\n'},
            "takes environment.env.KEY from a variable of the host",
        ),
        ({"task.toml": '[verifier]\nenvironment_mode = "separate"\n'}, "verifier.environment_mode: separate"),
        ({"task.toml": '[verifier]\nuser = "nobody"\n'}, "sets verifier.user"),
        ({"task.toml": '[[steps]]\nname = "one"\n'}, "sets steps"),
        ({"task.toml": "["}, "cannot be read: "),
        (
            {"task.toml": '[verifier]\ntimeout_sec = "x"\n'},
            "cannot be read: could not convert string to float",
        ),
        ({"task.toml": "[verifier]\ntimeout_sec = [1]\n"}, "cannot be read: "),
        (
            {"task.toml": "[verifier]\ntimeout_sec = nan\n"},
            "sets verifier.timeout_sec: nan, which is no time",
        ),
        ({"task.toml": '[environment]\nenv = "x"\n'}, "cannot be read: "),
        ({"environment__Dockerfile": "FROM debian\nCOPY [\n"}, "cannot be read: "),
        ({"environment__Dockerfile": "FROM debian\nCOPY [1, 2]\n"}, "copies 1, which is not there"),
        ({"environment__Dockerfile": "FROM debian\nCOPY run.sh\n"}, "line 2, copies nothing"),
        ({"environment__Dockerfile": "FROM debian\nCOPY\n"}, "cannot be read: "),
        ({"environment__Dockerfile": "FROM debian\nENV A='\n"}, "cannot be read: "),
        ({"environment__Dockerfile": "FROM debian\nENV\n"}, "cannot be read: "),
        ({"environment__Dockerfile": "FROM debian\nWORKDIR /\n"}, "it writes to /, and a room has folders"),
        ({"environment__Dockerfile": "FROM debian\nCOPY run.sh /\n"}, "it writes to /, and a room has"),
        (
            {"environment__Dockerfile": "FROM debian\nCOPY run.sh /app/../etc/\n"},
            "it writes to /etc, which a",
        ),
        ({"task.toml": '[environment]\nworkdir = "app"\n'}, "it writes to app, and a room has folders below"),
        (
            {"tests__setup.sh": "x=1\napt-get update && apt-get install -y curl\n"},
            "tests/setup.sh, line 2, loads some",
        ),
        ({"tests__setup.sh": "curl -LsSf https://a.b | sh\n"}, "from the network by 'curl'"),
        ({"tests__setup.sh": "if uvx pytest; then\n"}, "from the network by 'uvx'"),
        ({"tests/test.sh": None}, "it has no tests/test.sh"),
    ],
)
def test_what_needs_more_than_a_room_is_refused_by_name(
    tmp_path: Path, changed: dict[str, str | None], why: str
) -> None:
    with pytest.raises(Refusal, match=why):
        assert read_task(made(tmp_path, **changed)).writable


def test_what_is_like_a_download_and_is_none_is_taken(tmp_path: Path) -> None:
    script = FILES["tests/test.sh"] + "\ncurl -s http://localhost:8000/\n# wget x\npython3 -m pytest /tests\n"
    assert read_task(made(tmp_path, **{"tests/test.sh": script})).workdir == "/app"


def test_a_link_out_of_the_folder_and_a_place_of_the_system_are_refused(tmp_path: Path) -> None:
    task = made(tmp_path, environment__Dockerfile="FROM debian\nCOPY run.sh /usr/bin/run\n")
    with pytest.raises(Refusal, match="writes to /usr, which a room shows"):
        assert read_task(task).writable
    (task / "tests" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(Refusal, match="tests/secret is no file, but a link"):
        read_task(task)


@pytest.mark.parametrize(
    "image",
    [
        *("ubuntu", "--platform=linux/amd64 ubuntu:24.04", "docker.io/library/python:3.12@sha256:0 AS base"),
        *("library/debian", "ghcr.io:443/a/b:1"),
    ],
)
def test_a_base_is_known_by_its_whole_name(tmp_path: Path, image: str) -> None:
    task = made(tmp_path, environment__Dockerfile=f"FROM {image}\nWORKDIR /work\n")
    assert read_task(task, (*BASES, "ghcr.io:443/a/b")).workdir == "/work"


@pytest.mark.parametrize(
    ("name", "dockerfile"),
    [
        ("instruction.md", None),
        ("task.toml", None),
        ("tests", None),
        ("environment/Dockerfile", None),
        ("environment/link", "COPY link/key /app/"),
        ("environment/link", "COPY l*/key /app/"),
        ("environment/link", "COPY link/folder /app/"),
    ],
)
def test_a_task_reads_nothing_outside_of_its_folder(
    tmp_path: Path, name: str, dockerfile: str | None
) -> None:
    """Each link leads to what would be taken, were it in the folder."""
    task, host = tmp_path / "task", made(tmp_path / "host")
    (host / "folder").mkdir()
    for file in ("key", "folder/key"):
        (host / file).write_text("secret")
    made(task, **({} if dockerfile is None else {"environment__Dockerfile": f"FROM debian\n{dockerfile}\n"}))
    if (task / name).is_dir():
        shutil.rmtree(task / name)
    (task / name).unlink(missing_ok=True)
    (task / name).symlink_to(host if dockerfile else host / name)
    with pytest.raises(Refusal, match=f"{name.rpartition('/')[2]}.* leads out of its folder"):
        read_task(task)


def test_a_copied_file_is_read_without_what_is_beside_it(tmp_path: Path) -> None:
    task = made(tmp_path)
    (task / "environment" / "beside").symlink_to("/etc/hostname")
    (task / "environment" / "inside").symlink_to("data")
    (task / "environment" / "Dockerfile").write_text("FROM debian\nCOPY run.sh inside/numbers.txt /app/\n")
    assert [file.path for file in read_task(task).files] == ["/app/run.sh", "/app/numbers.txt"]


async def test_a_folder_that_is_no_task_and_a_host_without_namespaces_are_errors(
    played: Any, holders: Holders, tmp_path: Path
) -> None:
    made(tmp_path / "sum")
    for name in ("", "none", "../sum", str(tmp_path / "sum")[1:]):
        said = await played("harbor", {"tasks": str(tmp_path / "sum" / "tests")}, info={"task": name})
        assert "names no folder with one" in said.ended.failure.what
    holders.jail = replace(NO_JAIL, level=Level.LANDLOCK)
    said = await played("harbor", {"tasks": str(tmp_path / "sum")})
    assert "a task needs a jail of level namespaces" in said.ended.failure.what
