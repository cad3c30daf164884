"""What `deploy/` holds fits the services and each other; no Docker is needed to see that."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_core.bus.server import MAY_PUBLISH, find_binary
from flotilla_core.config import StackConfig, load
from flotilla_core.kinds import kind_name
from flotilla_core.telemetry import names
from flotilla_launch.placement import slots_of
from flotilla_testing.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "pyproject.toml").exists())
PROGRAMS_BESIDE = {"coordinator": ("libs/cli",)}  # who enters the container of a stack has the command there
COMPOSE = ROOT / "deploy" / "compose"
LAYERS = ("core.yaml", "gpu.yaml", "observability.yaml")
SECRETS = {"credential", "nats_credentials"}
LOGINS = {"service": "nats_credentials", "coordinator": "nats_coordinator_credentials"}
IMAGE = re.compile(r"^[^:\s]+:(?P<tag>\S+)$")


def layer(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / name).read_text("utf-8"))
    return found


def dockerfile(service: str) -> str:
    file = loaded(ROOT / "scripts/build_images.py").DOCKERFILES[service]
    return str(file.read_text("utf-8").replace("${SERVICE}", service))


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_an_image_that_runs_as_a_user_and_says_how_it_is(service: str) -> None:
    text, common = dockerfile(service), (ROOT / "deploy" / "docker" / "Dockerfile").read_text("utf-8")
    assert text.endswith("USER 10001:10001\n") and "HEALTHCHECK" in common and "ENTRYPOINT" in common
    assert f"FLOTILLA_SERVICE={service}" in text
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text + common, label
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases == ["${COMMON}", "${COMMON}"], "two stages on what all images share"
    default = re.search(r"^ARG BASE=(\S+)$", common, re.MULTILINE)
    assert default is not None and (tag := IMAGE.match(default[1])) is not None and tag["tag"] != "latest"
    for name in re.findall(r"/opt/image/(\w+\.\w+)", text + common):
        assert (ROOT / "deploy" / "docker" / name).is_file(), name


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_every_package_of_ours_that_its_service_needs(service: str) -> None:
    images = loaded(ROOT / "scripts/build_images.py")
    assert service in images.SERVICES
    if f"install.sh service {service}" not in dockerfile(service):  # pip finds there what it needs
        installed = set(re.findall(r"\./(libs/\w+|services/\w+)", dockerfile(service)))
        programs = {f"services/{service}", *PROGRAMS_BESIDE.get(service, ())}
        assert installed == programs.union(*map(_libraries_of, programs))
    assert images.LOCKS[service]
    for lock in images.LOCKS[service].values():
        assert (ROOT / "requirements" / f"{lock}.txt").is_file()
        assert f"={lock}\n" in dockerfile(service), "the Dockerfile and `make images` take the same locks"


def _libraries_of(project: str) -> set[str]:
    text = (ROOT / project / "pyproject.toml").read_text("utf-8")
    named = re.search(r"^dependencies = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    found = {f"libs/{name}" for name in re.findall(r'"flotilla-(\w+)"', named[1] if named else "")}
    return found | {deeper for one in found for deeper in _libraries_of(one)}


def test_the_context_of_a_build_holds_what_images_copy_and_no_secret() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")
    }
    assert allowed == {"LICENSE", "VERSION", "deploy/docker", "libs", "requirements", "services"}


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_runs_an_image_of_no_known_release(name: str) -> None:
    for service, described in layer(name)["services"].items():
        if "image" in described:
            image = re.sub(r"\$\{[^}]*\}", "x", described["image"])
            tag = IMAGE.match(image)
            assert tag is not None and tag["tag"] != "latest", f"{service}: {image}"


def test_the_core_runs_every_service_with_few_rights_and_no_writable_folder_of_another() -> None:
    core = layer("core.yaml")
    stack = load(StackConfig, [COMPOSE / "stack.yaml"])
    assert set(core["services"]) == {"nats", *(kind_name(slot.kind) for slot in slots_of(stack))}
    writers: dict[str, str] = {}
    for service, described in core["services"].items():
        assert described["read_only"] and described["init"] and described["cap_drop"] == ["ALL"], service
        assert described["security_opt"] == ["no-new-privileges:true"], service
        assert not described["user"].startswith("0"), service
        assert described["networks"] == ["private"] and "ports" not in described, service
        if service != "nats":
            assert _secrets(described) == SECRETS, service
        for volume in described.get("volumes", ()):
            source, *rest = re.sub(r"\$\{[^}]*\}", "x", volume).split(":")
            if rest[-1] != "ro":
                assert writers.setdefault(source, service) == service, (
                    f"{source} belongs to {writers[source]}"
                )
    assert core["networks"]["private"]["internal"] is True
    assert set(writers) == set(core["volumes"])


def _secrets(described: dict[str, Any]) -> set[str]:
    """Return the names under which a container finds its secrets."""
    return {secret if isinstance(secret, str) else secret["target"] for secret in described["secrets"]}


def test_the_coordinator_alone_has_the_login_that_may_write_events() -> None:
    core = layer("core.yaml")
    login = {"source": LOGINS["coordinator"], "target": LOGINS["service"]}
    assert [name for name, one in core["services"].items() if login in one["secrets"]] == ["coordinator"]
    assert LOGINS["coordinator"] in core["secrets"]


@pytest.mark.parametrize(
    "file", [COMPOSE / "secrets.sh", ROOT / "deploy" / "helm" / "flotilla" / "templates" / "nats.yaml"]
)
def test_users_of_nats_may_there_what_they_may_on_the_server_of_a_stack(file: Path) -> None:
    users = file.read_text("utf-8").partition("users: [")[2]
    names = re.findall(r"^ +user: (\w+)$", users, re.MULTILINE)
    lists = re.findall(r"publish: \[([^\]]*)\]", users)
    found = {
        name: tuple(re.findall(r'"([^"]+)"', text.replace("\\$", "$")))
        for name, text in zip(names, lists, strict=True)
    }
    assert found == MAY_PUBLISH
    assert users.count('subscribe: ["_INBOX.>"]') == len(names)


@pytest.mark.parametrize("name", LAYERS[1:])
def test_a_layer_changes_services_of_the_core_or_brings_its_own(name: str) -> None:
    own = layer(name)["services"]
    for service, described in own.items():
        assert service in layer("core.yaml")["services"] or "image" in described, service


@pytest.mark.parametrize("name", ["stack.yaml", "stack-gpu.yaml"])
def test_stack_files_of_containers_are_valid_and_name_secrets_that_are_mounted(name: str) -> None:
    stack = load(StackConfig, [COMPOSE / name])
    assert stack.bind.host == "0.0.0.0" and stack.nats.url == "nats://nats:4222"
    mounted = {f"/run/secrets/{secret}" for secret in SECRETS}
    assert {str(stack.bind.credential_file), str(stack.nats.credentials_file)} == mounted


def test_secrets_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    tree = tmp_path / "deploy" / "compose"
    tree.mkdir(parents=True)
    (tmp_path / "VERSION").write_text("1.2.3+source\n")
    script = tree / "secrets.sh"
    script.write_bytes((COMPOSE / "secrets.sh").read_bytes())
    for _ in range(2):
        subprocess.run(["sh", script], check=True, capture_output=True)
        made = {path.name: path.read_text() for path in (tree / "secrets").iterdir()}
        assert set(made) == {"authority.pem", "credential", *LOGINS.values(), "nats_conf"}
        assert {path.stat().st_mode & 0o777 for path in (tree / "secrets").iterdir()} == {0o600}
        for user, file in LOGINS.items():
            name, _, password = made[file].strip().partition(":")
            assert name == user and len(password) == 64 and password in made["nats_conf"]
        server = [find_binary(), "-t", "--config", str(tree / "secrets" / "nats_conf")]
        subprocess.run(server, check=True, capture_output=True)
    again = {path.name: path.read_text() for path in (tree / "secrets").iterdir()}
    assert again == made
    assert "FLOTILLA_TAG=1.2.3\n" in (tree / ".env").read_text()


def test_the_bill_of_materials_names_every_distribution(tmp_path: Path) -> None:
    output = tmp_path / "sbom.json"
    script = ROOT / "deploy" / "docker" / "sbom.py"
    subprocess.run([sys.executable, script, "image", "1.0", output], check=True, capture_output=True)
    bill = json.loads(output.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    found = {one["purl"] for one in bill["components"]}
    assert {one["bom-ref"] for one in bill["components"]} == found, (
        "each is listed under a reference of its own"
    )
    lock = (ROOT / "requirements" / "reward.txt").read_text("ascii")
    pins = [line.split("==") for line in lock.splitlines() if "==" in line]
    assert {f"pkg:pypi/{name}@{version}" for name, version in pins} <= found


def test_the_dashboard_asks_for_spans_that_services_write() -> None:
    dashboard = json.loads((COMPOSE / "observability/grafana/dashboards/flotilla.json").read_text("utf-8"))
    written = {value for value in vars(names).values() if isinstance(value, str)}
    asked = [
        pattern
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for pattern in re.findall(r'span_name=~?"([^"]+)"', target["expr"])
    ]
    assert asked
    for pattern in asked:
        assert any(re.fullmatch(pattern, name) for name in written), pattern


def test_scripts_of_images_are_shell_that_parses() -> None:
    scripts = [*(ROOT / "deploy").rglob("*.sh")]
    assert len(scripts) >= 5
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True)
