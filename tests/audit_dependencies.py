"""`python -m tests.audit_dependencies`: known vulnerabilities of the packages that are installed beside this project.

One request to osv.dev (https://google.github.io/osv.dev/post-v1-querybatch/), which has the advisories of PyPI. The
command fails if a newer version of a package fixes one. Without a network it prints a line and passes.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from typing import Any

from packaging.version import InvalidVersion, Version

SERVER = "https://api.osv.dev/v1"
TIMEOUT_S = 5.0
"""Seconds without an answer after which there is no database."""

ACCEPTED: Mapping[str, str] = {}
"""Advisories that do not touch this project, each with the reason."""


def main(server: str = SERVER) -> int:
    """Print the advisories, and return the exit code: 1 if a newer version fixes one."""
    installed = sorted({(each.metadata["Name"], each.version) for each in distributions()})
    try:
        found = list(advisories(installed, server))
    except (OSError, ValueError, KeyError) as error:
        print(f"no advisory database reached ({server}: {error}): dependencies were not audited")
        return 0
    for name, version, advisory, fixed in found:
        remedy = f"update to {fixed}" if fixed else "no version fixes it yet"
        print(f"{name} {version} has {advisory}: {ACCEPTED.get(advisory, remedy)}")
    open_ones = [each for each in found if each[3] and each[2] not in ACCEPTED]
    print(f"{len(installed)} packages audited: {len(found)} advisories, {len(open_ones)} fixed by newer versions")
    return 1 if open_ones else 0


def advisories(installed: Sequence[tuple[str, str]], server: str) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield package, version, advisory, and the first newer version without it, if there is one."""
    # Builds of one version for several devices, such as 2.13.0+cpu, have the advisories of that version.
    queries = [
        {"package": {"ecosystem": "PyPI", "name": name}, "version": version.partition("+")[0]}
        for name, version in installed
    ]
    answers = _asked(f"{server}/querybatch", {"queries": queries})["results"]
    for (name, version), answer in zip(installed, answers, strict=True):
        for each in answer.get("vulns", []):
            yield name, version, each["id"], fixed_in(_asked(f"{server}/vulns/{each['id']}"), name, version)


def fixed_in(advisory: Mapping[str, Any], name: str, version: str) -> str | None:
    """Return the first fixed version of an advisory above the installed one; None if it names none."""
    fixed = (
        event["fixed"]
        for affected in advisory.get("affected", [])
        if affected.get("package", {}).get("name", "").lower() == name.lower()
        for spans in affected.get("ranges", [])
        if spans.get("type") == "ECOSYSTEM"
        for event in spans["events"]
        if "fixed" in event
    )
    above = [each for each in fixed if _version(each) > _version(version)]
    return min(above, key=_version, default=None)


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _asked(address: str, question: object = None) -> Any:
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})  # noqa: S310 - ours, https
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - ours, https
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main(os.environ.get("ADVISORIES", SERVER)))
