"""Renders the chart with Helm's own engine: the cases that ship, and what is kept of them in `golden/`.

    .venv-helm/bin/python tests/helm/chart.py

writes the golden files anew: the stack file of each case, which `make test` loads without Helm, and the objects of
kinds that Kubernetes has no schema for. Beside the values in `launched/`, which are those of the launcher, it writes
the pods and the stack file that Helm makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "flotilla"
GOLDEN = Path(__file__).resolve().parent / "golden"
LAUNCHED = Path(__file__).resolve().parent / "launched"
RELEASE, NAMESPACE = "flotilla", "rl"

CASES: dict[str, tuple[str, ...]] = {
    "demo": (),
    "gpu": ("values-gpu.yaml",),
    "secure": ("values-secure.yaml",),
    "scaled": ("values-gpu.yaml", "values-scaled.yaml"),
    "secure-scaled": ("values-gpu.yaml", "values-scaled.yaml", "values-secure.yaml"),
}
BUILT_IN = ("v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1", "scheduling.k8s.io/v1")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Manifest = dict[str, Any]


def values_of(case: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a case as `helm install -f A -f B` merges them, with `more` on top."""
    merged: dict[str, Any] = {}
    for file in CASES[case]:
        merged = _merged(merged, yaml.safe_load((CHART / file).read_text("utf-8")))
    return _merged(merged, more or {})


def rendered(case: str, more: Mapping[str, Any] | None = None) -> list[Manifest]:
    """Return every object that a release of the case would have."""
    texts = _chart().render(values_of(case, more), name=RELEASE, namespace=NAMESPACE)
    found = []
    for file, text in texts.items():
        if not file.endswith("NOTES.txt"):
            found += [manifest for manifest in yaml.load_all(text, Loader=LOADER) if manifest]
    return sorted(found, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


def notes(case: str) -> str:
    """Return what an installation of the case prints."""
    texts = _chart().render(values_of(case), name=RELEASE, namespace=NAMESPACE)
    return next(text for file, text in texts.items() if file.endswith("NOTES.txt"))


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return every pod template, labels and spec, by the kind and name of what makes the pods."""
    return {
        f"{manifest['kind']} {manifest['metadata']['name']}": template
        for manifest in manifests
        for template in _templates(manifest)
    }


def stack_text(manifests: list[Manifest]) -> str:
    """Return the stack file of a release."""
    return str(one(manifests, "ConfigMap", f"{RELEASE}-stack")["data"]["stack.yaml"])


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the object of that kind and name."""
    return next(each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))


def golden_texts() -> dict[str, str]:
    """Return the golden files as they would be written now."""
    texts = {}
    for case in CASES:
        manifests = rendered(case)
        texts[f"{case}.stack.yaml"] = stack_text(manifests)
        custom = [each for each in manifests if each["apiVersion"] not in BUILT_IN]
        if custom:
            texts[f"{case}.custom.yaml"] = yaml.safe_dump_all(custom, sort_keys=True)
    return texts


def launched_manifests(case: str) -> list[Manifest]:
    """Return every object that Helm makes of the values of the launcher."""
    values = yaml.safe_load((LAUNCHED / f"{case}.values.yaml").read_text("utf-8"))
    texts = _chart().render(values, name="chat", namespace="rl")
    made = [
        one
        for file, text in texts.items()
        if not file.endswith("NOTES.txt")
        for one in yaml.load_all(text, Loader=LOADER)
    ]
    return [manifest for manifest in made if manifest]


def launched_texts() -> dict[str, str]:
    """Return what Helm makes of each case of the launcher: its pods, and the stack file that they read."""
    texts = {}
    for path in sorted(LAUNCHED.glob("*.values.yaml")):
        case = path.name.partition(".")[0]
        manifests = launched_manifests(case)
        described = {}
        for manifest in manifests:
            for template in _templates(manifest):
                kind, name = manifest["kind"].lower(), manifest["metadata"]["name"]
                described[f"{kind}/{name}"] = _described(manifest, template)
        texts[f"{case}.pods.yaml"] = yaml.safe_dump(described, sort_keys=True)
        texts[f"{case}.stack.yaml"] = one(manifests, "ConfigMap", "chat-flotilla-stack")["data"]["stack.yaml"]
    return texts


def _described(workload: Manifest, template: Manifest) -> Manifest:
    """Return of a workload what the plan of the launcher says: its number of pods, and what runs in each."""
    container = template["spec"]["containers"][0]
    variables = {one["name"]: one.get("value") for one in container.get("env", ())}
    own = ("POD_NAME", "POD_IP", "POD_INDEX", "FLOTILLA_STACK", "FLOTILLA_PORT", "HOME", "XDG_CACHE_HOME")
    return {
        "command": [*container.get("command", ()), *container["args"]],
        "gpus": container["resources"].get("limits", {}).get("nvidia.com/gpu", 0),
        "port": container["ports"][0]["containerPort"],
        "replicas": workload["spec"].get("replicas", 1),
        "variables": {name: value for name, value in variables.items() if name not in own},
    }


@cache
def _chart() -> helm.Chart:
    return helm.Chart.load(str(CHART))


def _templates(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        else:
            for child in node.values():
                yield from _templates(child)
    elif isinstance(node, list):
        for child in node:
            yield from _templates(child)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def main() -> None:
    """Write the golden files."""
    GOLDEN.mkdir(exist_ok=True)
    texts = golden_texts()
    for stale in {path.name for path in GOLDEN.iterdir()} - texts.keys():
        (GOLDEN / stale).unlink()
    for name, text in texts.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
    for name, text in launched_texts().items():
        (LAUNCHED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
