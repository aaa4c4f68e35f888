"""Figures of a cluster file that look like another unit than the one that is read: taken as they are, with a note.

Data sheets sell links by the sum of both directions, and products with sparsity; a price is of one direction, and of
dense products. Network cards are sold in bits per second.
"""

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs import library
from megatron_terapipe.search.inputs.cluster import Device, Link
from megatron_terapipe.search.inputs.library import GIGABIT, GIGABYTE

CLOSE = 0.03
"""Relative difference up to which a figure is taken for a rounded one."""

LINE_RATES = (1, 2.5, 5, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800)
"""Gbit/s of network cards that are sold."""


def inside_doubt(device: Device, inside: Link) -> str | None:
    """Return a note if a link inside a node is faster than those of the device's usual machine."""
    if not _is_known(device):
        return None
    machine = library.usual_machine(device.name)
    usual, given = machine.inside.bandwidth / GIGABYTE, inside.bandwidth / GIGABYTE
    if given < usual * (2 - 2 * CLOSE):
        return None
    if _is_close(given, 2 * usual):
        return (
            f"inside {given:g} GB/s of {device.name} nodes is the sum of both directions, as links are sold: "
            f"bandwidths count one direction, so write {usual:g} GB/s"
        )
    return (
        f"inside {given:g} GB/s of {device.name} nodes is {given / usual:.2g} times that of a {machine.name}, which "
        f"has {usual:g} GB/s in one direction: check it"
    )


def network_doubt(network: Link) -> str | None:
    """Return a note if no network card has such a bandwidth, and bits may have been taken for bytes."""
    given = network.bandwidth / GIGABIT
    if given > LINE_RATES[-1] * (1 + CLOSE):
        return (
            f"network {given:g} Gbit/s ({given / 8:g} GB/s) is more than one card has: give the bandwidth of one card, "
            "their number in cards, and mind that cards are sold in Gbit/s"
        )
    if not _is_line_rate(given) and _is_line_rate(8 * given):
        return (
            f"network {given:g} Gbit/s is the rate of no card, and {given:g} GB/s is that of a card of {8 * given:g} "
            "Gbit/s: check the unit"
        )
    return None


def sparsity_doubt(device: Device) -> str | None:
    """Return a note if a device of the library has twice its FLOP/s of dense products."""
    if not _is_known(device):
        return None
    dense = library.device(device.name).half_flops / 1e12
    if not _is_close(device.half_flops / 1e12, 2 * dense):
        return None
    return (
        f"half_flops {device.half_flops / 1e12:g} TFLOP/s of {device.name} counts sparsity: write {dense:g} TFLOP/s, "
        "that of dense products"
    )


def _is_known(device: Device) -> bool:
    try:
        library.device(device.name)
    except ConfigError:
        return False
    return not library.is_guess(device.name)


def _is_close(given: float, figure: float) -> bool:
    return abs(given / figure - 1) <= CLOSE


def _is_line_rate(gigabits: float) -> bool:
    return any(_is_close(gigabits, rate) for rate in LINE_RATES)
