"""The chart by Helm's own engine: what it renders is valid on three versions of Kubernetes, and holds what it promises.

No cluster is asked: that pods start, find each other and are scaled is not shown here (deploy/helm/README.md).
`make test-helm` installs the engine into an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from chart import (
    BUILT_IN,
    CASES,
    CHART,
    GOLDEN,
    LAUNCHED,
    Manifest,
    golden_texts,
    launched_manifests,
    launched_texts,
    notes,
    one,
    pods,
    rendered,
    stack_text,
    values_of,
)

KUBERNETES = ("1.30", "1.33", "1.36")
MADE_SECRETS = {
    "auth": {
        "existingSecret": "",
        "credential": f"-----BEGIN CERTIFICATE-----\n{'cr3dential' * 7}\n",
        "natsPassword": "n4ts" * 8,
        "natsCoordinatorPassword": "c0ord" * 7,
        "natsRoutePassword": "r0ute" * 7,
    }
}
EVERYTHING = {
    "stack": {
        "critic": {"replicas": 1},
        "reference": {"replicas": 1},
        "teachers": {"math": {"replicas": 2}, "code_small": {"replicas": 1}},
    },
    "functions": {"mine.py": "def reward(prompt, response, answer, info):\n    return 1.0\n"},
}
"""Every gang, and functions of the user's: more than any of the files of values asks for."""
every_case = pytest.mark.parametrize("case", CASES)


@every_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_helm_has_nothing_to_say_against_it(case: str, version: str) -> None:
    report = helm.lint(str(CHART), values_of(case), strict=True, kube_version=f"v{version}.0")
    serious = [message for message in report["messages"] if message["severity"] > 1]
    assert not report["errors"]
    assert not serious


@every_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_of_a_built_in_kind_is_valid(case: str, version: str) -> None:
    checked = 0
    for manifest in [*rendered(case), *rendered(case, {**EVERYTHING, **MADE_SECRETS})]:
        if manifest["apiVersion"] in BUILT_IN:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked += 1
    assert checked > 40


def test_a_misspelt_key_of_an_object_would_be_seen() -> None:
    wrong = one(rendered("demo"), "Deployment", "flotilla-generator")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def test_stack_files_and_objects_of_other_kinds_are_the_golden_ones() -> None:
    written = {path.name: path.read_text("utf-8") for path in GOLDEN.iterdir()}
    assert golden_texts() == written, "run .venv-helm/bin/python tests/helm/chart.py, and read the difference"
    kinds = {each["kind"] for text in written.values() for each in yaml.safe_load_all(text) if "kind" in each}
    assert kinds == {"Certificate", "JobSet", "ScaledObject"}


@every_case
def test_no_pod_has_more_rights_than_it_needs(case: str) -> None:
    found = pods(rendered(case, EVERYTHING))
    assert len(found) >= 8
    for name, pod in found.items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] == 10001, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
            assert "memory" in container["resources"]["limits"], name
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), name


@every_case
def test_each_pod_has_an_account_of_its_own_that_mounts_no_token(case: str) -> None:
    manifests = rendered(case, EVERYTHING)
    accounts = [each for each in manifests if each["kind"] == "ServiceAccount"]
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    used = {pod["spec"]["serviceAccountName"] for pod in pods(manifests).values()}
    assert used == {account["metadata"]["name"] for account in accounts}


@every_case
def test_what_a_pod_mounts_is_there(case: str) -> None:
    manifests = rendered(case, EVERYTHING)
    made = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    claimed = {
        (each["metadata"]["name"], claim["metadata"]["name"])
        for each in manifests
        if each["kind"] == "StatefulSet"
        for claim in each["spec"].get("volumeClaimTemplates", [])
    }
    given = set(_texts(values_of(case))) | {"flotilla-auth"}
    if "secure" in case:
        given.add("flotilla-tls")  # cert-manager writes it
    for name, pod in pods(manifests).items():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        owner = name.split()[1]
        volumes |= {claim for workload, claim in claimed if workload == owner}
        mounts = {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]}
        assert mounts == volumes, name
        for kind, source in _sources(pod["spec"]["volumes"]):
            assert (kind, source) in made or source in given, f"{name} mounts {kind} {source}"


