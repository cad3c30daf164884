"""`flotilla token` and `flotilla certs`, and a command that is given a token with a role."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from flotilla_core.config import BindConfig
from flotilla_core.files import make_private_folder
from flotilla_core.trust import make_token, read_token

Command = Callable[..., tuple[int, str, str]]
DIRECTORY = Path(".flotilla/local")


@pytest.fixture
def secret(flotilla: Command) -> str:
    make_private_folder(DIRECTORY)
    return make_token(BindConfig(), DIRECTORY)


def test_a_token_is_printed_or_written_for_its_owner_alone(flotilla: Command, secret: str) -> None:
    code, out, _ = flotilla("token", "create", "--role", "read", "--name", "ana")
    assert code == 0 and out.startswith("flotilla:read:ana:never:") and secret not in out
    code, out, _ = flotilla(
        "token", "create", "--role", "run", "--name", "ci@example", "--expires", "30d", "-o", "t", "--json"
    )
    made = json.loads(out)
    assert (code, made["role"], made["name"], made["file"]) == (0, "run", "ci@example", "t")
    assert "token" not in made
    assert Path("t").read_text().startswith(f"flotilla:run:ci@example:{made['expires_at']}:")
    assert stat.S_IMODE(Path("t").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "30", "0d", "d", "1y", "-1d"])
def test_a_length_of_time_that_is_none_is_refused(flotilla: Command, secret: str, text: str) -> None:
    code, _, err = flotilla("token", "create", "--role", "read", "--name", "ana", f"--expires={text}")
    assert code == 2 and "30d" in err


def test_without_a_stack_there_is_no_token_to_make_others_from(flotilla: Command) -> None:
    code, _, err = flotilla("token", "create", "--role", "read", "--name", "ana")
    assert code == 3 and "flotilla up" in err


def test_rotation_replaces_the_token_and_says_for_how_long_the_old_one_is_good(
    flotilla: Command, secret: str
) -> None:
    code, out, _ = flotilla("token", "rotate", "--json")
    assert code == 0 and json.loads(out)["overlap_s"] == 600
    assert read_token(BindConfig(), DIRECTORY) != secret


class OneRun(CoordinatorServiceServicer):
    async def ListRuns(self, request: object, context: object) -> object:
        from flotilla.coordinator.v1.coordinator_pb2 import ListRunsResponse

        return ListRunsResponse(runs=[run_pb2.Run(run_id="trial-1", state=run_pb2.RUN_STATE_RUNNING)])


def test_a_command_takes_the_token_of_a_file_and_says_which_role_is_missing(
    flotilla: Command, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(OneRun())
    monkeypatch.setenv("FLOTILLA_TOKEN_FILE", "")
    assert flotilla("token", "create", "--role", "read", "--name", "ana", "-o", "ana.token")[0] == 0
    (DIRECTORY / "token").unlink()
    code, out, err = flotilla("--token-file", "ana.token", "run", "list", "--json")
    assert code == 0, err
    assert [run["run_id"] for run in json.loads(out)["runs"]] == ["trial-1"]
    code, _, err = flotilla("--token-file", "ana.token", "run", "pause", "trial-1")
    assert code == 4 and "role run" in err and "role read" in err


def test_certificates_are_made_and_the_lines_of_the_stack_file_printed(flotilla: Command) -> None:
    code, out, err = flotilla("certs", "init", "--hosts", "a,10.0.0.2")
    assert code == 0, err
    section = "bind:" + out.partition("bind:")[2]
    Path("stack.yaml").write_text(f"{section}  host: 0.0.0.0\n")
    checks = json.loads(flotilla("doctor", "--json")[1])["checks"]
    found = {check["check"]: check for check in checks}
    assert found["certificate"]["status"] == found["bind"]["status"] == "passed"
    assert "10.0.0.2" in flotilla("certs", "init", "--hosts", "10.0.0.2", "--json")[1]


def test_doctor_warns_before_a_certificate_ends_and_fails_where_a_file_is_missing(flotilla: Command) -> None:
    code, out, _ = flotilla("certs", "init", "--hosts", "a", "--days", "13")
    Path("stack.yaml").write_text("bind:" + out.partition("bind:")[2])

    def certificate() -> dict[str, str]:
        checks = json.loads(flotilla("doctor", "--json")[1])["checks"]
        return next(check for check in checks if check["check"] == "certificate")

    found = certificate()
    assert code == 0 and found["status"] == "warning"
    assert (
        "CN=a" in found["finding"] and "13 more days" in found["finding"] and "certs init" in found["remedy"]
    )
    Path("certs/a/key.pem").unlink()
    assert certificate()["status"] == "failed"


@pytest.mark.parametrize("hosts", ["", ",", "a b", "../x", "a,-b"])
def test_a_host_that_is_none_makes_nothing(flotilla: Command, hosts: str) -> None:
    code, _, err = flotilla("certs", "init", f"--hosts={hosts}")
    assert code == 2 and "--hosts" in err and not Path("certs").exists()


def test_doctor_says_what_travels_unencrypted_unless_the_stack_file_knows(flotilla: Command) -> None:
    for text, status in (("{host: 0.0.0.0}", "warning"), ("{host: 0.0.0.0, plaintext: true}", "passed")):
        Path("stack.yaml").write_text(f"bind: {text}\n")
        checks = json.loads(flotilla("doctor", "--json")[1])["checks"]
        (bind,) = (check for check in checks if check["check"] == "bind")
        assert bind["status"] == status
