"""`flotilla token`, and what `doctor` says of a credential."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla_core.errors import InvalidConfig
from flotilla_core.trust import Credential
from flotilla_core.trust.certificates import days_left, names_of, own
from flotilla_testing.credentials import credential, expired, role_credential

Command = Callable[..., tuple[int, str, str]]
DAY_S = 86_400
DIRECTORY = Path(".flotilla/local")


@pytest.fixture
def stack(flotilla: Command) -> Credential:
    return credential(DIRECTORY)


def check(flotilla: Command, name: str) -> dict[str, str]:
    checks = json.loads(flotilla("doctor", "--json")[1])["checks"]
    return next(one for one in checks if one["check"] == name)


def test_a_credential_is_printed_or_written_for_its_owner_alone(flotilla: Command, stack: Credential) -> None:
    code, out, _ = flotilla("token", "create", "--role", "read", "--name", "ana", "-o", "-")
    assert code == 0 and out.startswith("# Flotilla credential: role read, ana\n-----BEGIN CERTIFICATE-----")
    out = flotilla("token", "create", "--role", "read", "--name", "ana", "-o", "-", "--json")[1]
    assert json.loads(out)["credential"].startswith("# Flotilla credential: role read, ana\n")
    code, out, _ = flotilla(
        "token", "create", "--role", "run", "--name", "ci@example", "--expires", "30d", "-o", "t", "--json"
    )
    made = json.loads(out)
    assert (code, made["role"], made["name"], made["file"]) == (0, "run", "ci@example", "t")
    certificate = own(Credential(Path("t")).read())
    assert names_of(certificate) == [f"flotilla:run:ci@example:{made['expires_at']}"]
    assert 29.9 < days_left(certificate) <= 30
    assert stat.S_IMODE(Path("t").stat().st_mode) == 0o600


def test_a_credential_with_a_role_never_serves_and_that_of_a_service_has_no_name(
    flotilla: Command, stack: Credential
) -> None:
    assert flotilla("token", "create", "--role", "admin", "--name", "ana", "-o", "ana.pem")[0] == 0
    with pytest.raises(InvalidConfig, match="for callers"):
        Credential(Path("ana.pem")).require_service("here")
    assert flotilla("token", "create", "--role", "service", "-o", "host.pem")[0] == 0
    Credential(Path("host.pem")).require_service("here")
    for given in (("--name", "ana"), ("--expires", "1d")):
        code, _, err = flotilla("token", "create", "--role", "service", "-o", "host.pem", *given)
        assert code == 2 and "--name" in err
    code, _, err = flotilla("token", "create", "--role", "run", "-o", "ana.pem")
    assert code == 2 and "--name" in err


@pytest.mark.parametrize("text", ["", "30", "0d", "d", "1y", "-1d"])
def test_a_length_of_time_that_is_none_is_refused(flotilla: Command, stack: Credential, text: str) -> None:
    given = ("--role", "read", "--name", "ana", "-o", "-", f"--expires={text}")
    code, _, err = flotilla("token", "create", *given)
    assert code == 2 and "30d" in err


def test_where_the_stack_was_not_made_there_is_no_authority_for_people(flotilla: Command) -> None:
    code, _, err = flotilla("token", "create", "--role", "read", "--name", "ana", "-o", "-")
    assert code == 5 and "flotilla up" in err


def test_the_first_credential_of_a_stack_that_starts_elsewhere_needs_no_up(flotilla: Command) -> None:
    assert flotilla("token", "create", "--role", "service", "-o", "pod.pem")[0] == 0
    assert flotilla("token", "create", "--role", "read", "--name", "ana", "-o", "ana.pem")[0] == 0
    assert Credential(Path("pod.pem")).read().authorities == Credential(Path("ana.pem")).read().authorities


def test_rotation_makes_another_authority_and_says_for_how_long_the_old_one_is_good(
    flotilla: Command, stack: Credential
) -> None:
    before = stack.read()
    code, out, _ = flotilla("token", "rotate", "--overlap", "1d", "--json")
    assert code == 0 and json.loads(out)["overlap_s"] == DAY_S
    after = stack.read()
    assert after.key != before.key and before.authorities in after.authorities
    assert flotilla("token", "rotate", "--overlap", "0s")[0] == 0
    assert before.authorities not in stack.read().authorities


def test_the_credential_that_another_program_writes_is_not_rotated(
    flotilla: Command, stack: Credential
) -> None:
    Path("stack.yaml").write_text(f"bind: {{credential_file: {stack.path}}}\n")
    for command in (("rotate",), ("create", "--role", "run", "--name", "ana", "-o", "-")):
        code, _, err = flotilla("token", *command)
        assert code == 5 and "bind.credential_file" in err


def test_doctor_and_config_check_the_credential_and_warn_before_it_ends(
    flotilla: Command, stack: Credential
) -> None:
    assert check(flotilla, "credential")["status"] == "passed"
    for file, status, words in (
        (expired(DIRECTORY, 13.1 * DAY_S).path, "warning", "13 more days"),
        (role_credential(DIRECTORY, "run").path, "failed", "for callers"),
        (expired(DIRECTORY).path, "failed", "has expired"),
        (Path("nowhere.pem"), "failed", "nowhere.pem"),
    ):
        Path("stack.yaml").write_text(f"model: a/b\nbind: {{credential_file: {file}}}\n")
        found = check(flotilla, "credential")
        assert found["status"] == status and words in found["finding"] and found["remedy"]
        code, _, err = flotilla("config", "validate", "--kind", "stack", "stack.yaml")
        assert code == (0 if status == "warning" else 2) and words in err


def test_before_the_first_up_doctor_misses_no_credential(flotilla: Command) -> None:
    assert "flotilla up" in check(flotilla, "credential")["finding"]
