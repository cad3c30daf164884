"""Programs of the policy in real jails: each gives it a text, and harms nobody."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla_core.errors import InvalidConfig
from flotilla_environment.builtin import BUILTIN
from flotilla_environment.environment import Program
from flotilla_environment.holders import owner_of, read
from flotilla_environment.programs import MOST_OF_ONE_REPLY, Programs
from flotilla_environment.waits import Waits
from flotilla_environment.worker import NOTHING
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, Jail, find
from flotilla_workers.jail.level import Level

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 1.0
NOBODY = "/tmp/written_by_a_program"

HOSTILE = {
    "while True: pass": "took longer than 1 s, and was at line 1",
    "import time\ntime.sleep(60)": "took longer than 1 s, and was at line 2",
    "while True:\n try:\n  while True: pass\n except BaseException: pass": "took longer than 1 s",
    "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass": "took longer than 1 s",
    "while True: print('flood' * 1000)": "bytes are left out",
    "import os\nwhile True: os.fork()": "error: ",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)": "",
    "import os\nos._exit(0)": "ended before the program did",
    "import ctypes\nctypes.string_at(0)": "ended before the program did",
    "x = bytearray(8 << 30)": "MemoryError",
    "import os\nfor one in range(3, 99):\n try: os.write(one, b'x' * 999)\n except OSError: pass": "",
    "import os\nos.closerange(0, 999)": "",
    "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)": "error: line 2: ",
    "open('/etc/hostname', 'w')": "error: line 1: ",
    "class E(Exception):\n def __str__(self): raise self\nraise E": "error: ",
    "raise ValueError('x' * 10**7)": "error: line 1: raise",
    "'x' * 10**7": "bytes are left out",
    "(" * 10_000: "error: ",
    "def f(): return f()\nf()": "RecursionError",
    "print('\\ud800')": "?",
    "input()": "EOFError",
    "import sys; sys.exit('no')": "ended with 'no'",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()": "nothing was printed",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def jail() -> Jail:
    found = await asyncio.to_thread(find, None, "environment")
    if found.level is not Level.NAMESPACES:
        pytest.skip("this host makes no namespaces")
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def programs() -> AsyncIterator[Programs]:
    kept = Programs()
    yield kept
    await kept.stop()


async def told(programs: Programs, jail: Jail, code: str) -> tuple[str, bool]:
    (outcome,) = await programs.run([Program(code, LIMIT_S)], jail, "run", Waits())
    return outcome


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1)\nprint(2)", "1\n2"),
        ("x = 2\nx ** 100", str(2**100)),
        ("None", "nothing was printed"),
        ("", "nothing was printed"),
        ("import sys\nprint('a')\nsys.exit()", "a"),
        ("def f(n): return n and f(n - 1)\nf(9)", "0"),
        ("if __name__ == '__main__': print('main')", "main"),
        ("def f(x: int): pass\nf.__annotations__", "{'x': <class 'int'>}"),
        ("import pickle\ndef f(): return 7\npickle.loads(pickle.dumps(f))()", "7"),
        ("import sys\nsys.argv", "['program.py']"),
    ],
)
async def test_the_policy_reads_what_a_program_prints(
    programs: Programs, jail: Jail, code: str, text: str
) -> None:
    assert await told(programs, jail, code) == (text, False)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1)\n1 / 0", "1\nerror: line 2: 1 / 0\nZeroDivisionError: division by zero"),
        ("a = (", "SyntaxError: '(' was never closed"),
    ],
)
async def test_the_policy_reads_the_error_with_its_line(
    programs: Programs, jail: Jail, code: str, text: str
) -> None:
    said, failed = await told(programs, jail, code)
    assert failed and text in said


@pytest.mark.parametrize("code", HOSTILE)
async def test_a_hostile_program_is_a_bounded_text_and_harms_nobody(
    programs: Programs, jail: Jail, code: str
) -> None:
    text, _ = await told(programs, jail, code)
    assert HOSTILE[code] in text and len(text) < 10_000, text[:2_000]
    assert await told(programs, jail, "print('well')") == ("well", False)


async def test_a_program_finds_nothing_of_an_earlier_one_nor_of_the_host(
    programs: Programs, jail: Jail, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    shown = replace(jail, readable=(tmp_path,))
    writes = f"kept = open({NOBODY!r}, 'w').write('x')"
    assert await told(programs, shown, writes) == ("nothing was printed", False)
    assert not Path(NOBODY).exists()
    for code in (f"open({NOBODY!r})", "kept", f"open({str(secret)!r})"):
        text, failed = await told(programs, shown, code)
        assert failed and ("FileNotFoundError" in text or "NameError" in text), text
    pids, failed = await told(programs, jail, f"import os\nos.kill({os.getpid()}, 0)")
    assert failed and "ProcessLookupError" in pids


async def test_the_programs_of_one_turn_are_bounded(programs: Programs, jail: Jail) -> None:
    said = await programs.run([Program("print(1)", LIMIT_S)] * (MOST_OF_ONE_REPLY + 2), jail, "run", Waits())
    assert said[:MOST_OF_ONE_REPLY] == [("1", False)] * MOST_OF_ONE_REPLY
    assert [failed for _, failed in said[MOST_OF_ONE_REPLY:]] == [True, True]


async def test_without_a_jail_no_program_runs() -> None:
    with pytest.raises(InvalidConfig, match="cannot run here"):
        await Programs().run([Program("print(1)")], replace(NO_JAIL, refusal="no jail"), "run", Waits())


async def test_where_the_stack_says_unsafe_a_program_runs_in_a_process_of_its_own() -> None:
    programs = Programs()
    assert await programs.run([Program("import os\nprint(1)")], NO_JAIL, "run", Waits()) == [("1", False)]
    await programs.stop()


async def test_sets_have_the_same_order_in_every_program_of_every_replica(
    programs: Programs, jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code = "print({str(number) for number in range(30)})"
    said = {await told(programs, jail, code)}
    for other in (jail, NO_JAIL):
        replica = Programs()
        said.add(await told(replica, other, code))
        await replica.stop()
    assert len(said) == 1


async def test_runs_share_the_processors_and_a_wait_for_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    programs = Programs()
    ended: list[str] = []

    async def run(run_id: str, waits: Waits) -> None:
        began = time.monotonic()
        await programs.run([Program("import time\ntime.sleep(0.1)")], NO_JAIL, run_id, waits)
        ended.append(run_id)
        assert waits.total_s < time.monotonic() - began - 0.1, "its own time is no wait"

    waits = [Waits() for _ in range(5)]
    await asyncio.gather(*(run("flood" if number < 4 else "other", one) for number, one in enumerate(waits)))
    assert ended == ["flood", "flood", "other", "flood", "flood"]
    assert waits[0].total_s < 0.1 < waits[1].total_s < waits[4].total_s < waits[2].total_s < waits[3].total_s
    await programs.stop()


@pytest.mark.parametrize(
    "program",
    [
        {"code": "1", "limit_s": 1e9},
        {"code": "1", "limit_s": 1},
        {"code": "1" * 70_000, "limit_s": 1.0},
        {},
        1,
    ],
)
async def test_a_worker_that_names_a_program_beyond_its_limits_says_nothing(program: object) -> None:
    message = {"role": "tool", "content": "", "program": program}
    with pytest.raises(NoAnswer):
        read(NOTHING | {"messages": [message]})


async def test_what_runs_code_of_others_is_jailed_and_what_is_ours_alone_is_not() -> None:
    jailed = {name for name in BUILTIN if owner_of(Target("builtin", name), "run").jailed}
    assert jailed == {"gymnasium", "python", "textarena"}
    owners = {owner_of(Target("builtin", name), "run") for name in jailed}
    assert len(owners) == 3, "each has workers of its own"
