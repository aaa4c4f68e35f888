"""Versions of what is installed, without importing it."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megatron_terapipe.doctor.facts import Software

PROGRAMS = ("ssh", "pdsh", "mpirun", "mpiexec", "srun")
SOURCES = ("deepspeed_ext", "megatron_terapipe")


def software(*, python: str, packages: list[str], project: str, directory: str) -> Software:
    """Return what is installed here.

    Args:
        project: folder where this project should be.
    """
    return Software(
        python=python if os.access(python, os.X_OK) else None,
        python_version=platform.python_version(),
        packages={name: found for name in packages if (found := _version(name)) is not None},
        apex=_apex(),
        toolkit=_toolkit(),
        digest=digest_of(Path(project)),
        programs=programs(),
        has_folder=os.path.isdir(directory),
    )


def programs() -> dict[str, str]:
    """Return the paths of the launchers that are on the PATH here."""
    return {name: path for name in PROGRAMS if (path := shutil.which(name)) is not None}


def digest_of(project: Path) -> str | None:
    """Return twelve letters that change with any source file of this project; None if it is not in this folder."""
    files = sorted(path for folder in SOURCES for path in (project / folder).rglob("*.py"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(project)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _apex() -> str | None:
    """Return whose apex is installed: NVIDIA's has fused optimizers, PyPI's package of that name has none."""
    try:
        found = find_spec("apex")
    except (ImportError, ValueError):
        return None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if found is None:
        return None
    return "nvidia" if any(Path(each, "optimizers", "fused_adam.py").exists() for each in folders) else "other"


def _toolkit() -> str | None:
    compiler = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else None
