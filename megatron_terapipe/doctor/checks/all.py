"""Every check, in the order in which a launch would meet what they look at."""

from collections.abc import Callable, Iterator

from megatron_terapipe.doctor.checks import devices, disk, environment, network, reach, software
from megatron_terapipe.doctor.facts import Examined
from megatron_terapipe.doctor.findings import Finding, merged

Check = Callable[[Examined], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    reach.reached,
    reach.launchers,
    reach.one_machine,
    reach.folders,
    software.packages,
    software.apex,
    software.imports,
    software.drivers,
    devices.slots,
    devices.free_devices,
    devices.memory,
    devices.limits,
    environment.environment_file,
    environment.not_handed_on,
    environment.differences,
    environment.cuda,
    environment.threads,
    environment.interfaces,
    network.names,
    network.looked_up,
    network.ports,
    network.outgoing_ports,
    network.links,
    network.routes,
    disk.folder,
    disk.shared,
    disk.clocks,
)


def findings(examined: Examined) -> tuple[Finding, ...]:
    """Return what all checks found, worst first."""
    return merged(finding for check in CHECKS for finding in check(examined))
