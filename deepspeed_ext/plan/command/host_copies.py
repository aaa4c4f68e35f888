"""The host copies that the options ask for: what may wait on the host, and how fast copies are."""

import argparse
from math import inf, isfinite

from deepspeed_ext.plan.command.request import Request
from deepspeed_ext.plan.command.sizes import Memory
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.programs.host_copies import HostCopySettings

_DEPENDENT = ("host_bandwidth", "host_bytes")


def host_copies_of(options: argparse.Namespace, request: Request, memory: Memory) -> HostCopySettings | None:
    """Return what may wait on the host; None for nothing.

    Args:
        memory: bytes of a token.

    Raises:
        UserError: if sizes are missing, or an option is out of range or of no use.
    """
    if not options.offload:
        for name in _DEPENDENT:
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is for copies to the host: add --offload, or drop it")
        return None
    if memory.token_bytes is None:
        raise UserError("--offload needs the bytes of keys and values, or of stage inputs: add --token-bytes")
    instant = next((op for order in request.orders for op in order if not request.costs.duration(op)), None)
    if instant is not None:
        raise UserError(f"--offload plans copies by the times of ops, and {instant} takes none: give times above 0")
    to_host, from_host = _bandwidths(options.host_bandwidth)
    if options.host_bytes is not None and not options.host_bytes > 0:
        raise UserError(f"--host-bytes {options.host_bytes:g} leaves no room for any copy: give more than 0")
    return HostCopySettings(
        tuple(int(length) for length in memory.lengths),
        memory.token_bytes.stage_input or (0.0,) * request.shape.num_stages,
        memory.token_bytes.key_value,
        to_host,
        from_host,
        host_bytes=inf if options.host_bytes is None else options.host_bytes,
    )


def _bandwidths(text: str | None) -> tuple[float, float]:
    """Bytes per time to the host and back: one number for both ways, or one for each."""
    if text is None:
        return inf, inf
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) not in (1, 2) or not all(speed > 0 and isfinite(speed) for speed in speeds):
        raise UserError(
            f"--host-bandwidth {text} is no speed: give bytes per time above 0, or two with a comma between them"
        )
    return speeds[0], speeds[-1]
