"""Write what an image holds as a CycloneDX bill of materials: Python distributions and packages of the system.

    python sbom.py NAME VERSION OUTPUT

Run it with the interpreter of the image, in the final stage. It needs the standard library alone.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

SPECIFICATION = "1.5"
DPKG_STATUS = Path("/var/lib/dpkg/status")


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    name, version, output = sys.argv[1:]
    components = [*python_components(), *system_components(DPKG_STATUS)]
    Path(output).write_text(json.dumps(bill(name, version, components), indent=1) + "\n", "utf-8")
    print(f"{output}: {len(components)} components")
    return 0


def bill(name: str, version: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole document."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {"type": "container", "bom-ref": "image", "name": name, "version": version},
        },
        "components": sorted(components, key=lambda one: str(one["bom-ref"])),
    }


def python_components() -> Iterator[dict[str, Any]]:
    """Return the distributions that this interpreter can import."""
    for distribution in metadata.distributions():
        found = distribution.metadata
        name = re.sub(r"[-_.]+", "-", found["Name"]).lower()
        yield component("pypi", name, distribution.version, found.get("License-Expression") or "")


def system_components(status: Path) -> Iterator[dict[str, Any]]:
    """Return the packages that dpkg has installed; none on a system without dpkg."""
    if not status.exists():
        return
    for paragraph in status.read_text("utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            yield component("deb/debian", fields["Package"], fields["Version"], "")


def component(kind: str, name: str, version: str, license_expression: str) -> dict[str, Any]:
    """Return one component, named by its package URL."""
    purl = f"pkg:{kind}/{quote(name)}@{quote(version)}"
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if license_expression:
        found["licenses"] = [{"expression": license_expression}]
    return found


if __name__ == "__main__":
    sys.exit(main())
