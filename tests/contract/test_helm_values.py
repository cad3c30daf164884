"""The Helm chart without Helm: its values have one schema with the stack file, and its stack files load.

What needs Helm's engine is in tests/helm, whose golden files are read here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import yaml

from flotilla_core.config import StackConfig, load, load_text
from flotilla_launch.kubernetes.values import in_pods

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/helm"))
plan = importlib.import_module("plan")
LAUNCHED = plan.LAUNCHED
CHART = ROOT / "deploy/helm/flotilla"
VALUES = sorted(CHART.glob("values*.yaml"))
STACKS = sorted((ROOT / "tests/helm/golden").glob("*.stack.yaml"))


def test_the_chart_has_the_version_of_its_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    version = (ROOT / "VERSION").read_text("ascii").strip().partition("+")[0]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("file", VALUES, ids=lambda file: file.name)
def test_the_stack_of_a_values_file_is_a_stack_file(file: Path) -> None:
    values = yaml.safe_load(file.read_text("utf-8"))
    given = values.get("stack", {})
    stack = load_text(StackConfig, yaml.safe_dump(given))
    assert set(given) <= stack.model_fields_set


def test_no_values_file_names_a_key_that_the_first_one_does_not_explain() -> None:
    known = set(_keys(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))))
    for file in VALUES:
        named = set(_keys(yaml.safe_load(file.read_text("utf-8"))))
        assert named <= known, file.name


@pytest.mark.parametrize("file", STACKS, ids=lambda file: file.name)
def test_a_stack_file_that_the_chart_makes_loads(file: Path) -> None:
    stack = load(StackConfig, [file], resolve_paths=True)
    assert stack.bind.port
    # cert-manager writes three files into a folder, and a Secret of `flotilla token create` has one.
    folder = Path("/etc/flotilla/credential")
    assert stack.bind.credential_file == (folder if "secure" in file.name else folder / "credential.pem")
    assert (stack.nats.url, stack.nats.replicas) == ("nats://flotilla-nats.rl.svc:4222", 3)
    assert stack.placement == "separate"


def _keys(values: dict[str, object], above: str = "") -> list[str]:
    """Every key with those above it; what is below `stack`, in a volume or in a resource is explained elsewhere."""
    found = []
    for key, value in values.items():
        name = f"{above}{key}"
        found.append(name)
        if isinstance(value, dict) and key not in {"stack", "volume", "resources", "metadata", "functions"}:
            found += _keys(value, f"{name}.")
    return found


@pytest.mark.parametrize("case", plan.CASES)
def test_the_launcher_hands_to_helm_what_is_written_down(case: str, tmp_path: Path) -> None:
    written = (LAUNCHED / f"{case}.values.yaml").read_text("utf-8")
    assert plan.values_text(case, tmp_path) == written, (
        "run .venv/bin/python tests/helm/plan.py, then .venv-helm/bin/python tests/helm/chart.py"
    )


@pytest.mark.parametrize("case", plan.CASES)
def test_the_plan_of_the_launcher_is_what_helm_made_of_its_values(case: str, tmp_path: Path) -> None:
    rendered = yaml.safe_load((LAUNCHED / f"{case}.pods.yaml").read_text("utf-8"))
    made = {workload: pods for workload, pods in rendered.items() if pods["replicas"]}
    if case == "scaled":  # What scales the generators says how many; the plan has the least number.
        made["deployment/chat-flotilla-generator"]["replicas"] = 2
    assert plan.planned_pods(case, tmp_path) == made


@pytest.mark.parametrize("case", plan.CASES)
def test_pods_read_the_stack_file_of_the_user_with_what_follows_from_the_release(
    case: str, tmp_path: Path
) -> None:
    made = load(StackConfig, [LAUNCHED / f"{case}.stack.yaml"])
    wanted = in_pods(plan.stack_of(case, tmp_path))
    different = {name for name in StackConfig.model_fields if getattr(made, name) != getattr(wanted, name)}
    ours = {"state_dir", "kubernetes", "placement", "coordinator", "bind", "nats", "trainer", "teachers"}
    assert different <= ours
    for section in ("trainer", "generator", "reward", "critic"):
        assert getattr(made, section) == getattr(wanted, section).model_copy(update={"environment": {}})
    assert made.coordinator == wanted.coordinator.model_copy(update={"keep_runs": True})
    assert made.nats.url == (wanted.nats.url or "nats://chat-flotilla-nats.rl.svc:4222")
    assert (made.placement, str(made.state_dir)) == ("separate", "/var/lib/flotilla")