def test_a_policy_allows_each_pair_what_it_needs_and_no_more() -> None:
    grpc, nats, routes, weights = 7070, 4222, 6222, (32768, 60999)
    services = ("coordinator", "generator", "trainer", "critic", "reward")
    needed: dict[tuple[str, str], set[Any]] = {}
    for service in services[1:]:
        needed["coordinator", service] = {grpc}  # calls
        needed[service, "coordinator"] = {grpc}  # spans
    needed |= {(service, "nats"): {nats} for service in services}
    needed["nats", "nats"] = {routes}
    needed["trainer", "generator"] = needed["generator", "trainer"] = needed["generator", "generator"] = {
        weights
    }
    for case in CASES:
        manifests = rendered(case, EVERYTHING)
        for source, target in product((*services, "nats"), repeat=2):
            allowed = _allowed(manifests, _labels(manifests, source), _labels(manifests, target))
            assert allowed == needed.get((source, target), set()), f"{case}: {source} to {target}"


def test_beyond_its_own_pods_a_release_reaches_names_and_the_hub_alone() -> None:
    for case in CASES:
        manifests = rendered(case)
        outside = set()
        for policy in _policies(manifests):
            for rule in policy["spec"].get("egress", []):
                ours = [peer for peer in rule.get("to", []) if "podSelector" in peer]
                if len(ours) < len(rule.get("to", [None])):
                    outside |= {port["port"] for port in rule["ports"]}
        hub = {443} if case in ("demo", "secure") else set()
        assert outside == {53} | hub, case


def test_who_else_may_call_is_the_namespace_that_is_named() -> None:
    for case in CASES:
        strangers = [
            peer
            for policy in _policies(rendered(case))
            for rule in policy["spec"].get("ingress", [])
            for peer in rule["from"]
            if "namespaceSelector" in peer
        ]
        named = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "researchers"}}}]
        assert strangers == (named if "secure" in case else []), case


@every_case
def test_every_port_of_a_container_is_open_to_somebody_and_no_policy_opens_another(case: str) -> None:
    manifests = rendered(case, EVERYTHING)
    listening = {
        port["containerPort"]
        for pod in pods(manifests).values()
        for container in pod["spec"]["containers"]
        for port in container["ports"]
    }
    opened = {
        port["port"]
        for policy in _policies(manifests)
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
        if "endPort" not in port
    }
    assert listening == opened
    for name, pod in pods(manifests).items():
        ranges = [each["value"] for each in pod["spec"]["securityContext"].get("sysctls", [])]
        sends = pod["metadata"]["labels"].get("flotilla.role") == "trainer" or "generator" in name
        assert ranges == (["32768 60999"] if sends else []), name


@pytest.mark.parametrize("case", ["secure", "secure-scaled"])
def test_the_certificate_is_for_the_name_by_which_every_peer_is_checked_and_for_both_ends(case: str) -> None:
    spec = one(rendered(case, EVERYTHING), "Certificate", "flotilla-tls")["spec"]
    assert spec["dnsNames"] == ["service.flotilla"] and not {"uris", "ipAddresses"} & spec.keys()
    assert {"server auth", "client auth"} <= set(spec["usages"])


