"""The credential of a stack: who may read it, what is good for one, and what a process makes of a replaced one."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flotilla_core import errors
from flotilla_core.config import BindConfig, StackConfig
from flotilla_core.trust import Claims, Credential, Pem, read_secret, write_secret
from flotilla_core.trust import credential as credential_module
from flotilla_core.trust.authority import create_credential, make_credential, rotate
from flotilla_core.trust.certificates import days_left, own, own_problem
from flotilla_core.trust.credential import UNTIL
from flotilla_testing.credentials import credential, expired, role_credential, stranger

FOLDER = ("ca.crt", "tls.key", "tls.crt")


def mine(file: Path) -> BindConfig:
    return BindConfig(credential_file=file)


def test_a_stack_without_a_credential_gets_one_that_only_its_owner_can_read(tmp_path: Path) -> None:
    with pytest.raises(errors.Unavailable, match="flotilla up"):
        Credential.of_stack(BindConfig(), tmp_path).read()
    made = make_credential(BindConfig(), tmp_path)
    assert make_credential(BindConfig(), tmp_path).read() == made.read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority.pem", "credential.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert "PRIVATE KEY" not in (made.read().chain + made.read().authorities).decode()
    assert days_left(own(made.read())) > 3600
    made.require_service("here")


def test_of_several_that_begin_a_stack_at_once_all_get_the_same_credential(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def begin(_: int) -> Pem:
        start.wait()
        return make_credential(BindConfig(), tmp_path).read()

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(begin, range(8)))
    assert len(set(found)) == 1
    assert own_problem(found[0]) == ""
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_credential_that_others_may_open_is_refused_with_its_mode_and_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    file = credential(tmp_path).path
    file.chmod(mode)
    for use in (
        lambda: Credential.of_stack(mine(file), tmp_path).read(),
        lambda: make_credential(mine(file), tmp_path),
    ):
        with pytest.raises(errors.InvalidConfig) as caught:
            use()
        for word in ("bind.credential_file", str(file), f"{mode:04o}", f"chmod 600 {file}"):
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a token of an older Flotilla\n", "is no credential.*token create"),
        (b"\xff\xfe", "not text"),
        (None, "is not there"),
    ],
)
def test_a_file_without_a_credential_is_refused_by_name(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "mine"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(errors.InvalidConfig, match=words) as caught:
        Credential.of_stack(mine(file), tmp_path).read()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("left_out", ["certificate", "key", "authority"])
def test_a_part_of_a_credential_is_none(tmp_path: Path, left_out: str) -> None:
    authorities, key, chain = credential(tmp_path).read()
    parts = {"certificate": chain, "key": key, "authority": authorities}
    write_secret(tmp_path / "part.pem", b"".join(parts[one] for one in parts if one != left_out).decode())
    with pytest.raises(errors.InvalidConfig, match=r"is no credential.*private key"):
        Credential(tmp_path / "part.pem").read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_credential_of_another_user_is_refused(tmp_path: Path) -> None:
    file = credential(tmp_path).path
    os.chown(file, 4711, 4711)
    with pytest.raises(errors.InvalidConfig, match="uid 4711"):
        Credential(file).read()


def test_a_named_pipe_or_an_empty_folder_in_place_of_a_credential_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "credential.pem", 0o600)
    with pytest.raises(errors.InvalidConfig, match="not a file"):
        Credential.of_stack(BindConfig(), tmp_path).read()
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.InvalidConfig, match=r"bind\.credential_file"):
        Credential.of_stack(mine(tmp_path / "empty"), tmp_path).read()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user enters; each start of pytest closes the one with `tmp_path` to others."""
    with tempfile.TemporaryDirectory(prefix="flotilla-trust-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "refused"), [(0o440, ""), (0o640, ""), (0o444, "0444"), (0o460, "0460")])
@pytest.mark.parametrize("shape", ["file", "folder"])
def test_a_secret_that_root_mounts_is_read_by_its_group_alone(
    open_folder: Path, mode: int, refused: str, shape: str
) -> None:
    """Kubernetes mounts a Secret as files of root's behind two links, and `fsGroup` as their group."""
    made = credential(open_folder / "made")
    parts = dict(zip(FOLDER, made.read(), strict=True))
    mount = open_folder / "mount"
    version = mount / "..2026_11_25"
    version.mkdir(parents=True)
    (mount / "..data").symlink_to(version.name)
    for name, content in (parts if shape == "folder" else {"credential.pem": made.path.read_bytes()}).items():
        (version / name).write_bytes(content)
        os.chown(version / name, 0, 10001)
        (version / name).chmod(mode)
        (mount / name).symlink_to(f"..data/{name}")
    for folder in (mount, version):
        folder.chmod(0o755)
    place = mount if shape == "folder" else mount / "credential.pem"
    program = (
        "import encodings.idna, os, pathlib, sys\n"
        "from flotilla_core.trust import Credential\n"
        "os.setgid(10001); os.setuid(10001)\n"
        "credential = Credential(pathlib.Path(sys.argv[1]), 'bind.credential_file')\n"
        "credential.require_service('here')\n"
        "print('read')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(place)], capture_output=True, text=True, check=False
    )
    if refused:
        # All may read a certificate, and nobody may write one.
        file = place / ("tls.key" if mode == 0o444 else "tls.crt") if shape == "folder" else place
        assert done.returncode != 0 and f"bind.credential_file {file}" in done.stderr
        assert f"its mode is {refused}" in done.stderr and f"chmod 440 {file}" in done.stderr
    else:
        assert done.stdout == "read\n", done.stderr


def test_reading_and_trying_a_credential_does_not_import_what_makes_one(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "import flotilla_core.rpc.server, flotilla_core.service, flotilla_core.trust.authority\n"
        "from flotilla_core.config import BindConfig\n"
        "made = flotilla_core.trust.authority.make_credential(BindConfig(), pathlib.Path(sys.argv[1]))\n"
        "made.require_service('here'); made.current()\n"
        "print('cryptography' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(credential(tmp_path).path.parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_a_file_that_is_being_written_or_is_gone_leaves_the_credential_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = credential(tmp_path)
    first, file, text = kept.current(), kept.path, kept.path.read_text()
    assert kept.current() is first
    for content in ("", text[: len(text) // 2], stranger(tmp_path).read().chain.decode() + text):
        file.write_text(content)
        assert kept.current() is first
    assert caplog.text.count("is not used") == 1, "it is told once a minute"
    file.write_text(text)
    file.chmod(0o644)
    assert kept.current() is first
    file.unlink()
    assert kept.current() is first
    write_secret(file, stranger(tmp_path).path.read_text())
    assert kept.current() == stranger(tmp_path).read()


def in_folder(folder: Path, given: Credential, *names: str) -> Credential:
    """A copy of a credential as a folder; only the files of these names where some are given."""
    folder.mkdir(exist_ok=True)
    for name, content in zip(FOLDER, given.read(), strict=True):
        if name in (names or FOLDER):
            write_secret(folder / name, content.decode())
    return Credential(folder)


def test_a_folder_is_taken_once_all_of_its_files_belong_together(tmp_path: Path) -> None:
    old, new = credential(tmp_path), stranger(tmp_path)
    kept = in_folder(tmp_path / "folder", old)
    first = kept.current()
    assert first == old.read()
    in_folder(kept.path, new, "tls.key")
    assert kept.current() is first
    in_folder(kept.path, new, "tls.crt", "ca.crt")
    assert kept.current() == new.read()


@pytest.mark.parametrize("name", ["tls.crt", "ca.crt"])
def test_others_may_read_the_certificates_of_a_folder_and_not_write_them(tmp_path: Path, name: str) -> None:
    """Whoever writes whom a service trusts, or what it shows, decides who its peers are."""
    kept = in_folder(tmp_path / "folder", credential(tmp_path))
    (kept.path / name).chmod(0o644)
    kept.read()
    for mode in (0o664, 0o646):
        (kept.path / name).chmod(mode)
        with pytest.raises(errors.InvalidConfig, match=rf"{name}.*{mode:04o}.*chmod 644 .*{name}"):
            kept.read()


def test_all_threads_get_the_same_replaced_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another object a server or a channel would take it for replaced once more."""

    def slowly(*given: Any, **options: Any) -> str:
        time.sleep(0.02)
        return read_secret(*given, **options)

    monkeypatch.setattr(credential_module, "read_secret", slowly)
    kept = credential(tmp_path)
    for text in (kept.path.read_text(), stranger(tmp_path).path.read_text()):
        write_secret(kept.path, text)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: kept.current(), range(8)))
        assert len({id(one) for one in found}) == 1 and found[0] == kept.read()


def test_a_service_keeps_its_credential_where_one_that_no_client_takes_is_put_over_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, role = credential(tmp_path), role_credential(tmp_path, "admin")
    text = kept.path.read_text()
    kept.require_service("trainer-0")
    first = kept.current()
    for bad in (role, expired(tmp_path)):
        write_secret(kept.path, bad.path.read_text())
        assert kept.current() is first
    assert re.findall("is not used: (.*role).*trainer-0", caplog.text) == ["a credential with a role"]
    write_secret(kept.path, text)
    assert kept.current() == first
    assert Credential(role.path).current() == role.read(), "a caller may show it"


@pytest.mark.parametrize("is_away", [False, True])
def test_a_certificate_is_used_until_its_time_ends_whatever_becomes_of_its_file(
    tmp_path: Path, is_away: bool
) -> None:
    ours, theirs = credential(tmp_path), stranger(tmp_path).read()
    end = time.time() + 1.5
    text = f"{ours.path.read_text()}{UNTIL}{end:.0f}\n{theirs.authorities.decode()}"
    write_secret(ours.path, f"{text}{UNTIL}12\n{theirs.authorities.decode()}")
    both = ours.current()
    assert both.authorities.count(b"BEGIN CERTIFICATE") == 2
    if is_away:
        ours.path.rename(tmp_path / "elsewhere.pem")
    while time.time() < int(f"{end:.0f}"):
        time.sleep(0.05)
    assert ours.current().authorities.count(b"BEGIN CERTIFICATE") == 1
    assert ours.current() is ours.current() is not both
    if not is_away:
        assert Credential(ours.path).current() == ours.current(), "who looks late does not lengthen it"


@pytest.mark.parametrize("end", [f"{UNTIL}soon", f"{UNTIL}12.5", f"{UNTIL}12\n# a remark"])
def test_an_end_that_cannot_be_read_trusts_nobody_for_ever(tmp_path: Path, end: str) -> None:
    ours, theirs = credential(tmp_path), stranger(tmp_path).read().authorities.decode()
    write_secret(ours.path, f"{ours.path.read_text()}{end}\n{theirs}")
    with pytest.raises(errors.InvalidConfig, match="the end of a certificate in a credential cannot be read"):
        Credential(ours.path).read()


def test_an_authority_that_the_stack_does_not_trust_makes_nothing(tmp_path: Path) -> None:
    make_credential(BindConfig(), tmp_path)
    before = (tmp_path / "authority.pem").read_text()
    rotate(tmp_path, 0)
    write_secret(tmp_path / "authority.pem", before)  # what a full disk leaves
    with pytest.raises(errors.FailedPrecondition, match=r"does not trust the authority.*token rotate"):
        create_credential(tmp_path, Claims("read", "ana", None))
    rotate(tmp_path, 0)
    create_credential(tmp_path, Claims("read", "ana", None))


def test_no_service_starts_by_a_credential_that_no_client_would_take(tmp_path: Path) -> None:
    for bad, words in (
        (role_credential(tmp_path, "admin"), "a credential with a role is for callers"),
        (expired(tmp_path), "certificate has expired"),
    ):
        with pytest.raises(errors.InvalidConfig, match=words) as caught:
            bad.require_service("trainer-0")
        assert "trainer-0" in str(caught.value) and str(bad.path) in str(caught.value)
    ours, other = credential(tmp_path).read(), stranger(tmp_path).read()
    write_secret(tmp_path / "mixed", (ours.chain + ours.key + other.authorities).decode())
    with pytest.raises(errors.InvalidConfig, match="no client would take"):
        Credential(tmp_path / "mixed").require_service("trainer-0")


@pytest.mark.parametrize("name", ["", "an a", "a:b", "x" * 65, "ä"])
def test_a_name_that_does_not_fit_into_a_certificate_is_refused(tmp_path: Path, name: str) -> None:
    credential(tmp_path)
    with pytest.raises(errors.InvalidRequest, match="no name of a holder"):
        create_credential(tmp_path, Claims("read", name, None))


def test_nobody_makes_or_replaces_credentials_without_the_authority(tmp_path: Path) -> None:
    """Neither the holder of a role nor a host that has a copy of the stack's own."""
    admin = role_credential(tmp_path / "stack", "admin")
    copied = tmp_path / "copied"
    copied.mkdir()
    for text in (admin.path.read_text(), credential(tmp_path / "stack").path.read_text()):
        write_secret(copied / "credential.pem", text)
        with pytest.raises(errors.FailedPrecondition, match="authority of the stack is not here"):
            create_credential(copied, Claims("read", "eve", None))
        with pytest.raises(errors.FailedPrecondition, match=r"bind\.credential_file"):
            rotate(copied)
        assert make_credential(BindConfig(), copied).path.read_text() == text
    assert [path.name for path in copied.iterdir()] == ["credential.pem"]


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("token_file", "/somewhere", "credential_file"),
        ("token_overlap_s", 60, "token rotate --overlap"),
        ("tls", {"certificate_file": "a", "key_file": "b", "ca_file": "c"}, "credential_file"),
        ("plaintext", True, "leave it out"),
    ],
)
def test_keys_of_older_releases_are_refused_with_what_to_do(key: str, value: object, instead: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is a key of an older Flotilla.*{instead}"):
        StackConfig.model_validate({"bind": {key: value}})
    unset = {"token_file": None, "token_overlap_s": 600, "tls": None, "plaintext": False, "port": 7070}
    assert StackConfig.model_validate({"bind": unset}).bind.port == 7070, "an older release wrote them down"
