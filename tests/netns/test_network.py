"""A stack on three hosts that share nothing but a network: it runs, and doctor names what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import assert_accounted_for
from netns.network import PORTS, SERVICES, Network, network, why_not

from flotilla_core.trust import write_secret
from flotilla_testing.credentials import expired
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Outcome, wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why := why_not()), reason=why or "network namespaces"),
]

STEPS = 3
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

/* Every way in which Python and its libraries read the wall clock, five seconds ahead. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (!status && clock == CLOCK_REALTIME) now->tv_sec += 5;
    return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec spec;
    int status = clock_gettime(CLOCK_REALTIME, &spec);
    now->tv_sec = spec.tv_sec;
    now->tv_usec = spec.tv_nsec / 1000;
    return status;
}
time_t time(time_t *where) {
    struct timespec spec;
    clock_gettime(CLOCK_REALTIME, &spec);
    if (where) *where = spec.tv_sec;
    return spec.tv_sec;
}
"""


@pytest.fixture(scope="module")
def three_hosts(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("netns"), arithmetic) as made:
        yield made


def faults(outcome: Outcome, status: str = "failed") -> dict[str, str]:
    """Return what doctor found wrong, by its check."""
    return {
        one["check"]: f"{one['finding']} -> {one['remedy']}"
        for one in json.loads(outcome.out)["checks"]
        if one["status"] == status
    }


def doctor(made: Network, host: str = "one") -> Outcome:
    return made.hosts[host].flotilla("doctor", "--json")


def test_doctor_passes_on_each_host_and_a_run_loses_nothing(three_hosts: Network) -> None:
    for name in three_hosts.hosts:
        outcome = doctor(three_hosts, name)
        assert outcome.code == 0, faults(outcome)
    # From the coordinator's host doctor asks also what was started on the others.
    checks = {one["check"] for one in json.loads(doctor(three_hosts).out)["checks"]}
    assert {*SERVICES, "interface", "credential"} <= checks

    one = three_hosts.hosts["one"]
    file = small_run(one.home / "arithmetic", one.home / "run.yaml", steps=STEPS)
    ended = one.flotilla("run", "start", str(file), "--wait", "--json")
    assert ended.code == 0, ended.err
    finished = ended.json
    assert finished["state"] == "succeeded", finished
    assert_accounted_for(three_hosts.stack, finished["run_id"])
    ports = range(*map(int, PORTS.split("-")))
    for name, process in three_hosts.ps().items():
        assert int(process["address"].rpartition(":")[2]) in ports, f"{name}: {process['address']}"


def test_a_wrong_interface_is_named_and_no_service_starts_with_it(three_hosts: Network) -> None:
    three = three_hosts.hosts["three"]
    three_hosts.write_stack(three, interface="eth7")
    found = faults(doctor(three_hosts, "three"))
    assert "eth7" in found["interface"] and "eth0" in found["interface"], found
    three.service("reward-1")
    log = three.log("reward-1")
    wait_until("the refusal", lambda: log.exists() and "eth7 cannot be used" in log.read_text(), 120)
    three.stop("reward-1")
    three_hosts.write_stack(three)


def test_a_blocked_port_is_named(three_hosts: Network) -> None:
    three = three_hosts.hosts["three"]
    three.block(PORTS)
    three.service("reward-1")
    try:
        wait_until(
            "the reason in ps",
            lambda: "does not answer" in (three_hosts.ps().get("reward-1", {}).get("error") or ""),
            120,
            every_s=1,
        )
        assert three_hosts.ps()["reward-1"]["state"] == "starting"
        found = faults(doctor(three_hosts))
        assert "10.77.0.3" in found["reward-1"] and "open that port" in found["reward-1"], found
    finally:
        three.block(PORTS, action="-D")
    three_hosts.wait_ready("reward-1", *SERVICES)
    three.stop("reward-1")


def test_a_loopback_address_that_is_advertised_is_named(three_hosts: Network) -> None:
    three = three_hosts.hosts["three"]
    # With an interface the service itself refuses to start; without one the coordinator finds out.
    three_hosts.write_stack(three, interface=None)
    three.service("reward-1", "--advertise-host", "127.0.0.1")
    wait_until(
        "the reason in ps",
        lambda: "loopback" in (three_hosts.ps().get("reward-1", {}).get("error") or ""),
        120,
        every_s=1,
    )
    found = faults(doctor(three_hosts))
    assert "loopback" in found["reward-1"] and "bind.advertise_host" in found["reward-1"], found
    three.stop("reward-1")
    three_hosts.write_stack(three)


def test_a_clock_that_is_five_seconds_off_is_named(three_hosts: Network) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: no clock can be changed for one host alone")
    three = three_hosts.hosts["three"]
    source, library = three.home / "clock.c", three.home / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    three.service("reward-1", LD_PRELOAD=str(library))
    three_hosts.wait_ready("reward-1")
    found = faults(doctor(three_hosts))
    assert "5.0 s ahead" in found["reward-1: clock"] and "three" in found["reward-1: clock"], found
    assert len(found) == 1, found
    three.stop("reward-1")


def test_a_credential_that_ends_soon_is_named(three_hosts: Network) -> None:
    soon = expired(three_hosts.root, 5.5 * 86_400).path
    write_secret(three_hosts.hosts["two"].home / "credential.pem", soon.read_text())
    found = faults(doctor(three_hosts, "two"), "warning")
    assert "5 more days" in found["credential"], found
