"""The files and the command that run a strategy: strategy file, hostfile in the order of ranks, DeepSpeed file."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.text.file_modes import permit_to_run
from deepspeed_ext.plan.text.text_files import write_text
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.cluster import Cluster, Node
from megatron_terapipe.search.inputs.described import cluster_document
from megatron_terapipe.search.inputs.hostfile import hostfile_text
from megatron_terapipe.search.report.figures import sequences
from megatron_terapipe.search.report.remote_words import SHELL_CHECK, check_remote_words
from megatron_terapipe.strategy import Strategy

TRAIN_ITERATIONS = 100
LEARNING_RATE = "1e-4"

HEADER = """#!/usr/bin/env bash
# Written by the strategy search: runs {iterations} iterations on random tokens. Flags that follow are added, so
#   ./launch.sh --data-path PREFIX --train-iters 100000
# trains on data; tokenizer, schedule of the learning rate and checkpoints are yours to say. `--dry-run` only checks.
# It runs from any directory. PRETRAIN_GPT names another pretrain_gpt.py than that of the checkout that wrote it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=--mock-data
case " $* " in *" --data-path "* | *" --train-data-path "*) data= ;; esac
"""

FIND_TRAINER = """trainer=${{PRETRAIN_GPT:-}}
beside_package={beside_package}
for each in "$beside_package" ./pretrain_gpt.py; do
    if [ -z "$trainer" ] && [ -f "$each" ]; then trainer=$each; fi
done
if [ ! -f "$trainer" ]; then
    echo "error: pretrain_gpt.py is not at ${{trainer:-$beside_package or here}}: set PRETRAIN_GPT to its path" >&2
    exit 2
