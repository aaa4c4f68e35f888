import json
import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.presets import MODEL_PRESETS
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.search.answer.output_files import launch_of, model_flags, nodes_in_order
from megatron_terapipe.search.machine.cluster_files import parse_cluster, read_cluster
from megatron_terapipe.search.price.workload_files import parse_workload, read_workload
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from tests.architecture.sources import ROOT as REPOSITORY
from tests.model.configs import MODELS
from tests.search.answer.answers import answer


def words_of(command: str) -> list[str]:
    """The flags of the trainer."""
    return shlex.split(command.split("pretrain_gpt.py", 1)[1])


@pytest.mark.parametrize("model", [*(read_workload(name).config for name in MODEL_PRESETS), *MODELS.values()])
def test_flags_rebuild_the_model(model: ModelConfig) -> None:
    config = parse_arguments(
        [*model_flags(model), "--mock-data", *"--train-iters 1 --lr 1 --micro-batch-size 1".split()]
    )
    assert config.model == model


@pytest.mark.parametrize("name", FAMILIES)
def test_flags_rebuild_the_model_of_every_family(name: str) -> None:
    model = parse_workload({"model_type": name}, "config.json").config
    assert model is not None
    config = parse_arguments(
        [*model_flags(model), "--mock-data", *"--train-iters 1 --lr 1 --micro-batch-size 1".split()]
    )
    assert config.model == model


def test_the_command_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    shown = answer()
    launch = launch_of(shown.entries[0].strategy, shown.workload.config, shown.cluster, "bf16")
    paths = launch.write(str(tmp_path / "out"))
    assert [Path(path).name for path in paths] == ["strategy.json", "hostfile", "ds_config.json", "launch.sh"]
    command = launch.command(str(tmp_path / "out"))
    assert command.startswith(f"deepspeed --hostfile {tmp_path}/out/hostfile pretrain_gpt.py --strategy")
    config = parse_arguments(words_of(command))
    assert config.token_slices().lengths == (80, 48)
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.precision.bf16
    assert config.model == shown.workload.config
    # The file says nothing that contradicts a flag.
    assert deepspeed_config(config, config.parallel.layout(16))["train_batch_size"] == 8
    assert (tmp_path / "out" / "hostfile").read_text() == "a-1 slots=8\na-2 slots=8\n"


def test_the_script_says_the_same_as_the_command(tmp_path: Path) -> None:
    shown = answer()
    launch = launch_of(shown.entries[0].strategy, shown.workload.config, shown.cluster, "fp16")
    launch.write(str(tmp_path))
    script = (tmp_path / "launch.sh").read_text()
    (launcher,) = re.findall(r"^launch=\((.*)\)$", script, re.MULTILINE)
    line = script.splitlines()[-1].replace('"${launch[@]}" "$trainer"', f"{launcher} pretrain_gpt.py")
    line = line.replace("$here", str(tmp_path)).replace('$data "$@"', "--mock-data")
    assert shlex.split(line) == shlex.split(launch.command(str(tmp_path)))
    assert (tmp_path / "launch.sh").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("flags", "program"),
    [(["--dry-run"], "python"), (["--dry-run-without-files"], "python"), ([], "deepspeed")],
)
def test_a_dry_run_needs_no_other_host(tmp_path: Path, flags: list[str], program: str) -> None:
    """The script of sixteen ranks on many hosts: with `--dry-run` it starts no launcher, which would ask for them."""
    shown = answer()
    launch_of(shown.entries[0].strategy, shown.workload.config, shown.cluster, "fp16").write(str(tmp_path))
    for name in ("python", "deepspeed"):
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        fake.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    script = ["bash", str(tmp_path / "launch.sh"), *flags]
    # From another directory than that of the trainer.
    env = {**os.environ, "PATH": path}
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=env, cwd=tmp_path)
    assert done.stdout.startswith(f"{program} ") and f"{REPOSITORY}/pretrain_gpt.py --strategy" in done.stdout
    assert done.stdout.split()[-1] == (flags[-1] if flags else "--mock-data")


