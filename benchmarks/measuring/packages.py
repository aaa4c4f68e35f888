"""Packages for the measurements on a device, beside an image's own torch and without a network.

Nothing is installed: wheels of packages that the image lacks are unpacked into `build/packages`, which only the steps
see. Packages of the image come first.
"""

import shlex
import sys
import zipfile
from collections.abc import Sequence
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cp{PYTHON.replace('.', '')}"
SITE = Path(__file__).parents[2] / "build" / "packages" / TAG
"""The unpacked wheels, for this Python."""

REQUIREMENTS = {
    "deepspeed": "deepspeed>=0.19.8,<0.20",
    **dict.fromkeys(("annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection")),
    **dict.fromkeys(("einops", "hjson", "msgpack", "numpy", "packaging", "psutil", "tqdm")),
    **dict.fromkeys(("llvmlite", "numba", "regex", "scipy", "tokenizers")),
    "yaml": "pyyaml",
    **dict.fromkeys(("hypothesis", "iniconfig", "pluggy", "pytest", "sortedcontainers")),
}
"""Modules that the steps import, and the requirement of each where it has another name. Torch is not brought."""

LARGE = ("llvmlite", "numba", "numpy", "scipy")
"""Those with wheels of many MB, which images with torch mostly have."""

_FROM_SOURCE = "deepspeed"
"""Has no wheels in the index."""

_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def missing_packages() -> list[str]:
    """Names of the modules that this Python and the unpacked wheels lack."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    return [name for name in ("torch", *REQUIREMENTS) if find_spec(name) is None]


def prepare_packages(wheels: Path | None) -> str:
    """Unpack wheels of a folder, or of none, and return why the steps cannot run; empty if they can."""
    try:
        for wheel in _lacking(sorted(wheels.glob("*.whl")) if wheels else []):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(SITE)
        invalidate_caches()
    except (OSError, zipfile.BadZipFile) as error:
        return f"{wheel} cannot be unpacked into {SITE}: {error}"
    missing = missing_packages()
    if "torch" in missing:
        return f"{sys.executable} has no torch: run the python3 that has it"
    if not missing:
        return ""
    where = f"{wheels} has no wheel of them for {TAG}" if wheels else "no folder of wheels was given"
    commands = "\n".join(f"    {line}" for line in bring_commands(missing))
    return (
        f"{sys.executable} lacks {', '.join(missing)}, and {where}: bring them by these commands on a machine with a "
        f"network, torch and Python {PYTHON}, then give --wheels wheels\n{commands}"
    )


def bring_commands(missing: Sequence[str], python: str = PYTHON) -> list[str]:
    """Commands that fill the folder `wheels` with packages for a Python, such as 3.12."""
    other = ["--python-version", python, *(word for tag in _PLATFORMS for word in ("--platform", tag))]
    download = ["pip", "download", "--only-binary", ":all:", "-d", "wheels", *(other if python != PYTHON else [])]
    commands = []
    if _FROM_SOURCE in missing:
        words = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", _requirement(_FROM_SOURCE)]
        commands.append(words)
    if ready := [_requirement(name) for name in missing if name != _FROM_SOURCE]:
        commands.append([*download, *ready])
    return [shlex.join(["python3", "-m", *words]) for words in commands]


def _requirement(name: str) -> str:
    return REQUIREMENTS[name] or name.replace("_", "-")


def _lacking(wheels: Sequence[Path]) -> list[Path]:
    """Those wheels for this Python whose package is not here."""
    found = []
    for wheel in wheels:
        name, *_, pythons, abi, _ = wheel.stem.split("-")
        if not any(_fits(python, abi) for python in pythons.split(".")):
            continue
        try:
            version(name)
        except PackageNotFoundError:
            found.append(wheel)
    return found


def _fits(python: str, abi: str) -> bool:
    """Whether this Python runs a wheel by two of its tags."""
    return python in (TAG, "py3") or (abi == "abi3" and int(python[3:]) <= sys.version_info.minor)
