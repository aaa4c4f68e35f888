"""Launch files: the trainer takes them, and no name or value in them runs a command here or on another host."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher.multinode_runner import PDSHRunner
from deepspeed.launcher.runner import EXPORT_ENVS

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.arguments.parser import read_command_line
from megatron_terapipe.command.train import main as train
from megatron_terapipe.command.train import split
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.presets import MODEL_PRESETS
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.launch.launcher import remote_words, variables
from megatron_terapipe.search.answer.output_files import Launch, launch_of, model_flags, nodes_in_order
from megatron_terapipe.search.machine.cluster_files import parse_cluster, read_cluster
from megatron_terapipe.search.price.workload_files import parse_workload, read_workload
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from tests.end_to_end.conftest import SECRETS
from tests.huggingface.files import least_settings
from tests.model.configs import MODELS
from tests.search.answer.answers import BEST, small_problem

PROBLEM = small_problem()


def launched(precision: str = "bf16") -> Launch:
    """Of sixteen ranks on two hosts."""
    return launch_of(BEST, replace(PROBLEM, precision=precision))


def words_of(command: str) -> list[str]:
    """The flags of the trainer."""
    return split(shlex.split(command)[2:])[1]


PRESETS = {name: read_workload(name).config for name in MODEL_PRESETS}
FAMILY_MODELS = {name: parse_workload(least_settings(name), "config.json").config for name in FAMILIES}


@pytest.mark.parametrize("model", [*PRESETS.values(), *MODELS.values(), *FAMILY_MODELS.values()])
def test_flags_rebuild_the_model(model: ModelConfig) -> None:
    training = "--mock-data --train-iters 1 --lr 1 --micro-batch-size 1".split()
    assert parse_arguments([*model_flags(model), *training]).model == model


def test_the_command_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    launch = launched()
    paths = launch.write(str(tmp_path / "out"))
    assert [Path(path).name for path in paths] == ["strategy.json", "hostfile", "ds_config.json", "launch.sh"]
    command = launch.command(str(tmp_path / "out"))
    assert command.startswith(f"terapipe train --hostfile {tmp_path}/out/hostfile --strategy")
    config = parse_arguments(words_of(command))
    assert config.token_slices().lengths == (80, 48)
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.precision.bf16
    assert config.model == PROBLEM.workload.config
    # The file says nothing that contradicts a flag.
    assert deepspeed_config(config, config.parallel.layout(16))["train_batch_size"] == 8
    assert (tmp_path / "out" / "hostfile").read_text() == "a-1 slots=8\na-2 slots=8\n"


def test_script_equals_the_command(tmp_path: Path) -> None:
    launch = launched("fp16")
    launch.write(str(tmp_path))
    program(tmp_path, "terapipe", ECHO)
    done = run(tmp_path / "launch.sh", work=tmp_path)
    assert ["terapipe", *done.stdout.splitlines()] == shlex.split(launch.command(str(tmp_path)))
    # From another directory, with data and another program.
    more = ["--data-path", "a b", "--dry-run"]
    done = run(tmp_path / "launch.sh", *more, work=tmp_path, PRETRAIN_GPT="my own.py")
    words = done.stdout.splitlines()
    assert words[:5] == ["train", "--hostfile", f"{tmp_path}/hostfile", "my own.py", "--strategy"]
    assert words[-3:] == more and "--mock-data" not in words
    assert (tmp_path / "launch.sh").stat().st_mode & 0o100


ECHO = "#!/bin/sh\nprintf '%s\\n' \"$@\"\n"
"""A program that prints its words, a line each."""


def program(work: Path, name: str, script: str) -> None:
    """Write a program that scripts run in place of another."""
    path = work / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def run(script: Path, *words: str, work: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script in a folder, with the programs that it has."""
    env = {**os.environ, "PATH": f"{work / 'bin'}:{os.environ['PATH']}", "MLFLOW_TRACKING_PASSWORD": "secret", **more}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, check=False, env=env, cwd=work)


def test_one_machine_needs_no_hostfile_and_a_model_by_layers_is_refused() -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": "cpu-core", "devices": 2}]}, "c.json")
    launch = launch_of(Strategy(pipeline_parallel_size=2), replace(PROBLEM, cluster=cluster, precision="fp32"))
    command = launch.command("out")
    assert command.startswith("DS_ACCELERATOR=cpu terapipe train --num-accelerators 2 --strategy")
    assert "bf16" not in command and "bf16" not in json.dumps(launch.deepspeed)
    with pytest.raises(ConfigError, match="given by layers"):
        launch_of(Strategy(), replace(PROBLEM, workload=replace(PROBLEM.workload, config=None)))


