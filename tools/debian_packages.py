"""``python debian_packages.py FILE``: Debian packages of this system as a CycloneDX 1.6 document (for images; needs cyclonedx-bom)."""

import subprocess
import sys
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\n"


def component(line: str) -> Component:
    """An installed package, named as in a package URL (purl-spec, type ``deb``)."""
    _, name, version, architecture, source, source_version = line.split("\t")
    qualifiers = {"arch": architecture, "upstream": f"{source}@{source_version}"}
    url = PackageURL(type="deb", namespace="debian", name=name, version=version, qualifiers=qualifiers)
    return Component(type=ComponentType.LIBRARY, name=name, version=version, purl=url, bom_ref=str(url))


def main() -> None:
    """Write the file."""
    listed = subprocess.run(["dpkg-query", "--show", f"--showformat={FORMAT}"], check=True, capture_output=True, text=True).stdout
    bom = Bom(components=[component(line) for line in listed.splitlines() if line.startswith("installed\t")])
    Path(sys.argv[1]).write_text(JsonV1Dot6(bom).output_as_string(indent=2))


if __name__ == "__main__":
    main()
