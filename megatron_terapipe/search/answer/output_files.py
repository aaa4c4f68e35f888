"""The files of an answer: its JSON, its page, and those that launch the winner."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.terminal import write_json
from deepspeed_ext.plan.text_files import permit_to_run, write_text
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.hostfile import Host, hostfile_text
from megatron_terapipe.search.answer.answer import document_text
from megatron_terapipe.search.answer.json_documents import Document, LaunchPart, RankDocument
from megatron_terapipe.search.answer.page import OpCostsOf, render_page
from megatron_terapipe.search.answer.what_if import FOUND_ORDER
from megatron_terapipe.search.machine.cluster import Cluster, Node, cluster_document
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

TRAIN_ITERATIONS = 100
LEARNING_RATE = "1e-4"

HEADER = """#!/usr/bin/env bash
# Written by the strategy search: runs {iterations} iterations on random tokens. Flags that follow are added, so
#   ./launch.sh --data-path PREFIX --train-iters 100000
# trains on data; add flags of the tokenizer, the learning rate and checkpoints. `--dry-run` only checks.
# It runs from any directory. PRETRAIN_GPT names another program than the pretrain_gpt.py of this project.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=--mock-data
case " $* " in *" --data-path "* | *" --train-data-path "*) data= ;; esac
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The files that launch a strategy, by their contents."""

    strategy: Strategy
    """As `--strategy` reads it."""
    nodes: tuple[Node, ...]
    deepspeed: dict[str, Any]
    """The DeepSpeed file; it repeats values of the flags, and is the place for more."""
    flags: tuple[str, ...]
    """Of `pretrain_gpt.py`, without those that name files."""

    @property
    def on_cpu(self) -> bool:
        """Whether DeepSpeed runs on the CPU."""
        return not all(node.device.is_gpu for node in self.nodes)

    @property
    def many_nodes(self) -> bool:
        """Whether a hostfile is needed."""
        return len(self.nodes) > 1

    @property
    def needs_cluster(self) -> bool:
        """Whether the trainer finds its schedule, or plans copies to hosts, which depends on the cluster."""
        return self.strategy.schedule == OPTIMISED or self.strategy.offload

    def command(self, directory: str) -> str:
        """Return the command of the script in one line."""
        words = ["terapipe", "train", *self.where(directory), *self.trainer_flags(directory), "--mock-data"]
        return f"{'DS_ACCELERATOR=cpu ' if self.on_cpu else ''}{shlex.join(words)}"

    def write(self, directory: str) -> list[str]:
        """Write the files into a directory, which is created if needed, and return their paths."""
        on_cpu = "export DS_ACCELERATOR=cpu\n" if self.on_cpu else ""
        where, flags = (" ".join(map(_quoted, words)) for words in (self.where("$here"), self.trainer_flags("$here")))
        program = '${PRETRAIN_GPT:+"$PRETRAIN_GPT"}'
        script = f'{on_cpu}exec terapipe train {where} {program} {flags} $data "$@"\n'
        contents = {
            "strategy.json": json.dumps(self.strategy.to_json(), indent=2) + "\n",
            "hostfile": hostfile_text(Host(node.name, node.num_devices) for node in self.nodes),
            "ds_config.json": json.dumps(self.deepspeed, indent=2) + "\n",
            "launch.sh": HEADER.format(iterations=TRAIN_ITERATIONS) + script,
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

    def where(self, directory: str) -> list[str]:
        """Return the flags for the hosts or the number of ranks; the hostfile is in the directory."""
        if self.many_nodes:
            return ["--hostfile", f"{directory}/hostfile"]
        return ["--num-accelerators", str(self.strategy.world_size)]

    def trainer_flags(self, directory: str) -> list[str]:
        """Return all flags of `pretrain_gpt.py`, with the files of the directory."""
        files = ["--strategy", f"{directory}/strategy.json", "--deepspeed-config", f"{directory}/ds_config.json"]
        cluster = ["--cluster", f"{directory}/cluster.json"] if self.needs_cluster else []
        return [*files, *cluster, *self.flags]


def launch_of(strategy: Strategy, problem: SearchProblem) -> Launch:
    """Return the files that launch a strategy."""
    model, precision = problem.workload.config, problem.precision
    if problem.software.name != TERAPIPE.name:
        raise ConfigError(f"these are strategies of {problem.software.name}, which nothing here launches")
    if model is None:
        raise ConfigError(
            "the model is given by layers, which pretrain_gpt.py cannot build: launch it with your trainer"
        )
    deepspeed: dict[str, Any] = {
        "train_batch_size": strategy.num_sequences,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.num_micro_batches,
        "zero_optimization": {"stage": strategy.zero_stage},
    }
    if precision != "fp32":
        deepspeed[precision] = {"enabled": True}
    training = ["--train-iters", str(TRAIN_ITERATIONS), "--lr", LEARNING_RATE, "--log-interval", "10"]
    return Launch(
        strategy=replace(strategy, placement=None),
        nodes=nodes_in_order(strategy, problem.cluster),
        deepspeed=deepspeed,
        flags=(*([] if precision == "fp32" else [f"--{precision}"]), *model_flags(model), *training),
    )


def nodes_in_order(strategy: Strategy, cluster: Cluster) -> tuple[Node, ...]:
    """Return the nodes in the order in which their ranks come, each with the devices that are used."""
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
        words.append(f"--{'no-' if value is False else ''}{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words.append(str(value))
    return words


def _builds(settings: Mapping[str, Any], whole: ModelConfig) -> bool:
    try:
        return ModelConfig(**settings) == whole
    except ConfigError:  # Another setting needs the omitted one.
        return False


def _quoted(word: str) -> str:
    """Return a word for a script; one that begins with its directory is expanded there."""
    return f'"{word}"' if word.startswith("$here") else shlex.quote(word)


def write_document(path: str | None, document: Document) -> None:
    """Write the answer for `--json`; `path`: None = the flag is not given."""
    if path is not None:
        write_json(path, document_text(document))


def script_command(directory: str) -> str:
    """Return the command of the script in a directory, from any directory."""
    return shlex.join(["bash", str(Path(directory) / "launch.sh")])


def write_files(
    document: RankDocument, problem: SearchProblem, op_costs: OpCostsOf, *, directory: str | None, html: str | None
) -> RankDocument:
    """Write the files of an answer, and return it with the command and the files that launch the winner.

    Args:
        directory: of `ranking.json`, `report.html` and the files of the launch; None = they are not written.
        html: another file for the page; None = none.
    """
    why_not: str | None = "no strategy can run"
    launch, command, how_to_run, files = None, None, "", []
    if document.priced:
        try:
            launch, why_not = launch_of(document.priced[0].strategy, problem), None
        except ConfigError as error:
            why_not = str(error)
    if launch is not None:
        command = launch.command(directory or "DIR")
        how_to_run = "" if directory is not None else "# with --output DIR, which writes the files:\n"
        how_to_run += f"{script_command(directory or 'DIR')}\n# which runs:\n{command}"
    if directory is not None:
        files = [str(Path(directory) / name) for name in ("ranking.json", "report.html")]
    if pages := [*([] if html is None else [html]), *files[1:]]:
        page = render_page(document, problem, op_costs, command=how_to_run)
        for path in pages:
            write_text(path, page, make_folder=True)
    if directory is not None and launch is not None:
        files += launch.write(directory)
        for found in document.advice:
            if found.name == "found_order" and found.strategy is not None:
                files += launch_of(found.strategy, problem).write(str(Path(directory) / FOUND_ORDER))
    launched = LaunchPart(command=command, files=files, why_not=why_not)
    document = document.model_copy(update={"launch": launched})
    if directory is not None:
        write_document(files[0], document)
    return document
