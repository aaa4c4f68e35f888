"""Whether packages are installed in versions that go together, on all hosts alike, and can be imported."""

from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from megatron_terapipe.doctor.facts import Examined
from megatron_terapipe.doctor.findings import Finding, Level, error, ok, same, warning

LEAST_PYTHON = "3.11"
COMPARED = ("torch", "deepspeed", "numpy", "transformers", "flash-attn", "flash-attn-3")
"""Packages that change the numbers or the messages of a rank."""


def packages(examined: Examined) -> Iterator[Finding]:
    """Yield whether each package is there in a version that this project takes, and is the same on all hosts."""
    hosts = list(examined.has_python)
    requirements = examined.launching.requirements
    if requirements is None:
        yield warning(
            "packages",
            None,
            "megatron-terapipe is not installed",
            "so the versions that it needs are not known",
            "pip install it, or --editable its folder",
        )
    wanted = [Requirement(each) for each in requirements or ("torch", "deepspeed", "numpy")]
    for host, facts in hosts:
        if Version(facts.software.python_version) < Version(LEAST_PYTHON):
            yield error(
                "packages",
                host.name,
                f"Python {facts.software.python_version}",
                f"must be {LEAST_PYTHON} or later",
                "make the environment with a later Python",
            )
        else:
            yield ok("packages", host.name, f"Python {facts.software.python_version}")
        for each in wanted:
            yield _version(host.name, each, facts.software.packages.get(each.name))
    yield from same(
        "packages",
        "Python",
        {host.name: facts.software.python_version for host, facts in hosts},
        "use one environment on all hosts",
    )
    for name in COMPARED:
        versions = {host.name: facts.software.packages.get(name) for host, facts in hosts}
        if any(versions.values()):
            yield from same("packages", name, versions, f"pip install one version of {name} everywhere")


def apex(examined: Examined) -> Iterator[Finding]:
    """Yield whether a package that is called apex is NVIDIA's."""
    for host, facts in examined.has_python:
        if facts.software.apex == "other":
            yield warning(
                "apex",
                host.name,
                "the package apex is not NVIDIA's",
                "PyPI's has the same name and no optimizers",
                "pip uninstall apex; torch's fused optimizer is used without it",
            )
        else:
            yield ok("apex", host.name, f"apex: {facts.software.apex or 'not installed, not needed'}")


def imports(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch and DeepSpeed can be imported, see the devices, and talk by one NCCL."""
    asked = [(host, facts, host.imports) for host, facts in examined.has_python if host.imports is not None]
    for host, facts, told in asked:
        if told.error is not None:
            yield error(
                "imports",
                host.name,
                f"torch and DeepSpeed cannot be imported: {told.error}",
                "every rank imports them",
                f"run {examined.launching.python} -c 'import deepspeed' there",
            )
            continue
        yield ok("imports", host.name, f"torch and DeepSpeed work on {told.accelerator}")
        if facts.devices and told.cuda is None:
            yield error(
                "cuda",
                host.name,
                f"{len(facts.devices)} x {facts.devices[0].name}, and a torch without CUDA",
                "torch must be built for CUDA",
                "pip install the CUDA build of torch (pytorch.org/get-started)",
            )
        elif facts.devices and told.num_devices == 0:
            yield error(
                "cuda",
                host.name,
                f"driver {facts.devices[0].driver} lists {len(facts.devices)} devices, torch sees none",
                f"torch needs a driver for CUDA {told.cuda}, and CUDA_VISIBLE_DEVICES that shows them",
                "update the driver, or install a torch for an older CUDA",
            )
        elif facts.devices:
            yield ok("cuda", host.name, f"CUDA {told.cuda} on driver {facts.devices[0].driver}")
        if facts.software.toolkit is not None and told.cuda is not None:
            yield _toolkit(host.name, facts.software.toolkit, told.cuda)
    working = {host.name: told for host, _, told in asked if told.error is None}
    if any(told.nccl for told in working.values()):
        nccl = {name: told.nccl for name, told in working.items()}
        yield from same("nccl", "NCCL", nccl, "install one build of torch on all hosts")
    accelerators = {name: told.accelerator for name, told in working.items()}
    yield from same("imports", "accelerator", accelerators, "leave out hosts without devices, or set DS_ACCELERATOR")


def drivers(examined: Examined) -> Iterator[Finding]:
    """Yield whether all hosts have one driver."""
    found = {host.name: facts.devices[0].driver for host, facts in examined.reached if facts.devices}
    yield from same("cuda", "driver", found, "update the older ones", Level.WARNING)


def _version(host: str, requirement: Requirement, found: str | None) -> Finding:
    if found is None:
        return error("packages", host, f"no {requirement.name}", f"needs {requirement}", f"pip install '{requirement}'")
    try:
        fits = requirement.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        return error(
            "packages",
            host,
            f"{requirement.name} {found}",
            f"must be {_bounds(str(requirement.specifier).split(','))}",
            f"pip install '{requirement}'",
        )
    return ok("packages", host, f"{requirement.name} {found}")


def _bounds(parts: Sequence[str]) -> str:
    return " and ".join(sorted(parts, reverse=True))


def _toolkit(host: str, toolkit: str, cuda: str) -> Finding:
    if toolkit.split(".")[0] == cuda.split(".")[0]:
        return ok("toolkit", host, f"nvcc {toolkit}, torch for CUDA {cuda}")
    return warning(
        "toolkit",
        host,
        f"nvcc {toolkit}, and torch for CUDA {cuda}",
        "DeepSpeed compiles its own kernels with a toolkit of torch's version alone",
        "install that toolkit and set CUDA_HOME; this project needs none of these kernels",
    )