def test_hosts_are_in_the_order_of_the_ranks() -> None:
    cluster, _ = parse_cluster({"nodes": [{"hosts": ["a", "b", "c"], "device": "T4", "devices": 2}]}, "c.json")
    strategy = Strategy(pipeline_parallel_size=3, placement=(4, 0, 1))
    assert [(node.name, node.num_devices) for node in nodes_in_order(strategy, cluster)] == [("c", 1), ("a", 2)]
    assert launch_of(strategy, replace(PROBLEM, cluster=cluster)).strategy.placement is None
    with pytest.raises(ConfigError, match="placement comes back to node a"):
        nodes_in_order(Strategy(pipeline_parallel_size=3, placement=(0, 2, 1)), cluster)
    with pytest.raises(ConfigError, match=re.escape("placement names 3 devices up to 6")):
        nodes_in_order(Strategy(pipeline_parallel_size=3, placement=(0, 2, 6)), cluster)


def test_a_schedule_that_the_trainer_finds_is_found_for_the_same_cluster(tmp_path: Path) -> None:
    nodes = [{"hosts": ["a"], "device": "T4", "devices": 2}, {"hosts": ["b"], "machine": "dgx-a100"}]
    cluster, _ = parse_cluster({"nodes": nodes}, "c.json")
    strategy = Strategy(pipeline_parallel_size=4, schedule="optimised", placement=(2, 3, 0, 1))
    launch = launch_of(strategy, replace(PROBLEM, cluster=cluster))
    assert [Path(path).name for path in launch.write(str(tmp_path))][-1] == "cluster.json"
    assert f"--cluster {tmp_path}/cluster.json" in launch.command(str(tmp_path))
    assert '--cluster "$here/cluster.json"' in (tmp_path / "launch.sh").read_text()
    copying = Strategy(pipeline_parallel_size=2, recompute="stage", offload=True)
    assert launch_of(copying, replace(PROBLEM, cluster=cluster)).needs_cluster
    # In the order of the ranks, every figure as it was.
    assert read_cluster(str(tmp_path / "cluster.json")).nodes == launch.nodes


OPTION = "-oProxyCommand=touch${IFS}hit"
HOSTILE = [
    "$(touch hit)",
    "`touch hit`",
    "a;touch hit",
    "a|touch hit",
    "a&touch hit",
    'a"$(touch hit)',
    "a'$(touch hit)'",
    "a\ntouch hit",
]


@pytest.mark.parametrize("ending", ["", ".json"])
def test_a_host_that_is_an_option_of_ssh_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"cluster{ending}"
    path.write_text(
        f'{{"nodes": [{{"hosts": ["{OPTION}", "b"], "device": "T4"}}]}}' if ending else f"{OPTION} slots=1\nb slots=1\n"
    )
    with pytest.raises(ConfigError, match="is not a host name: write letters") as caught:
        read_cluster(str(path), device=None if ending else "T4")
    assert "ProxyCommand" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name])
def test_output_folder_is_not_run_by_shells(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    launched().write(str(folder))
    program(tmp_path, "terapipe", ECHO)
    done = run(folder / "launch.sh", "--data-path", name, work=tmp_path)
    assert done.stdout.startswith(f"train\n--hostfile\n{folder}/hostfile\n") and done.stdout.endswith(f"\n{name}\n")
    # No other host gets the words, and none enters such a folder.
    assert train(shlex.split(launched().command(str(folder)))[2:]) == 2
    monkeypatch.chdir(folder)
    launched().write(str(tmp_path))
    assert train(shlex.split(launched().command(str(tmp_path)))[2:]) == 2
    assert capsys.readouterr().err.count("which the shells of other hosts would read") == 2
    assert not list(tmp_path.rglob("hit"))


@pytest.mark.parametrize("word", HOSTILE)
def test_words_and_folders_that_shells_read(word: str) -> None:
    with pytest.raises(ConfigError, match="which the shells of other hosts would read"):
        remote_words(["--data-path", word])
    with pytest.raises(ConfigError, match="which the shells of other hosts would read"):
        remote_words([], Path("/tmp", word))


@pytest.mark.parametrize(
    "words",
    [
        ["--moe-layer-freq", "[0]*3+[1]*58"],
        ["--moe-layer-freq=([0]*3+[1])*8"],
        ["--no-rope-freq", "[0,1,1,0]"],
        ["--hybrid-layer-pattern", "M-*-|MEM*-"],
    ],
)
def test_shells_of_other_hosts_do_not_change_patterns_of_layers(words: list[str]) -> None:
    sent = remote_words(words)
    text = " ".join(PDSHRunner(SimpleNamespace(user_args=sent, user_script=""), "").parse_user_args())
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == remote_words(sent) == sent
    assert read_command_line(sent).given == read_command_line(words).given


def test_a_trial_hands_no_password_of_mlflow_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    assert "secret" not in variables(on_cpu=True).values()


def test_of_a_users_secrets_deepspeed_sends_none_but_those_of_mlflow(tmp_path: Path) -> None:
    """Its launcher over ssh exports variables by the beginnings of their names."""
    names = (*SECRETS, "OPENAI_API_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "AZURE_CLIENT_SECRET")
    sent = (*EXPORT_ENVS, *CUDA_Accelerator().export_envs())
    assert [name for name in names if name.startswith(sent)] == ["MLFLOW_TRACKING_PASSWORD"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o027, 0o750)])
def test_the_script_has_the_permissions_that_the_user_gives_to_files(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        launched().write(str(tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / "launch.sh").stat().st_mode & 0o777 == mode
