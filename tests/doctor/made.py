"""Facts of hosts on which all checks pass, and functions that change them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_terapipe.doctor.facts import (
    Clock,
    Device,
    Examined,
    Folder,
    Host,
    HostFacts,
    Imports,
    Interface,
    Launching,
    Link,
    Names,
    Resources,
    Software,
)

GIB = 2**30
REQUIREMENTS = ("torch>=2.8", "deepspeed<0.20,>=0.19.8", "numpy>=1.26")

Change = Callable[[Examined], Examined]


def facts(number: int, *, devices: int) -> HostFacts:
    """Facts of one of three hosts."""
    return HostFacts(
        software=Software(
            python="/env/bin/python",
            python_version="3.12.4",
            packages={"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.0"},
            digest="0123456789ab",
            programs={"ssh": "/usr/bin/ssh", "pdsh": "/usr/bin/pdsh"},
            has_folder=True,
        ),
        devices=tuple(
            Device(name="NVIDIA H100", memory_bytes=80 * GIB, free_bytes=79 * GIB, processes=(), driver="570.86")
            for _ in range(devices)
        ),
        resources=Resources(
            cores=64,
            memory_bytes=512 * GIB,
            free_memory_bytes=500 * GIB,
            shared_memory_bytes=256 * GIB,
            free_shared_memory_bytes=256 * GIB,
            locked_memory_bytes=None,
            open_files=65536,
            processes=None,
            has_infiniband=True,
        ),
        interfaces=(
            Interface(name="lo", addresses=("127.0.0.1", "::1"), is_up=True),
            Interface(name="eth0", addresses=(f"10.0.0.{number}",), is_up=True),
            Interface(name="eth1", addresses=(f"10.1.0.{number}",), is_up=True),
        ),
        names=Names(
            hostname=f"node{number}",
            own_addresses=(f"10.0.0.{number}",),
            listed_addresses=(f"10.0.0.{number}", f"10.1.0.{number}"),
        ),
        variables={},
        folder=Folder(path="/shared", fault=None, free_bytes=10**12, sees_token=True),
    )


def healthy(*, devices: int = 8) -> Examined:
    """Three hosts on which a run would start."""
    imported = Imports(
        accelerator="cuda" if devices else "cpu",
        num_devices=devices,
        cuda="12.8" if devices else None,
        nccl="2.27.3" if devices else None,
    )
    hosts = tuple(
        Host(
            name=f"node{number}",
            slots=devices or 8,
            facts=facts(number, devices=devices),
            imports=imported,
            clock=Clock(offset_s=0.001, uncertainty_s=0.001),
        )
        for number in (1, 2, 3)
    )
    links = tuple(
        Link(
            source=f"node{source}",
            target=f"node{target}",
            address=f"10.0.0.{target}",
            port=29500 if is_meeting else 40_000,
            is_meeting=is_meeting,
            round_trip_s=5e-5,
        )
        for source, target, is_meeting in (
            *((1, 2, False), (2, 3, False), (3, 1, False)),
            *((2, 1, True), (3, 1, True)),
        )
    )
    launching = Launching(
        hostfile="hostfile",
        launcher="pdsh",
        python="/env/bin/python",
        project="/project",
        directory="/shared/work",
        checkpoints="/shared",
        save_is_given=True,
        master_port=29500,
        programs={"ssh": "/usr/bin/ssh", "pdsh": "/usr/bin/pdsh"},
        variables={},
        requirements=REQUIREMENTS,
    )
    return Examined(launching=launching, hosts=hosts, links=links)


def alone() -> Examined:
    """This machine, without a hostfile."""
    examined = healthy()
    host = replace(examined.hosts[0], name="this machine", slots=None)
    return Examined(launching=replace(examined.launching, hostfile=None), hosts=(host,))


def on(number: int, **changes: Any) -> Change:
    """Change facts of a host.

    Args:
        number: of the host, from 1.
        **changes: by the name of the field of `Host` or `HostFacts`; a dict changes some fields of a field.
    """

    def change(examined: Examined) -> Examined:
        hosts = list(examined.hosts)
        host = hosts[number - 1]
        for name, value in changes.items():
            owner: Any = host if name in vars(host) else host.facts
            old = getattr(owner, name)
            made = replace(owner, **{name: replace(old, **value) if isinstance(value, dict) and old != {} else value})
            host = made if owner is host else replace(host, facts=made)
        hosts[number - 1] = host
        return replace(examined, hosts=tuple(hosts))

    return change


def everywhere(**changes: Any) -> Change:
    """Change the facts of all hosts, as `on` does for one."""

    def change(examined: Examined) -> Examined:
        for number in range(1, len(examined.hosts) + 1):
            examined = on(number, **changes)(examined)
        return examined

    return change


def launching(**changes: Any) -> Change:
    """Change facts of the machine that launches."""
    return lambda examined: replace(examined, launching=replace(examined.launching, **changes))


def link(source: int, target: int, *, meeting: bool = False, **changes: Any) -> Change:
    """Change the attempt of a host to reach another one, or the rendezvous on it."""

    def change(examined: Examined) -> Examined:
        place = (f"node{source}", f"node{target}", meeting)
        links = [
            replace(each, **changes) if (each.source, each.target, each.is_meeting) == place else each
            for each in examined.links
        ]
        return replace(examined, links=tuple(links))

    return change
