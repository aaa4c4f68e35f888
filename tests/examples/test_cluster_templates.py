"""Templates of jobs for Slurm, Kubernetes and AWS: shells and parsers take them, and the trainer takes their flags."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.launcher.runner import parse_args as deepspeed_arguments
from torch.distributed.run import get_args_parser as torchrun_parser

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.launch.hostfile import parse_hostfile
from megatron_terapipe.training.run_summary import dry_run
from tests.architecture.sources import ROOT

FOLDER = ROOT / "examples" / "clusters"
SCRIPTS = sorted(FOLDER.glob("*/*.sh"))
HOSTS = ("gpu-1", "gpu-2", "gpu-3", "gpu-4")
WORLD_SIZE = 32
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "gpu-[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_CPUS_PER_TASK": "12",
}
PLACES = {"DATA": "corpus", "TOKENIZER": "llama", "CHECKPOINTS": "saved"}

STANDS_FOR_A_LAUNCHER = """#!/usr/bin/env python3
import json, sys
json.dump(sys.argv, open("started.json", "w"))
"""


def started(script: Path, work: Path, **variables: str) -> list[str]:
    """The command that a script starts, with a program in place of each launcher."""
    programs = work / "bin"
    programs.mkdir()
    for name in ("srun", "deepspeed"):
        (programs / name).write_text(STANDS_FOR_A_LAUNCHER)
    (programs / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(HOSTS)}\n")
    (programs / "activate").touch()
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {**os.environ, **SLURM, **PLACES, "VENV": str(work), "PATH": f"{programs}:{os.environ['PATH']}", **variables}
    words = HOSTS if "aws" in script.parts else ()
    subprocess.run(["bash", str(script), *words], cwd=work, env=env, check=True, capture_output=True, text=True)
    command: list[str] = json.loads((work / "started.json").read_text())
    return [Path(command[0]).name, *command[1:]]


def trainer_words(command: list[str]) -> list[str]:
    return command[command.index("pretrain_gpt.py") + 1 :]


def job() -> dict[str, Any]:
    service, found = yaml.safe_load_all((FOLDER / "kubernetes" / "job.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "llama"}
    assert service["metadata"]["name"] == found["spec"]["template"]["spec"]["subdomain"]
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_trainer_and_launcher_take_the_command_of_a_script(path: Path, tmp_path: Path) -> None:
    command = started(path, tmp_path)
    config = parse_arguments(trainer_words(command))
    assert config.parallel.layout(WORLD_SIZE).data_parallel_size == 2
    assert config.checkpoint.save == config.checkpoint.load == PLACES["CHECKPOINTS"]
    assert config.data.data_path == [PLACES["DATA"]] or PLACES["DATA"] in str(config.data.data_path)
    if "torchrun" in command:
        found = torchrun_parser().parse_args(command[command.index("torchrun") + 1 :])
        assert (found.nnodes, found.nproc_per_node, found.rdzv_backend) == ("4", "8", "c10d")
        assert (found.rdzv_endpoint, found.training_script) == (f"{HOSTS[0]}:20007", "pretrain_gpt.py")
    elif command[0] == "deepspeed":
        given = deepspeed_arguments(command[1:])
        assert given.user_script == "pretrain_gpt.py"
        assert given.master_addr == HOSTS[0] or "aws" in path.parts
        hosts = parse_hostfile((tmp_path / given.hostfile).read_text(), "hostfile")
        assert sum(host.slots for host in hosts) == WORLD_SIZE
    if "slurm" in path.parts:
        asked = dict(
            line.removeprefix("#SBATCH --").partition("=")[::2]
            for line in path.read_text().splitlines()
            if line.startswith("#SBATCH --")
        )
        on_node = int(asked["ntasks-per-node"]) * (8 if path.stem == "torchrun" else 1)
        assert int(asked["nodes"]) * on_node == int(asked["nodes"]) * int(asked["gpus-per-node"]) == WORLD_SIZE


def test_a_script_says_what_it_needs(tmp_path: Path) -> None:
    for number, path in enumerate(SCRIPTS):
        work = tmp_path / str(number)
        work.mkdir()
        with pytest.raises(subprocess.CalledProcessError) as caught:
            started(path, work, TOKENIZER="")
        assert "TOKENIZER: directory with tokenizer.json" in caught.value.stderr


def test_ec2_sends_the_variables_of_efa_and_no_keys(tmp_path: Path) -> None:
    started(FOLDER / "aws" / "ec2.sh", tmp_path, AWS_SECRET_ACCESS_KEY="secret")
    hosts = parse_hostfile((tmp_path / "hostfile").read_text(), "hostfile")
    assert [(host.name, host.slots) for host in hosts] == [(name, 8) for name in HOSTS]
    lines = (tmp_path / "efa.env").read_text().splitlines()
    assert all(line.startswith(("FI_", "NCCL_")) for line in lines)
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())


def test_the_pods_of_kubernetes_start_all_ranks() -> None:
    spec = job()["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"]
    launcher = dict(word.removeprefix("--").split("=") for word in command if word.startswith("--") and "=" in word)
    pods, on_pod = int(launcher["nnodes"]), int(launcher["nproc_per_node"])
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == pods
    assert pods * on_pod == WORLD_SIZE and container["resources"]["limits"]["nvidia.com/gpu"] == on_pod
    # The first pod by its number, behind the service.
    assert launcher["master_addr"] == "llama-0.llama" and launcher["node_rank"] == "$(NODE)"
    assert "job-completion-index" in container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
    mounted = [each["mountPath"] for each in container["volumeMounts"]]
    assert {"/data", "/checkpoints", "/dev/shm"} == set(mounted)
    config = parse_arguments([str(word) for word in trainer_words(command)])
    assert config.parallel.layout(WORLD_SIZE).data_parallel_size == 2 and config.training.exit_signal_handler


def test_a_dry_run_of_the_command_passes_every_check(tmp_path: Path) -> None:
    """Of one: the others differ in where files are, and in when they end."""
    words = trainer_words(started(FOLDER / "slurm" / "srun.sh", tmp_path))
    of_job = [str(word) for word in trainer_words(job()["spec"]["template"]["spec"]["containers"][0]["command"])]
    model = of_job.index("--data-path")
    assert words[:model] == of_job[:model]
    config = parse_arguments([*words, "--dry-run-without-files"])
    lines = dry_run(config, LaunchEnvironment.first_of(WORLD_SIZE))
    assert "every check passed" in lines[0]
    assert "32 = 2 data x 4 tensor x 4 pipeline parallel" in "\n".join(lines)


def test_the_cluster_of_aws_has_efa_in_one_subnet() -> None:
    cluster = yaml.safe_load((FOLDER / "aws" / "parallelcluster.yaml").read_text())
    (queue,) = cluster["Scheduling"]["SlurmQueues"]
    (resource,) = queue["ComputeResources"]
    assert cluster["Scheduling"]["Scheduler"] == "slurm" and resource["MaxCount"] == 4
    assert resource["Efa"]["Enabled"] and queue["Networking"]["PlacementGroup"]["Enabled"]
    assert len(queue["Networking"]["SubnetIds"]) == 1
    assert "0.0.0.0/0" not in shlex.join(map(str, cluster["HeadNode"]["Ssh"].values()))
