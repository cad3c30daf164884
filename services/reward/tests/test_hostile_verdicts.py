"""Functions that attack their own verdict, or the service, from within the jail: at each level that this host has.

After each of them a function of another run has an honest verdict, from the same place, within its limit.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla_reward.answers import Value, Workers
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import Bounds, Jail, candidates, why_not
from flotilla_workers.jail.level import Level
from flotilla_workers.process import Failure, Timeout

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 20.0
SHORT_S = 1.5
"""The limit of a function that never ends."""
HONEST = (
    "def reward(prompt, response, answer, info):\n    print('honest')\n    return float(response == answer)\n"
)
HOSTILE = """
import atexit, builtins, json, os, signal, sys, threading, time

def exits_with_success(**_):
    os._exit(0)

def exits_by_an_exception(**_):
    sys.exit(0)

def stalls(**_):
    while True:
        time.sleep(60)

def sleeps_in_an_exit_handler(**_):
    atexit.register(time.sleep, 600)
    threading.Thread(target=time.sleep, args=(600,)).start()
    sys.exit(0)

def forges_a_verdict_on_all_that_is_open(**_):
    for number in range(3):
        os.write(number, b'{"value": 1.0}\\n1.0\\n')
    return None

def floods(**_):
    for _ in range(16):
        sys.stdout.write("x" * (1 << 20))
    return 0.5

def floods_for_ever(**_):
    while True:
        os.write(2, b"x" * (1 << 16))

def makes_many_files(**_):
    folder = os.environ["HOME"]
    try:
        for number in range(4_000):
            open(os.path.join(folder, str(number)), "w").close()
    except OSError:
        pass
    return 0.5

def recurses(**_):
    sys.setrecursionlimit(1 << 30)
    def deeper():
        return [*map(lambda _: deeper(), (0,))]
    deeper()

def forks_without_end(**_):
    while True:
        try:
            os.fork()
        except OSError:
            pass

def hoards(**_):
    held = []
    while True:
        held.append(bytearray(1 << 26))

def aborts(**_):
    os.abort()

def ends_its_parent(**_):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(os.getppid(), number)
        except OSError:
            pass
    return 0.5

def replaces_numbers_and_json(**_):
    class Always(float):
        __eq__ = lambda self, other: True
        __hash__ = float.__hash__
    builtins.float = Always
    json.dumps = lambda *_, **__: '{"value": 1.0}'
    return 0.5

def replaces_the_grader(**_):
    import flotilla_reward.worker as grader
    grader.number_of = lambda *_: 7.0
    grader.score_of = lambda *_: 7.0
    grader.Function.__call__ = lambda *_: 7.0
    return 0.5

def deletes_its_file(**_):
    os.remove(__file__)
    return 0.5
"""
ENDS: dict[str, type | float] = {
    "exits_with_success": Failure,
    "exits_by_an_exception": Failure,
    "stalls": Timeout,
    "sleeps_in_an_exit_handler": Failure,
    "forges_a_verdict_on_all_that_is_open": Failure,
    "floods": 0.5,
    "floods_for_ever": Timeout,
    "makes_many_files": 0.5,
    "recurses": Failure,
    "forks_without_end": Timeout,
    "hoards": Failure,
    "aborts": Failure,
    "ends_its_parent": 0.5,
    "replaces_numbers_and_json": 1.0,
    "replaces_the_grader": 7.0,
    "deletes_its_file": Failure,
}
"""How each ends. A function may say of its own sample what it likes, and of no other run's."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that any user can reach."""
    with tempfile.TemporaryDirectory(prefix="flotilla-verdicts-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, code in (("honest", HONEST), ("hostile", HOSTILE)):
            (folder / file).mkdir()
            (folder / file / f"{file}.py").write_text(code)
        yield folder


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[Level.NAMESPACES, Level.LANDLOCK], ids=str
)
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    bounds = Bounds(memory_bytes=1 << 28, processes=48, tmp_bytes=32 << 20)
    tried = [one for one in candidates(Jail(Level.NONE, bounds=bounds)) if one.level is request.param]
    found = next((one for one in tried if not why_not(one)), None)
    if found is None:
        pytest.skip(f"this host has no such jail: {', '.join(map(why_not, tried))}")
    workers = Workers(1, lambda: found)
    await workers.start()
    yield workers
    await workers.stop()


async def verdict(
    workers: Workers, file: Path, function: str, limit_s: float = LIMIT_S
) -> Value | Failure | Timeout:
    target = Target("file", str(file), function)
    question = {"prompt": "", "responses": ["1"], "answer": "1", "info": {}}
    outcome, _ = await workers.ask(target, question, limit_s, run_id=f"{file.stem}-{function}")
    assert not isinstance(outcome, tuple)
    return outcome


@pytest.mark.parametrize("function", ENDS)
async def test_a_hostile_verdict_is_no_other_one_and_an_honest_one_follows(
    workers: Workers, folder: Path, function: str
) -> None:
    expected = ENDS[function]
    begun = time.monotonic()
    limit_s = SHORT_S if expected is Timeout else LIMIT_S
    outcome = await verdict(workers, folder / "hostile" / "hostile.py", function, limit_s)
    assert time.monotonic() - begun < limit_s + LIMIT_S
    if isinstance(expected, float):
        assert isinstance(outcome, Value) and outcome.value == expected, outcome
    else:
        assert isinstance(outcome, expected), outcome
    for _ in range(2):
        assert await verdict(workers, folder / "honest" / "honest.py", "reward") == Value(1.0)
    assert (folder / "hostile" / "hostile.py").read_text() == HOSTILE
