"""A network that loses, holds back, repeats and reorders, and replicas that are slow: nothing is lost or trained twice.

One more generator is started by hand beside the fleet of the matrix, behind proxies or with habits of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_testing.chaos_run import LIMIT_S, ChaosRun
from flotilla_testing.extra_generator import NAME, extra_generator
from flotilla_testing.fault_moments import Moment, reached
from flotilla_testing.stack import Stack, wait_until
from flotilla_testing.tcp_proxy import TcpProxy

pytestmark = pytest.mark.timeout(900)

BEHIND_PROXY = "127.0.0.2"
"""What peers dial; the service itself listens at the same port of 127.0.0.1."""
PARTITIONS = (
    (Moment.ROLLOUT, True),
    (Moment.ROLLOUT, False),
    (Moment.MID_SYNC, True),
    # It commits, and nobody hears of it.
    (Moment.BEFORE_ACK, False),
)
HEARTBEATS_END_S = 20.0
UNRULY = (sys.executable, str(Path(__file__).parent / "unruly_generator.py"))
STEPS = 3
REFUSED = "samples/rejected_unasked"
SHARE = f"generator/{NAME}/samples"


async def test_a_generator_that_cannot_be_reached(
    fleet_of_faults: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lives, its heartbeats come and so do its weights; its coordinator is not heard, or hears nothing."""
    stack = fleet_of_faults
    with ChaosRun(stack, arithmetic, tmp_path) as run:
        with extra_generator(stack, tmp_path, {"bind": {"advertise_host": BEHIND_PROXY}}):
            port = int(stack.address(NAME).rpartition(":")[2])
            with TcpProxy((BEHIND_PROXY, port), ("127.0.0.1", port)) as proxy:
                for moment, there in PARTITIONS:
                    wait_until(f"{NAME} to serve", lambda: _serves(run), LIMIT_S)
                    await reached(run, moment, NAME)
                    proxy.cut(there=there)
                    cut, done, lineage = time.monotonic(), run.lines, run.lineage
                    run.wait_for_steps(2, done, f"without {NAME}")
                    recovered_s = time.monotonic() - cut
                    wait_until(f"{NAME} to be given up", lambda: _is_given_up(run), LIMIT_S)
                    proxy.heal()
                    wait_until(f"{NAME} to serve again", lambda: _serves(run), LIMIT_S)
                    assert run.lineage == lineage
                    which = "both ways" if there else "answers alone"
                    _judged(run, capsys, f"partition, {which:15}{moment:26}{recovered_s:5.1f} s")
        _ended(run, capsys)


def test_a_generator_whose_heartbeats_do_not_come_through(
    fleet_of_faults: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = fleet_of_faults
    nats = urlsplit(json.loads((stack.directory / "launcher.json").read_text())["nats_url"])
    assert nats.hostname and nats.port
    with ChaosRun(stack, arithmetic, tmp_path) as run:
        proxy = TcpProxy(("127.0.0.1", 0), (nats.hostname, nats.port))
        with proxy, extra_generator(stack, tmp_path, {}, nats=f"nats://127.0.0.1:{proxy.port}"):
            wait_until(f"{NAME} to serve", lambda: _serves(run), LIMIT_S)
            proxy.cut()
            cut, lineage = time.monotonic(), run.lineage
            while time.monotonic() - cut < HEARTBEATS_END_S:
                run.wait_for_steps(1, run.lines, "without heartbeats")
                assert _serves(run), "it was asked itself"
            proxy.heal()
            wait_until(f"{NAME} to serve", lambda: _serves(run), LIMIT_S)
            assert run.lineage == lineage
            _judged(run, capsys, f"no heartbeats for {HEARTBEATS_END_S:g} s, steps went on")
        _ended(run, capsys)


@pytest.mark.parametrize(
    ("seconds_per_token", "what"), [(0.2, "slow"), (3.0, "slower than any sample may be")]
)
def test_a_generator_that_is_slow(
    fleet_of_faults: Stack,
    arithmetic: Path,
    tmp_path: Path,
    seconds_per_token: float,
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ChaosRun(fleet_of_faults, arithmetic, tmp_path) as run:
        slow = {"generator": {"engine": "sim", "sim": {"seconds_per_token": seconds_per_token}}}
        with extra_generator(fleet_of_faults, tmp_path, slow):
            wait_until(f"{NAME} to serve", lambda: _serves(run), LIMIT_S)
            began, done = time.monotonic(), run.lines
            run.wait_for_steps(STEPS, done, f"beside a generator that is {what}")
            assert run.lines >= done + STEPS
            step_s = (time.monotonic() - began) / STEPS
            _judged(run, capsys, f"a generator that is {what}: {step_s:.1f} s a step")
        _ended(run, capsys)


def test_deliveries_that_come_twice_out_of_order_and_late(
    fleet_of_faults: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChaosRun(fleet_of_faults, arithmetic, tmp_path) as run:
        with extra_generator(fleet_of_faults, tmp_path, {}, command=UNRULY):
            wait_until("samples that nobody waits for", lambda: _count(run, REFUSED) > 0, LIMIT_S)
            run.wait_for_steps(STEPS, run.lines, f"with {NAME}")
            assert _count(run, SHARE) > 0, "what it delivered the first time counts"
            _judged(
                run, capsys, f"twice, out of order and late: {_count(run, REFUSED):.0f} deliveries refused"
            )
        _ended(run, capsys)


def _count(run: ChaosRun, metric: str) -> float:
    return sum(line.get(metric, 0.0) for line in run.stack.metrics(run.started))


def _serves(run: ChaosRun) -> bool:
    return NAME in run.serving()


def _is_given_up(run: ChaosRun) -> bool:
    return NAME not in run.working("generator")


def _ended(run: ChaosRun, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run.ends_by_itself()
    assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
    _judged(run, capsys, "the run ended by itself")


def _judged(run: ChaosRun, capsys: pytest.CaptureFixture[str], what: str) -> None:
    verdict = assert_accounted_for(run.stack, run.run_id)
    with capsys.disabled():
        sys.stdout.write(f"\n  {what}: {verdict}")