fi
"""

DRY_RUN = """# Checks are made in one process and need no other host.
case " $* " in *" --dry-run"*) launch=(python) ;; esac
"""

LOST_HOSTS = """# The ssh of DeepSpeed's launcher waits for a host that is lost as long as ranks do, and no longer.
export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND--o ServerAliveInterval=60 -o ServerAliveCountMax=30}"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The files that launch a strategy, by their contents.

    Attributes:
        launcher: words before `pretrain_gpt.py`.
    """

    strategy: Strategy
    """As `--strategy` reads it."""
    nodes: tuple[Node, ...]
    """In the order of the ranks."""
    deepspeed: dict[str, Any]
    """The DeepSpeed file; it repeats what the flags say, and is the place for more."""
    flags: tuple[str, ...]
    """Of `pretrain_gpt.py`, without those that name the two files."""
    on_cpu: bool
    """Whether DeepSpeed must be told to take the CPU."""
    many_nodes: bool
    """Whether a hostfile is needed."""
    needs_cluster: bool = False
    """Whether the trainer finds its schedule, or plans copies to hosts, and must be told for which cluster."""

    def command(self, directory: str) -> str:
        """Return the command of the script in one line, to be run where `pretrain_gpt.py` is.

        Raises:
            ConfigError: if other hosts would read a word otherwise.
        """
        words = [*self._launcher(f"{directory}/hostfile"), "pretrain_gpt.py", *self._files(directory), *self.flags]
        if self.many_nodes:
            check_remote_words(words)
        prefix = "DS_ACCELERATOR=cpu " if self.on_cpu else ""
        return prefix + shlex.join([*words, "--mock-data"])

    def write(self, directory: str) -> list[str]:
        """Write the files into a directory, which is created if needed, and return their paths.

        Raises:
            ConfigError: if they cannot be written, or other hosts would read a flag otherwise.
        """
        beside_package = shlex.quote(str(Path(__file__).parents[3] / "pretrain_gpt.py"))
        script = [HEADER.format(iterations=TRAIN_ITERATIONS), FIND_TRAINER.format(beside_package=beside_package)]
        if self.on_cpu:
            script.append("export DS_ACCELERATOR=cpu\n")
        script.append(f"launch=({_quoted(self._launcher('$here/hostfile'))})\n{DRY_RUN}")
        if self.many_nodes:
            check_remote_words(self.flags)
            script += [SHELL_CHECK, LOST_HOSTS]
        words = _quoted([*self._files("$here"), *self.flags])
        script.append(f'"${{launch[@]}}" "$trainer" {words} $data "$@"\n')
        contents = {
            "strategy.json": json.dumps(self.strategy.to_json(), indent=2) + "\n",
            "hostfile": hostfile_text(self.nodes),
            "ds_config.json": json.dumps(self.deepspeed, indent=2) + "\n",
            "launch.sh": "".join(script),
        }
        if self.needs_cluster:
            contents["cluster.json"] = json.dumps(cluster_document(self.nodes), indent=2) + "\n"
        paths = []
        for name, content in contents.items():
            path = Path(directory) / name
            write_text(path, content, make_folder=True)
            paths.append(str(path))
        permit_to_run(Path(directory) / "launch.sh")
        return paths

    def _launcher(self, hostfile: str) -> list[str]:
        if self.many_nodes:
            return ["deepspeed", "--hostfile", hostfile]
        return ["deepspeed", "--num_accelerators", str(self.strategy.world_size)]

    def _files(self, directory: str) -> list[str]:
        files = ["--strategy", f"{directory}/strategy.json", "--deepspeed-config", f"{directory}/ds_config.json"]
        return [*files, "--cluster", f"{directory}/cluster.json"] if self.needs_cluster else files


def launch_of(strategy: Strategy, model: ModelConfig | None, cluster: Cluster, precision: str) -> Launch:
    """Return what launches a strategy.

    Args:
        model: the trainer's model section; None = a model that it cannot build.
        precision: `bf16`, `fp16` or `fp32`.

    Raises:
        ConfigError: if the trainer cannot build the model, or the launcher cannot place the ranks so.
    """
    if model is None:
        raise ConfigError(
            "the model is given by layers, which pretrain_gpt.py cannot build: launch it with your trainer"
        )
    nodes = nodes_in_order(strategy, cluster)
    placed = replace(strategy, placement=None)
    zero = {"stage": strategy.zero_stage}
    deepspeed: dict[str, Any] = {
        "train_batch_size": sequences(strategy),
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        deepspeed[precision] = {"enabled": True}
    training = ["--train-iters", str(TRAIN_ITERATIONS), "--lr", LEARNING_RATE, "--log-interval", "10"]
    return Launch(
        strategy=placed,
        nodes=nodes,
        deepspeed=deepspeed,
        flags=(*([] if precision == "fp32" else [f"--{precision}"]), *model_flags(model), *training),
        on_cpu=not all(node.device.is_gpu for node in nodes),
        many_nodes=len(nodes) > 1,
        needs_cluster=strategy.schedule == OPTIMISED or strategy.offload,
    )


def nodes_in_order(strategy: Strategy, cluster: Cluster) -> tuple[Node, ...]:
    """Return the nodes in the order in which their ranks come, each with the devices that are used.

    Args:
        cluster: the nodes, in the order of the hostfile.

    Raises:
        ConfigError: if the ranks of a node do not follow each other: launchers fill one node after the other.
    """
    places = strategy.placement or tuple(range(strategy.world_size))
    if len(places) != strategy.world_size or max(places) >= cluster.num_devices:
        raise ConfigError(
            f"strategy: placement names {len(places)} devices up to {max(places)} for {strategy.world_size} ranks on a "
            f"cluster of {cluster.num_devices}: give one device for each rank"
        )
    runs = [(index, len(list(run))) for index, run in groupby(cluster.node_of_device[place] for place in places)]
    seen: dict[int, int] = {}
    for index, length in runs:
        if index in seen:
            raise ConfigError(
                f"strategy: placement comes back to node {cluster.nodes[index].name}: launchers fill one node after "
                "the other, so put the ranks of a node next to each other"
            )
        seen[index] = length
    return tuple(replace(cluster.nodes[index], num_devices=length) for index, length in runs)


def model_flags(model: ModelConfig) -> list[str]:
    """Return the fewest flags that make `pretrain_gpt.py` build a model."""
    values = {each.name: getattr(model, each.name) for each in fields(ModelConfig) if each.name != "model_preset"}
    whole = ModelConfig(**values)
    given = {name: value for name, value in values.items() if value is not None}
    for each in fields(ModelConfig):
        # Defaults follow from other fields, so a flag can go only if the model is the same without it.
        fewer = {name: value for name, value in given.items() if name != each.name}
        if each.default is not MISSING and each.name in given and _builds(fewer, whole):
            given = fewer
    words = []
    for name, value in given.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def _builds(settings: Mapping[str, Any], whole: ModelConfig) -> bool:
    try:
        return ModelConfig(**settings) == whole
    except ConfigError:  # Another setting needs what is left out.
        return False


def _quoted(words: Sequence[str]) -> str:
    """Return words for a script; those that begin with its directory are expanded there."""
    return " ".join(f'"{word}"' if word.startswith("$here") else shlex.quote(word) for word in words)