@every_case
def test_the_service_of_a_stateful_set_is_there_and_selects_its_pods(case: str) -> None:
    manifests = rendered(case, EVERYTHING)
    for each in manifests:
        if each["kind"] == "StatefulSet":
            service = one(manifests, "Service", each["spec"]["serviceName"])
            assert service["spec"]["clusterIP"] == "None"
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert service["spec"]["selector"].items() <= labels.items()
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"generator": {"drainSecond": 1}}, "drainSecond"),
        ({"trainer": {"resources": {"limit": {}}}}, "limit"),
        ({"images": {"generater": {"repository": "x"}}}, "generater"),
        ({"stack": {"generator": {"replcas": 2}}}, "replcas"),
        ({"stack": {"trainer": {"nproc": 0}}}, "nproc"),
        ({"nats": {"replicas": 2}}, "/nats/replicas"),
        ({"trainer": {"kind": "job"}}, "/trainer/kind"),
        ({"auth": {"credential": "a-word" * 7}}, "/auth/credential"),
        ({"auth": {"natsPassword": "two words" * 5}}, "/auth/natsPassword"),
        ({"auth": {"natsPassword": "t0o-short-to-be-secret"}}, "/auth/natsPassword"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=words):
        rendered("demo", values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stack": {"bind": {"host": "127.0.0.1"}}}, "stack.bind.host"),
        ({"stack": {"bind": {"port": 0}}}, "stack.bind.port"),
        ({"stack": {"placement": "colocated"}}, "stack.placement"),
        ({"stack": {"autoscale": {"mode": "act"}}}, "generator.autoscaling.kind"),
        ({"auth": {"existingSecret": ""}}, "auth.existingSecret"),
        ({"nats": {"enabled": False}}, "stack.nats.url"),
        ({"auth": {**MADE_SECRETS["auth"], "credential": ""}}, "auth.credential"),
        ({"generator": {"autoscaling": {"kind": "keda"}}}, "triggers"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_the_key_to_set(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(helm.HelmRenderError, match=words):
        rendered("demo", values)


def test_another_secret_or_stack_rolls_the_pods_that_read_it() -> None:
    before = _annotations(rendered("demo", MADE_SECRETS))
    assert _annotations(rendered("demo", MADE_SECRETS)) == before
    another = {"auth": {**MADE_SECRETS["auth"], "natsPassword": "another" * 5}}
    after = _annotations(rendered("demo", another))
    assert all(after[name] != before[name] for name in before)
    after = _annotations(rendered("demo", {**MADE_SECRETS, "stack": {"reward": {"workers": 3}}}))
    assert {name for name in before if after[name] == before[name]} == {"StatefulSet flotilla-nats"}
    # A Secret that the chart does not make: its owner says that it is another one.
    before = _annotations(rendered("demo"))
    after = _annotations(rendered("demo", {"auth": {"revision": "2"}}))
    assert all(after[name] != before[name] for name in before)


@every_case
def test_secrets_are_in_the_secret_alone(case: str) -> None:
    manifests = rendered(case, {**EVERYTHING, **MADE_SECRETS})
    words = ("cr3dential", "n4ts", "c0ord", "r0ute")
    holders = {each["kind"] for each in manifests if any(word in yaml.safe_dump(each) for word in words)}
    assert holders == {"Secret"}
    for pod in pods(manifests).values():
        secrets = [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in secrets)
        assert not [
            env for each in pod["spec"]["containers"] for env in each.get("env", []) if "secret" in str(env)
        ]


@every_case
def test_the_coordinator_alone_has_the_login_that_may_write_events(case: str) -> None:
    logins = {
        name: item["key"]
        for name, pod in pods(rendered(case, EVERYTHING)).items()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "secrets"
        for item in volume["secret"]["items"]
        if item["path"] == "nats-credentials"
    }
    writers = {name for name, key in logins.items() if key == "nats-coordinator-credentials"}
    assert writers == {"StatefulSet flotilla-coordinator"}
    assert len(logins) >= 8 and set(logins.values()) == {"nats-credentials", "nats-coordinator-credentials"}


def test_a_service_has_its_time_to_drain_and_then_some() -> None:
    for name, pod in pods(rendered("gpu", EVERYTHING)).items():
        (container,) = pod["spec"]["containers"]
        given = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--drain-grace=")]
        if given:
            assert pod["spec"]["terminationGracePeriodSeconds"] >= int(given[0]) + 10, name
    generator = pods(rendered("gpu"))["Deployment flotilla-generator"]
    assert "--drain-grace=120" in generator["spec"]["containers"][0]["args"]


def test_gpus_follow_from_the_stack() -> None:
    more = {"stack": {"generator": {"tensor_parallel_size": 2}, "critic": {"replicas": 1, "nproc": 3}}}
    found = {
        name: pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
        for name, pod in pods(rendered("gpu", more)).items()
    }
    assert {name: count for name, count in found.items() if count} == {
        "Deployment flotilla-generator": 2,
        "StatefulSet flotilla-trainer": 4,
        "StatefulSet flotilla-critic": 3,
    }
    assert not any("nvidia.com/gpu" in yaml.safe_dump(each) for each in rendered("demo", more))


def test_images_are_named_by_version_by_tag_or_by_digest() -> None:
    more = {
        "image": {"registry": "registry.example/team/"},
        "images": {
            "trainer": {"digest": f"sha256:{64 * 'a'}", "tag": "unused"},
            "reward": {"tag": "mine"},
        },
    }
    names = {pod["spec"]["containers"][0]["image"] for pod in pods(rendered("gpu", more)).values()}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"]
    kinds = {one["name"] for one in json.loads((CHART / "kinds.json").read_text("utf-8"))}
    others = kinds - {"coordinator", "generator", "trainer", "reward"}
    assert names == {
        *(f"registry.example/team/flotilla-{kind}:{version}" for kind in others),
        f"registry.example/team/flotilla-coordinator:{version}",
        f"registry.example/team/flotilla-generator:{version}-gpu",
        f"registry.example/team/flotilla-trainer@sha256:{64 * 'a'}",
        "registry.example/team/flotilla-reward:mine",
        "registry.example/team/nats:2.12",
    }


def test_a_kind_that_the_values_do_not_describe_runs_too() -> None:
    pod = pods(rendered("demo", {"reward": None, "images": {"reward": None}}))["Deployment flotilla-reward"]
    assert pod["spec"]["containers"][0]["image"].startswith("flotilla-reward:")
    assert pod["spec"]["terminationGracePeriodSeconds"] == 45
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}


def test_replicas_are_those_of_the_stack_unless_something_else_scales() -> None:
    manifests = rendered("demo", {"stack": {"generator": {"replicas": 0}, "trainer": {"replicas": 2}}})
    assert one(manifests, "Deployment", "flotilla-generator")["spec"]["replicas"] == 0
    assert one(manifests, "StatefulSet", "flotilla-trainer")["spec"]["replicas"] == 2
    for kind in ("hpa", "keda"):
        scaling = {"kind": kind, "keda": {"triggers": [{"type": "cpu", "metadata": {"value": "80"}}]}}
        manifests = rendered("demo", {"generator": {"autoscaling": scaling}})
        assert "replicas" not in one(manifests, "Deployment", "flotilla-generator")["spec"]


def test_a_gang_has_the_name_of_its_role() -> None:
    names = [
        argument.partition("=")[2]
        for pod in pods(rendered("demo", EVERYTHING)).values()
        for argument in pod["spec"]["containers"][0]["args"]
        if argument.startswith("--name=") and "flotilla.role" in pod["metadata"]["labels"]
    ]
    roles = ("critic", "reference", "teacher-code_small", "teacher-math", "trainer")
    assert sorted(names) == [f"{role}-$(POD_INDEX)" for role in roles]
    assert {pod for pod in pods(rendered("scaled", EVERYTHING)) if pod.startswith("JobSet")} == {
        *(f"JobSet flotilla-{role}-0" for role in ("critic", "reference", "teacher-code-small", "trainer")),
        "JobSet flotilla-teacher-math-0",
        "JobSet flotilla-teacher-math-1",
    }


@every_case
@pytest.mark.parametrize("replicas", [1, 3])
def test_nats_reads_its_configuration(case: str, replicas: int, tmp_path: Path) -> None:
    manifests = rendered(case, {**MADE_SECRETS, "nats": {"replicas": replicas}})
    files = one(manifests, "ConfigMap", "flotilla-nats")["data"]
    files |= one(manifests, "Secret", "flotilla-auth")["stringData"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    server = Path(sys.executable).parent / "nats-server"
    done = subprocess.run(
        [server, "-t", "--config", tmp_path / "nats.conf"],
        env={"POD_NAME": "flotilla-nats-0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    keeps = yaml.safe_load(stack_text(manifests))["nats"]["replicas"]
    assert keeps == replicas


@every_case
def test_the_notes_name_what_was_made(case: str) -> None:
    text = notes(case)
    assert "exec flotilla-coordinator-0 -- flotilla replicas list" in text
    assert "{{" not in text


def _annotations(manifests: list[Manifest]) -> dict[str, Any]:
    return {name: pod["metadata"]["annotations"] for name, pod in pods(manifests).items()}


def _policies(manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == "NetworkPolicy"]


def _labels(manifests: list[Manifest], service: str) -> dict[str, str]:
    """The labels of the pods of a service; of a gang by its role."""
    found = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    return next(
        labels
        for labels in found
        if labels.get("flotilla.role", labels["app.kubernetes.io/component"]) == service
    )


def _allowed(manifests: list[Manifest], source: dict[str, str], target: dict[str, str]) -> set[Any]:
    """The ports that the source may send to and the target may take, as Kubernetes joins policies."""
    return _ports(manifests, source, target, "egress", "to") & _ports(
        manifests, target, source, "ingress", "from"
    )


def _ports(
    manifests: list[Manifest], own: dict[str, str], peer: dict[str, str], direction: str, side: str
) -> set[Any]:
    rules = [
        rule
        for policy in _policies(manifests)
        if _selects(policy["spec"]["podSelector"], own)
        for rule in policy["spec"].get(direction, [])
    ]
    return {
        (port["port"], port["endPort"]) if "endPort" in port else port["port"]
        for rule in rules
        if any(_selects(each["podSelector"], peer) for each in rule.get(side, []) if "podSelector" in each)
        for port in rule["ports"]
    }


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def _sources(volumes: list[Manifest]) -> Iterator[tuple[str, str]]:
    for volume in volumes:
        for source in volume.get("projected", {}).get("sources", [volume]):
            if "configMap" in source:
                yield "ConfigMap", source["configMap"]["name"]
            if "secret" in source:
                yield "Secret", source["secret"].get("secretName") or source["secret"]["name"]
            if "persistentVolumeClaim" in source:
                yield "PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"]


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for child in node.values():
            yield from _texts(child)
    elif isinstance(node, str):
        yield node


def test_what_the_launcher_hands_to_helm_makes_the_pods_that_are_written_down() -> None:
    written = {
        path.name: path.read_text("utf-8") for path in LAUNCHED.iterdir() if ".values." not in path.name
    }
    assert launched_texts() == written, (
        "run .venv-helm/bin/python tests/helm/chart.py, and read the difference"
    )


@pytest.mark.parametrize(
    "case", sorted(path.name.partition(".")[0] for path in LAUNCHED.glob("*.values.yaml"))
)
def test_every_object_that_the_launcher_installs_is_valid(case: str) -> None:
    values = yaml.safe_load((LAUNCHED / f"{case}.values.yaml").read_text("utf-8"))
    report = helm.lint(str(CHART), values, strict=True, kube_version="v1.30.0")
    assert not report["errors"] and not [one for one in report["messages"] if one["severity"] > 1]
    for manifest in launched_manifests(case):
        if manifest["apiVersion"] in BUILT_IN:
            kubernetes_validate.validate(manifest, KUBERNETES[0], strict=True)


def test_another_number_of_replicas_replaces_no_pod() -> None:
    before = pods(rendered("demo"))
    scaled = pods(rendered("demo", {"stack": {"generator": {"replicas": 5}, "reward": {"replicas": 3}}}))
    assert scaled == before
    assert pods(rendered("demo", {"stack": {"restart_budget": 7}})) != before