def test_the_script_finds_the_trainer_or_says_how_to_name_it(tmp_path: Path) -> None:
    shown = answer()
    launch_of(shown.entries[0].strategy, shown.workload.config, shown.cluster, "bf16").write(str(tmp_path / "plan"))
    script = tmp_path / "plan" / "launch.sh"
    (tmp_path / "python").write_text('#!/bin/sh\necho "$1"\n')
    (tmp_path / "python").chmod(0o755)
    mine = tmp_path / "mine.py"
    mine.touch()
    run = partial(subprocess.run, ["bash", str(script), "--dry-run"], capture_output=True, text=True, cwd=tmp_path)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run(env=env).stdout == f"{REPOSITORY}/pretrain_gpt.py\n"
    assert run(env={**env, "PRETRAIN_GPT": str(mine)}).stdout == f"{mine}\n"
    missing = run(env={**env, "PRETRAIN_GPT": "none.py"})
    assert missing.stderr == "error: pretrain_gpt.py is not at none.py: set PRETRAIN_GPT to its path\n"
    # The checkout that wrote the script is gone.
    script.write_text(script.read_text().replace(str(REPOSITORY), str(tmp_path / "gone")))
    done = run(env=env)
    assert done.returncode == 2
    assert f"pretrain_gpt.py is not at {tmp_path}/gone/pretrain_gpt.py or here: set PRETRAIN_GPT" in done.stderr
    (tmp_path / "pretrain_gpt.py").touch()
    assert run(env=env).stdout == "./pretrain_gpt.py\n"


def test_one_machine_needs_no_hostfile() -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": "cpu-core", "devices": 2}]}, "c.json")
    launch = launch_of(Strategy(pipeline_parallel_size=2), answer().workload.config, cluster, "fp32")
    command = launch.command("out")
    assert command.startswith("DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 pretrain_gpt.py")
    assert "bf16" not in command and "bf16" not in json.dumps(launch.deepspeed)


def test_hosts_stand_in_the_order_of_the_ranks() -> None:
    cluster, _ = parse_cluster({"nodes": [{"hosts": ["a", "b", "c"], "device": "T4", "devices": 2}]}, "c.json")
    strategy = Strategy(pipeline_parallel_size=3, placement=(4, 0, 1))
    assert [(node.name, node.num_devices) for node in nodes_in_order(strategy, cluster)] == [("c", 1), ("a", 2)]
    assert launch_of(strategy, answer().workload.config, cluster, "fp16").strategy.placement is None
    with pytest.raises(ConfigError, match="placement comes back to node a"):
        nodes_in_order(Strategy(pipeline_parallel_size=3, placement=(0, 2, 1)), cluster)
    with pytest.raises(ConfigError, match=re.escape("placement names 3 devices up to 6")):
        nodes_in_order(Strategy(pipeline_parallel_size=3, placement=(0, 2, 6)), cluster)


def test_a_schedule_that_the_trainer_finds_is_found_for_the_same_cluster(tmp_path: Path) -> None:
    nodes = [{"hosts": ["a"], "device": "T4", "devices": 2}, {"hosts": ["b"], "machine": "dgx-a100"}]
    cluster, _ = parse_cluster({"nodes": nodes}, "c.json")
    strategy = Strategy(pipeline_parallel_size=4, schedule="optimised", placement=(2, 3, 0, 1))
    launch = launch_of(strategy, answer().workload.config, cluster, "fp16")
    assert [Path(path).name for path in launch.write(str(tmp_path))][-1] == "cluster.json"
    assert f"--cluster {tmp_path}/cluster.json" in launch.command(str(tmp_path))
    assert '--cluster "$here/cluster.json"' in (tmp_path / "launch.sh").read_text()
    copying = Strategy(pipeline_parallel_size=2, recompute="stage", offload=True)
    assert launch_of(copying, answer().workload.config, cluster, "fp16").needs_cluster
    # In the order of the ranks, every figure as it was.
    assert read_cluster(str(tmp_path / "cluster.json")).nodes == launch.nodes


def test_models_that_the_trainer_cannot_build() -> None:
    with pytest.raises(ConfigError, match="given by layers"):
        launch_of(Strategy(), None, answer().cluster, "bf16")
