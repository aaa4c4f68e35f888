"""`terapipe doctor`: check a machine, or several hosts, before a run."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, CommandParser, add_json_flag, command_main, up_to, write_json
from deepspeed_ext.plan.text_files import read_text
from deepspeed_ext.runtime.launch import is_this_host
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_terapipe.doctor.examination import Progress
    from megatron_terapipe.doctor.facts import Examined, Host, Launching

DESCRIPTION = """\
Check this machine, or all hosts of a hostfile, before a run: versions, devices, memory and limits, variables, names,
ports and links between hosts, clocks and disks. Each error and warning has a remedy.

The exit code is 0 if there is no error, 1 if there is one, and 2 for bad input."""

EPILOG = """\
examples:
  %(prog)s
  %(prog)s --hostfile hostfile --save /shared/checkpoints
  %(prog)s --hostfile hostfile --no-imports --json -

Read on: docs/how-to/doctor.md."""

LAUNCHERS = ("pdsh", "openmpi", "slurm", "mpich", "ssh")
THIS_MACHINE = "this machine"


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is its name as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    launch = parser.add_argument_group("planned run")
    launch.add_argument("--hostfile", metavar="FILE", help="check all hosts of this file (default: this machine)")
    launch.add_argument("--save", metavar="DIR", help="directory for checkpoints (default: the working directory)")
    launch.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="pdsh",
        help="DeepSpeed's name of the launcher; ssh for torchrun and others started by hand (default: pdsh)",
    )
    port = up_to(65_535)
    launch.add_argument(
        "--master-port", type=port, metavar="N", default=29500, help="port of the rendezvous (default: 29500)"
    )
    launch.add_argument("--ssh-port", type=port, metavar="N", help="port of sshd (default: as in ssh's settings)")
    how = parser.add_argument_group("checks")
    how.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=60.0, help="time limit of each host (default: 60)"
    )
    how.add_argument(
        "--no-imports", action="store_true", help="do not import torch and DeepSpeed, which takes most of the time"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--verbose", action="store_true", help="print checks that passed, too")
    add_json_flag(output, "facts and findings")
    output.add_argument("--schema", action="store_true", help="print the JSON Schema of the output, and exit")
    return parser


def _run(options: argparse.Namespace, prog: str) -> int:
    """Check, print, and return the exit code: 1 if there are errors."""
    if not 1 <= options.timeout <= 600:
        raise ConfigError(f"--timeout {options.timeout:g} is not from 1 to 600: give seconds")
    hosts = _hosts(options.hostfile)
    # Imported here: pydantic would make --help wait.
    from pydantic import TypeAdapter

    from megatron_terapipe.doctor.checks import findings
    from megatron_terapipe.doctor.findings import Document, Level, count, document, print_examination

    if options.schema:
        print(json.dumps(TypeAdapter(Document).json_schema(), indent=1))
        return 0
    with _progress_line() as progress:
        examined = _examine(options, hosts, progress)
    found = findings(examined)
    if options.json is not None:
        write_json(options.json, json.dumps(document(examined, found), indent=1))
    if options.json != STANDARD_OUTPUT:
        print_examination(examined, found, verbose=options.verbose)
    return 1 if count(found, Level.ERROR) else 0


def _hosts(hostfile: str | None) -> tuple["Host", ...]:
    from megatron_terapipe.doctor.facts import Host

    if hostfile is None:
        return (Host(name=THIS_MACHINE),)
    from megatron_terapipe.launch.hostfile import parse_hostfile

    listed = parse_hostfile(read_text(hostfile, "--hostfile"), hostfile)
    return tuple(Host(name=each.name, slots=each.slots) for each in listed if each.slots)


def _examine(options: argparse.Namespace, hosts: Sequence["Host"], progress: "Progress") -> "Examined":
    from megatron_terapipe.doctor.examination import Examination
    from megatron_terapipe.doctor.facts import launching_here

    launching = launching_here(
        hostfile=options.hostfile, launcher=options.launcher, save=options.save, master_port=options.master_port
    )
    commands = _commands(hosts, launching, options.ssh_port)
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    examination = Examination(launching, hosts, commands, environment, options.timeout, progress)
    return asyncio.run(examination.run(with_imports=not options.no_imports))


def _commands(hosts: Sequence["Host"], launching: "Launching", port: int | None) -> list[list[str]]:
    """Return the command of the probe of each host: a single host that is this one needs no ssh."""
    from megatron_terapipe.doctor.examination import local_command, ssh_command

    if len(hosts) == 1 and (launching.hostfile is None or is_this_host(hosts[0].name)):
        return [local_command()]
    return [ssh_command(host.name, launching, port) for host in hosts]


@contextmanager
def _progress_line() -> Iterator["Progress"]:
    """Show the progress in a line of the terminal, which is erased at the end; nothing where there is no terminal."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


main = command_main(build_parser, _run, "python -m megatron_terapipe.doctor")

if __name__ == "__main__":
    sys.exit(main())
