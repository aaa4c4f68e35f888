"""Attacks by files and names of other users. Each would make a file named `hit` if it ran a command.

Over several hosts the launchers are DeepSpeed's and pdsh themselves; `ssh` is a program that runs its command in a
shell of this machine, as the real one does on another.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE, Manifest, facts_of
from tests.end_to_end.conftest import SECRETS
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import DEEPSPEED, PRETRAIN, ROOT, environment, flags, launch
from tests.faults.campaign import Outcome, Settings
from tests.hostile_files import hostile_array, hostile_zip, legacy_torch_file, poison

TIMEOUT_S = 300
SHELL = """#!/bin/bash
# As ssh: its options first, one of which names a command, then the host, then words that a shell reads.
while [ $# -gt 0 ]; do
    case "$1" in
        -oProxyCommand=*) eval "${1#*=}"; shift ;;
        -o | -l | -p) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
shift
eval "$*"
"""
NAMES = ("$(touch {hit})", "`touch {hit}`", "a;touch {hit}", "a|touch {hit}", "a\ntouch {hit}\n", "a'\"$(touch {hit})")


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Attack by checkpoints, by the data cache, by names of hosts and folders, and look for secrets."""
    data = write_corpus(settings.folder)
    run = settings.folder / "run"
    launch(run, flags(data, "--save", "save", "--save-interval", 6), **SECRETS)
    held = [path.name for path in run.rglob("*") if path.is_file() and b"secret-of-" in path.read_bytes()]
    yield Outcome(
        fault="a run with keys in its environment",
        tried=1,
        message="no file or log holds one",
        broken=tuple(f"{name} holds a key" for name in held),
    )
    yield from _by_checkpoints(settings, run / "save", data)
    yield _by_cache(settings, data)
    yield _by_hosts(settings)
    if shutil.which("pdsh"):
        yield _by_folders(settings)


def _by_checkpoints(settings: Settings, saved: Path, data: Path) -> Iterator[Outcome]:
    """Let the trainer and the commands read a checkpoint of which one file is an attack, its manifest made to fit."""
    (checkpoint,) = saved.glob("global_step*")
    names = sorted(path.name for path in checkpoint.glob("*.pt"))
    attacks: tuple[Callable[[Path, Path], None], ...] = (poison, hostile_zip, legacy_torch_file)
    if settings.quick:
        names, attacks = [names[0], names[-1]], attacks[:1]
    load = ["--load", str(settings.folder / "attacked")]
    commands = [[DEEPSPEED, "--num_accelerators", "2", PRETRAIN, *flags(data, *load, "--train-iters", 8)]]
    commands.append([sys.executable, "-m", "megatron_terapipe.generate", *load, "--prompt", "a b"])
    for command in commands:
        broken, message = [], ""
        for name in names:
            for attack in attacks:
                attacked = settings.folder / "attacked"
                shutil.rmtree(attacked, ignore_errors=True)
                shutil.copytree(saved, attacked)
                attack(attacked / checkpoint.name / name, settings.folder / "hit")
                _make_manifest_fit(attacked / checkpoint.name)
                line = _run(command, settings.folder)
                message = line if name in line else message
                broken += _hits(settings.folder, name)
        program = "the trainer" if PRETRAIN in command else "generate"
        yield Outcome(
            fault=f"{program} reads a checkpoint with a pickle that makes a file",
            tried=len(names) * len(attacks),
            message=message,
            broken=tuple(broken),
        )


def _make_manifest_fit(directory: Path) -> None:
    files = {name: facts_of(directory / name) for name in Manifest.read(directory).files}
    (directory / MANIFEST_FILE).write_text(Manifest(files).text())


