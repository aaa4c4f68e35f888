"""Whether checkpoints can be written, and are the same files on all hosts; and whether clocks agree."""

from collections.abc import Iterator
from statistics import median_low

from megatron_terapipe.doctor.facts import Examined
from megatron_terapipe.doctor.findings import Finding, error, ok, warning

GB = 1e9
LEAST_ROOM = 10 * GB
"""A checkpoint of a model of 0.6 billion parameters, with its optimizer in fp32 (16 bytes each)."""

OFFSET_S = 1.0


def folder(examined: Examined) -> Iterator[Finding]:
    """Yield whether files can be written where checkpoints go."""
    for host, facts in examined.reached:
        found = facts.folder
        if found.fault is not None:
            level = error if examined.launching.save_is_given else warning
            yield level(
                "disk",
                host.name,
                f"{found.path}: {found.fault}",
                "checkpoints are written by ranks of all hosts",
                "give it to this user, or name another with --save",
            )
        elif found.free_bytes < LEAST_ROOM:
            yield warning(
                "disk",
                host.name,
                f"{found.free_bytes / GB:.1f} GB free in {found.path}",
                f"a checkpoint has 16 bytes for each parameter, {LEAST_ROOM / GB:.0f} GB for 0.6 billion",
                "make room, or name another directory with --save",
            )
        else:
            yield ok("disk", host.name, f"{found.free_bytes / GB:.0f} GB free in {found.path}")


def shared(examined: Examined) -> Iterator[Finding]:
    """Yield whether all hosts see the same files where checkpoints go."""
    for host, facts in examined.reached:
        if facts.folder.sees_token is None:
            continue
        if facts.folder.sees_token:
            yield ok("shared disk", host.name, f"sees the files of the first host in {facts.folder.path}")
            continue
        level = error if examined.launching.save_is_given else warning
        yield level(
            "shared disk",
            host.name,
            f"{facts.folder.path} is another directory than on {examined.hosts[0].name}",
            "all ranks save into one directory, and the first rank must find all files",
            "name a directory on a shared disk with --save, here and for the run",
        )


def clocks(examined: Examined) -> Iterator[Finding]:
    """Yield whether clocks agree: torchrun compares them, and so do people who read logs."""
    asked = [(host, host.clock) for host in examined.hosts if host.clock is not None]
    if len(asked) < 2:
        return
    usual = median_low(clock.offset_s for _, clock in asked)
    reference, uncertainty_s = next((host, clock.uncertainty_s) for host, clock in asked if clock.offset_s == usual)
    for host, clock in asked:
        offset_s = clock.offset_s - usual
        within_s = 0.0 if host is reference else clock.uncertainty_s + uncertainty_s
        found = f"its clock is {offset_s:+.3f} s (within {within_s:.3f} s) beside that of {reference.name}"
        if abs(offset_s) - within_s > OFFSET_S:
            yield warning(
                "clocks",
                host.name,
                found,
                "torchrun takes a host for dead whose clock is 15 s off, and lines of logs come in a wrong order",
                "start chronyd or ntpd there",
            )
        else:
            yield ok("clocks", host.name, found)
