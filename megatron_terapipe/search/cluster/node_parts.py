"""What a cluster file says of one node: its device, the links inside, the network cards."""

from megatron_terapipe.search.cluster import library
from megatron_terapipe.search.cluster.machine import Device, Link
from megatron_terapipe.search.cluster.machines import Machine
from megatron_terapipe.search.reading import Fields

BANDWIDTH_UNITS = {"GBps": 1e9, "Gbps": 1e9 / 8}
MEMORY_UNITS = {"GB": 1e9, "GiB": 2.0**30}
SPEED_UNITS = {"TFLOPs": 1e12}
TIME_UNITS = {"us": 1e-6}
"""Endings of fields that hold bare numbers, and what one of that unit is."""


def read_device(fields: Fields, name: str) -> tuple[Device, Machine]:
    """Read a device, and find the machine it is usually in.

    Args:
        fields: what has the field.
        name: the field. It holds a name in the library, or an object: `memory`, `memory_bandwidth`, `half_flops`,
            `single_flops`, `name`, `is_gpu`; with `like`, a name in the library, all of these may be left out.

    Raises:
        ConfigError: if the library does not know it, or a field is wrong.
    """
    if isinstance(fields.raw(name), str):
        found = library.device(fields.text(name), fields.place(name))
        return found, library.usual_machine(found.name)
    given = fields.section(name)
    known = library.device(given.text("like"), given.place("like")) if given.has("like") else None

    def quantity(field: str, kind: str, units: dict[str, float], usual: float) -> float:
        if known is None:
            return given.quantity(field, kind, units=units)
        return given.quantity(field, kind, usual, units=units)

    base = known or Device(name="device", memory_bytes=0, memory_bandwidth=0, half_flops=0, single_flops=0)
    device = Device(
        name=given.text("name", base.name),
        memory_bytes=quantity("memory", "memory", MEMORY_UNITS, base.memory_bytes),
        memory_bandwidth=quantity("memory_bandwidth", "bandwidth", BANDWIDTH_UNITS, base.memory_bandwidth),
        half_flops=quantity("half_flops", "speed", SPEED_UNITS, base.half_flops),
        single_flops=quantity("single_flops", "speed", SPEED_UNITS, base.single_flops),
        is_gpu=given.flag("is_gpu", base.is_gpu),
    )
    given.finish()
    return device, library.usual_machine(base.name if known else device.name)


def read_link(fields: Fields, name: str, usual: Link) -> Link:
    """Read a link: its bandwidth as text, or an object of `bandwidth` and `latency`.

    Args:
        fields: what has the field.
        name: the field.
        usual: what it is where the field leaves something out.
    """
    if isinstance(fields.raw(name), str):
        return Link(bandwidth=fields.quantity(name, "bandwidth"), latency_s=usual.latency_s)
    given = fields.section(name)
    link = _link(given, usual)
    given.finish()
    return link


def read_network(fields: Fields, name: str, usual: Link, usual_cards: int) -> tuple[Link, int]:
    """Read the network of a node: as for `read_link`, of one card, and the number of `cards`.

    Where the bandwidth is given and the number is not, there is one card.
    """
    if isinstance(fields.raw(name), str):
        return read_link(fields, name, usual), 1
    given = fields.section(name)
    says_bandwidth = any(each.startswith("bandwidth") for each in given.values)
    cards = given.whole("cards", 1 if says_bandwidth else usual_cards)
    link = _link(given, usual)
    given.finish()
    return link, cards


def _link(given: Fields, usual: Link) -> Link:
    return Link(
        bandwidth=given.quantity("bandwidth", "bandwidth", usual.bandwidth, units=BANDWIDTH_UNITS),
        latency_s=given.quantity("latency", "time", usual.latency_s, units=TIME_UNITS),
    )
