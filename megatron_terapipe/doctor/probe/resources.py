"""Cores, memory, limits and network interfaces of a Linux host, from the files where the kernel says them."""

import fcntl
import os
import resource
import socket
import struct
from ipaddress import IPv6Address
from pathlib import Path

from megatron_terapipe.doctor.facts import Interface, Resources

ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""

IS_UP = 0x1
"""IFF_UP of Linux."""

CONTAINER = Path("/sys/fs/cgroup")


def resources() -> Resources:
    """Return cores, memory and limits of a process here."""
    total, free = _memory()
    shared = _room("/dev/shm")  # noqa: S108 - asked for its size
    return Resources(
        cores=_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        shared_memory_bytes=None if shared is None else shared[0],
        free_shared_memory_bytes=0 if shared is None else shared[1],
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        outgoing_ports=_outgoing_ports(),
    )


def interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces of this host."""
    return tuple(
        Interface(
            name=name,
            addresses=(*_ipv4(name), *_ipv6(name)),
            is_up=bool(int(_read(f"/sys/class/net/{name}/flags") or "0", 16) & IS_UP),
            speed_mbit=_speed(name),
            largest_packet=int(_read(f"/sys/class/net/{name}/mtu") or 0),
        )
        for _, name in socket.if_nameindex()
    )


def _outgoing_ports() -> tuple[int, int] | None:
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(CONTAINER / "cpu.max").partition(" ")
    # A container may have a share of the cores that it sees.
    return max(1, min(cores, int(quota) // int(period))) if quota.isdecimal() and period.isdecimal() else cores


def _memory() -> tuple[int, int]:
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, free = 1024 * kib.get("MemTotal", 0), 1024 * kib.get("MemAvailable", 0)
    limit, used = _read(CONTAINER / "memory.max"), _read(CONTAINER / "memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        return int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def _room(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _ipv4(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _ipv6(name: str) -> tuple[str, ...]:
    lines = (line.split() for line in _read("/proc/net/if_inet6").splitlines())
    return tuple(str(IPv6Address(int(words[0], 16))) for words in lines if words[-1] == name)


def _speed(name: str) -> int | None:
    speed = _read(f"/sys/class/net/{name}/speed")
    return int(speed) if speed.isdecimal() and int(speed) > 0 else None


def _read(path: "str | Path") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
