"""Two hosts, DeepSpeed's launcher and a hostfile: each stage on a host of its own."""

import json
import subprocess
from pathlib import Path

import pytest

from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, VARIABLES
from megatron_terapipe.launch.supervisor import VARIABLE
from tests.end_to_end.conftest import Trained
from tests.end_to_end.hosts import cuda_variables
from tests.end_to_end.hosts.network import Network
from tests.end_to_end.launching import DEEPSPEED, PRETRAIN, error_lines, flags, read_metrics

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]


def launch(
    two_hosts: Network, folder: Path, trainer_flags: list[str], *, program: object = PRETRAIN, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Launch from the first host, as its user would, with more variables set in the shell."""
    (folder / "hostfile").write_text(two_hosts.hostfile())
    # The launcher passes on only variables of a few names, and those of this file.
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nCUDA_MODULE_LOADING=LAZY\n")
    return two_hosts.hosts[0].run([DEEPSPEED, "--hostfile", "hostfile", program, *trainer_flags], folder, **variables)


def test_a_pipeline_over_two_hosts_trains_as_on_one(
    two_hosts: Network, trained: Trained, data: Path, tmp_path: Path
) -> None:
    run = launch(two_hosts, tmp_path, flags(data, "--metrics-file", tmp_path / "metrics.jsonl"))
    assert run.returncode == 0, run.stdout
    for host in two_hosts.hosts:
        assert f"{host.name}: [" in run.stdout  # pdsh puts the host before what it says
    found, evaluations = read_metrics(tmp_path / "metrics.jsonl")
    expected, expected_evaluations = read_metrics(trained.metrics)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
    assert len(evaluations) == len(expected_evaluations)


def test_bad_flags_end_the_launch_on_both_hosts(two_hosts: Network, data: Path, tmp_path: Path) -> None:
    run = launch(two_hosts, tmp_path, flags(data, "--token-slices", "9,9"))
    lines = error_lines("\n".join(line.partition(": ")[2] for line in run.stdout.splitlines()))
    assert len(lines) == 2, run.stdout  # one of each host
    assert run.returncode == 2


def test_no_host_gets_the_cuda_variables_of_the_launching_shell_and_all_get_those_of_the_file(
    two_hosts: Network, tmp_path: Path
) -> None:
    """So the trainer sets the missing ones in every process."""
    run = launch(two_hosts, tmp_path, [], program=cuda_variables.__file__, **{HARDWARE_QUEUES: "4", VARIABLE: "4711"})
    assert run.returncode == 0, run.stdout
    told = [line.partition("variables ")[2] for line in run.stdout.splitlines() if ": variables {" in line]
    expected = {variable.name: variable.value for variable in VARIABLES} | {"CUDA_MODULE_LOADING": "LAZY"}
    assert [json.loads(each) for each in told] == [expected] * 2, run.stdout
    # By its mark a launch is found and ended on every host.
    assert run.stdout.count(": mark 4711") == 2