def _by_cache(settings: Settings, data: Path) -> Outcome:
    """Put pickles into the place of the arrays of the data cache."""
    arrays = sorted((data.parent / "index_cache").glob("*.npy"))
    for path in arrays:
        hostile_array(path, settings.folder / "hit")
    launch(settings.folder / "cached", flags(data))
    return Outcome(
        fault="arrays of the data cache are pickles",
        tried=len(arrays),
        message="computed again",
        broken=(*_hits(settings.folder, "the cache"), *([] if arrays else ["there was no cache"])),
    )


def _by_hosts(settings: Settings) -> Outcome:
    """Name an option of ssh as a host, wherever hosts are named."""
    host = f"-oProxyCommand=touch${{IFS}}{settings.folder / 'hit'}"
    (settings.folder / "hostfile").write_text(f"{host} slots=1\nb slots=1\n")
    nodes = {"nodes": [{"hosts": [host, "b"], "device": "T4"}]}
    (settings.folder / "cluster.json").write_text(json.dumps(nodes))
    search = [sys.executable, "-m", "megatron_terapipe.search"]
    batch = ["--global-batch-size", "8"]
    ways = [
        [*search, "rank", "gpt2", "hostfile", "--device", "T4", *batch],
        [*search, "rank", "gpt2", "cluster.json", *batch],
        [*search, "trial", "gpt2", "hostfile", "--device", "T4", *batch],
        [*search, "trial", "gpt2", "cluster.json", *batch],
        [*search, "measure", "gpt2", "--hostfile", "hostfile"],
        [sys.executable, PRETRAIN, *flags(Path("x")), "--dry-run-without-files", "--hostfile", "hostfile"],
    ]
    lines = [_run(way, settings.folder) for way in ways]
    not_refused = [f"not refused: {line}" for line in lines if "is not a host name" not in line]
    return Outcome(
        fault="a host is an option of ssh",
        tried=len(ways),
        message=lines[0],
        broken=(*not_refused, *_hits(settings.folder, "a host name")),
    )


def _by_folders(settings: Settings) -> Outcome:
    """Launch on two hosts from folders whose names are commands, with DeepSpeed's launcher and pdsh."""
    folder = settings.folder / "folders"
    folder.mkdir()
    (folder / "hostfile").write_text("a slots=4\nb slots=4\n")
    (folder / "train.py").write_text("import sys\nprint('started', *sys.argv[1:])\n")
    rank = [sys.executable, "-m", "megatron_terapipe.search", "rank", "gpt2", "hostfile", "--device", "T4"]
    plain = _run([*rank, "--global-batch-size", "8", "--output", "plain"], folder)
    started = _run(["bash", "plain/launch.sh", "--master_port", "1"], folder, all_lines=True)
    broken = [] if "started" in started else [f"a plain folder is not launched: {plain} {started[-300:]}"]
    message = ""
    for number, name in enumerate(NAMES):
        # A path of one part only: no name of a folder has a slash.
        hostile = folder / name.format(hit="hit")
        shutil.copytree(folder / "plain", hostile)
        message = _run(["bash", hostile / "launch.sh"], folder) or message
        broken += _hits(folder, f"folder {number}")
    return Outcome(
        fault="launch.sh is in a folder whose name is a command",
        tried=len(NAMES),
        message=message,
        broken=tuple(broken),
    )


def _run(command: list[object], folder: Path, *, all_lines: bool = False) -> str:
    """Run a command where `ssh` is ours, and return its first error, or its whole output."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "ssh").write_text(SHELL)
    (programs / "ssh").chmod(0o755)
    path = os.pathsep.join([str(programs), str(DEEPSPEED.parent), os.environ["PATH"]])
    variables = environment(PATH=path, PRETRAIN_GPT=str(folder / "train.py") if all_lines else str(PRETRAIN))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    return done.stdout if all_lines else next(iter(lines), "")


def _hits(folder: Path, attack: str) -> list[str]:
    """Return a line if an attack made its file, which is removed."""
    found = [path for path in (folder / "hit", ROOT / "hit") if path.exists()]
    for path in found:
        path.unlink()
    return [f"{attack} ran a command"] if found else []
