"""Trials: measured training runs, one JSON object a line of a trials file.

`answer.trial_command.Journal` writes them. Trials of published tables may have clusters in a few flat fields, and names
of schedules as in papers; trainers and precisions that a publication states once are in a file of `--trainers`.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parsing import parse_json
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import DeviceCount, DeviceOrName, NodeCount, parse_cluster
from megatron_terapipe.search.machine.entries import Count, Entry, OrText, Text, fault, place, read_entry
from megatron_terapipe.search.machine.library import GIGABIT, GIGABYTE
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainer_files import LIKE, OF_PACKAGE, Precision, Trainers, described_software
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.workload import IMBALANCE, Layer, Workload
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.strategy import Strategy

Model = TypeVar("Model")
Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)

GIBIBYTE = float(2**30)
"""Bytes of a "GB" in trials: tools that print memory (nvidia-smi, PyTorch) count in powers of two."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A strategy that was run, and its measurements.

    Trials of one workload or cluster share the object, so that its prices are computed once.
    """

    source: str
    """Source of the measurement; a cluster is calibrated for each source apart. Empty = unknown."""
    id: str
    group: str
    """Trials of one model, devices, batch and day; only those are ranked against each other."""
    workload: Workload
    cluster: Cluster
    strategy: Strategy
    software: Software
    precision: str
    iteration_time_s: float | None
    """Seconds of one iteration; None = it failed, or was cut off."""
    peak_memory_bytes: float | None
    """Of the fullest device; None = not measured."""
    out_of_memory: bool | None
    """Whether memory ran out; None = unknown, and it did not if there is a time."""
    activation_limit: float | None = None
    """Activations that the schedule may hold on a rank, as a multiple of 1F1B's peak; None = the schedule's own."""
    longer_than_s: float | None = None
    """Where it was cut off, seconds that it took at least."""
    rounds: int = 1
    """Number of runs; the time is the median of those that were measured."""
    round_times_s: tuple[float | None, ...] = ()
    """Seconds of an iteration of each run, None of one that failed; empty = it is run once."""
    path: str = ""
    line: int = 0
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the file without a meaning here, by `part.field`."""

    @property
    def device(self) -> str:
        """Kinds of devices of its cluster."""
        return "+".join(sorted({node.device.name for node in self.cluster.nodes}))

    @property
    def site(self) -> tuple[str, str, bool]:
        """Key of a calibration: source, devices, and whether there are several nodes."""
        return self.source, self.device, len(self.cluster.nodes) > 1

    @property
    def priced_as(self) -> tuple[int, int, Software, str]:
        """Key of the cost model that prices it: workload, cluster, software and precision."""
        return id(self.workload), id(self.cluster), self.software, self.precision

    @property
    def least_time_s(self) -> float:
        """Seconds of an iteration, measured or cut off; 0 if neither is known."""
        return self.iteration_time_s or self.longer_than_s or 0.0


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """Return values by their keys, in the order of the first value of each."""
    found: dict[Key, list[Value]] = {}
    for each in values:
        found.setdefault(key(each), []).append(each)
    return found


def models_of(trials: Sequence[Trial], make: Callable[[Trial], Model]) -> list[Model]:
    """Return a model for each trial; trials that are priced alike share theirs."""
    made = {key: make(alike[0]) for key, alike in grouped(trials, lambda one: one.priced_as).items()}
    return [made[one.priced_as] for one in trials]


MODEL_FIELDS = tuple(each.name for each in fields(ModelConfig))

DEFAULTS = {"recompute": "none", "zero_stage": 0, "num_token_slices": 1}
"""Fields of a strategy that a trial may leave out, where the trainer's own default would be another: tables show
plain Megatron."""


ONE_LAYER_MODEL_CHUNKS = "1F1B-I"
"""The interleaved baseline of Qi et al. 2024 (arXiv 2401.10241) section 5, with "the maximum number of chunks": one
layer each, where the table names no number of model chunks."""

PUBLISHED_SCHEDULES: Mapping[str, tuple[str, float | None]] = {
    # 1p and 2p are limits of memory in the same paper.
    **dict.fromkeys(("ZB-1p", "ZB-H1"), ("zero-bubble", 1.0)),
    **dict.fromkeys(("ZB-2p", "ZB-H2"), ("zero-bubble", 2.0)),
    "1F1B": ("1f1b", None),
    ONE_LAYER_MODEL_CHUNKS: ("interleaved", None),
    "GPipe": ("gpipe", None),
}
"""Schedule by its name in tables, and the activations that it may hold on a rank, as a multiple of 1F1B's peak; None =
its own. Any other name is one of the plan's."""

COUNTED = "layers_per_stage_counting_embedding_and_head"


def bounds_counting_ends(workload: Workload, layers_per_stage: list[int]) -> tuple[int, ...]:
    """Return the bounds of stages that count the embedding and the head as a layer each, in all layers of the model.

    DeepSpeed's `type:transformer|embedding` and the models of Qi et al. count so. The last norm goes with the head.
    """
    counted = workload.num_dealt_layers + 2
    if sum(layers_per_stage) != counted or min(layers_per_stage) < 1:
        raise ConfigError(
            f"{COUNTED} {layers_per_stage} adds up to {sum(layers_per_stage)}, "
            f"not {counted}, or has a stage without: count num_layers, one for the embedding and one for the head"
        )
    bounds = [sum(layers_per_stage[:end]) for end in range(len(layers_per_stage))]
    return (*bounds, len(workload.layers))


class LooseEntry(Entry):
    """An object of a line: tables have more fields than mean something here, and those are kept."""

    model_config = ConfigDict(extra="allow")


class StrategyEntry(LooseEntry):
    """Fields of a trial's strategy that `Strategy` does not have and check."""

    schedule: Literal[(*SCHEDULES, OPTIMISED, *PUBLISHED_SCHEDULES)] = Strategy().schedule  # type: ignore[valid-type]
    num_micro_batches: Count | None = None
    context_parallel_size: Count | None = None
    expert_tensor_parallel_size: Count = 1
    expert_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    overlaps_expert_exchange: bool = False
    recompute_num_layers: Count | None = None
    layers_per_stage_counting_embedding_and_head: list[int] | None = None


Seconds = Annotated[float, Field(gt=0)]
Measured = Annotated[Seconds | None, BeforeValidator(lambda value: None if value == inf else value)]
"""A number above 0; None where it is infinite: the run was cut off."""


class MeasuredEntry(LooseEntry):
    """Measurements of a trial."""

    iteration_time_s: Measured = None
    longer_than_s: Measured = None
    peak_memory_bytes: Measured = None
    peak_memory_gb: Measured = None
    out_of_memory: bool | None = None
    rounds: Count = 1
    round_times_s: list[Seconds | None] = Field(default_factory=list)


class TrialEntry(LooseEntry):
    """A line."""

    source: str = ""
    id: str = ""
    group: Text | None = None
    model: dict[str, Any]
    cluster: dict[str, Any]
    strategy: StrategyEntry
    software: Annotated[dict[str, Any], OrText(LIKE, "Name of a trainer.")] | None = None
    precision: Precision | None = None
    forced_balance: bool = False
    measured: MeasuredEntry


def read_trials(path: str | Path, trainers: Trainers = OF_PACKAGE) -> list[Trial]:
    """Read the measured runs of a file; empty lines are skipped.

    A trial of several rounds has a line after each, and the last one counts.

    Args:
        trainers: the trainers that lines may name, and the trainers of lines that name none.
    """
    reader = TrialReader(str(path), trainers)
    lines = enumerate(read_text(path).splitlines(), start=1)
    trials = [reader.read(number, line) for number, line in lines if line.strip()]
    if not trials:
        raise ConfigError(f"trials {path} holds no trial: write one JSON object a line")
    kept: dict[tuple[str, str, str] | int, Trial] = {}
    for trial in trials:
        kept[(trial.source, trial.group, trial.id) if trial.round_times_s else trial.line] = trial
    return list(kept.values())


class TrialReader:
    """Reads lines; equal models and clusters of a file become one object."""

    def __init__(self, path: str, trainers: Trainers = OF_PACKAGE) -> None:
        self._path, self._trainers = path, trainers
        self._made: dict[tuple[str, str], Any] = {}
        self._workloads: dict[Workload, Workload] = {}

    def _once(self, kind: str, document: dict[str, Any], make: Callable[[], Model]) -> Model:
        """Return the object of a document, made at its first use."""
        key = kind, json.dumps(document, sort_keys=True)
        if key not in self._made:
            self._made[key] = make()
        made: Model = self._made[key]
        return made

    def _shared(self, workload: Workload) -> Workload:
        """Return the first workload that is equal."""
        return self._workloads.setdefault(workload, workload)

    def read(self, number: int, line: str) -> Trial:
        """Return the trial of one line."""
        where = f"{self._path}:{number}"
        entry = read_entry(TrialEntry, parse_json(line, where, infinite=True), where)
        try:
            return self._trial(entry, where, number)
        except UserError as error:
            # Checks of the model, the cluster or the strategy do not name the line.
            raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None

    def _trial(self, entry: TrialEntry, where: str, number: int) -> Trial:
        given = entry.software or {}
        named = given.get(LIKE) or ""
        rule = self._trainers.rule(entry.source, named, entry.group or "")
        described = {**entry.cluster, "": rule.half_flops}
        cluster = self._once("cluster", described, lambda: _cluster(entry.cluster, where, rule.half_flops))
        values = {name: entry.model[name] for name in MODEL_FIELDS if name in entry.model}
        imbalance = 1.0 if entry.forced_balance else IMBALANCE
        key = {**values, "": imbalance}
        model = self._once("model", key, lambda: parse_workload(values, f"{where}: model", imbalance=imbalance))
        strategy, ends = _strategy(entry.strategy, model, where)
        strategy = replace(strategy, recompute=rule.recompute or strategy.recompute)
        workload = model
        if ends:
            workload = self._shared(replace(model, first_dealt=0, end_dealt=len(model.layers)))
        if (first := entry.strategy.recompute_num_layers) is not None:
            if strategy.recompute != "full":
                at = place(where, "strategy", "recompute_num_layers")
                raise fault(at, first, f"goes with recompute full, not {strategy.recompute}", "leave it out")
            num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
            partition = workload.partition(strategy.stage_partition, num_stages)
            workload = self._shared(recomputing_some(workload, partition, first))
        if strategy.world_size > cluster.num_devices:
            raise ConfigError(
                f"{where}: strategy has {strategy.world_size} ranks (data_parallel_size x "
                f"tensor_parallel_size x pipeline_parallel_size), more than the {cluster.num_devices} devices of "
                "cluster.num_devices: make them agree"
            )
        group = entry.group or f"{json.dumps(values, sort_keys=True)} {cluster.name} {strategy.global_batch_size}"
        given = {**given, LIKE: rule.software or named or MEGATRON_LM.name}
        known = self._trainers.software
        software = self._once("software", given, lambda: described_software(given, where, "software", known=known))
        software = _in_layout(software, entry.strategy)
        precision = entry.precision or rule.precision or "fp16"
        if not software.can_run("zero_stage", strategy.zero_stage) and software.can_run("zero_stage", 3):
            # Trials of FSDP were written with stage 1 once.
            strategy = replace(strategy, zero_stage=3)
        software.state(precision, strategy.zero_stage)
        if lacking := [node.device.name for node in cluster.nodes if not node.device.has_products(precision)]:
            raise fault(place(where, "precision"), precision, f"is not in the products of a {lacking[0]}", "give bf16")
        measured, peak_gb = entry.measured, entry.measured.peak_memory_gb
        rounded = None if peak_gb is None else peak_gb * GIBIBYTE
        of_strategy, more = {each.name for each in fields(Strategy)}, entry.strategy.model_extra or {}
        extras = {
            "": entry.model_extra,
            "model.": {name: value for name, value in entry.model.items() if name not in MODEL_FIELDS},
            "strategy.": {name: each for name, each in more.items() if name not in of_strategy},
            "measured.": measured.model_extra,
        }
        return Trial(
            source=entry.source,
            id=entry.id,
            group=group,
            workload=workload,
            cluster=cluster,
            strategy=strategy,
            software=software,
            precision=precision,
            activation_limit=_schedule(entry.strategy)[1],
            iteration_time_s=measured.iteration_time_s,
            longer_than_s=measured.longer_than_s,
            peak_memory_bytes=rounded if measured.peak_memory_bytes is None else measured.peak_memory_bytes,
            out_of_memory=measured.out_of_memory,
            rounds=measured.rounds,
            round_times_s=tuple(measured.round_times_s),
            path=self._path,
            line=number,
            ignored={f"{part}{name}": value for part, of in extras.items() for name, value in (of or {}).items()},
        )


HIDDEN_EXCHANGE = 0.37
"""Share of the exchanges of tokens that Megatron's `overlap_moe_expert_parallel_comm` hides: 36.55 % of the time of
messages in a profile of Qwen3-30B-A3B (github.com/NVIDIA-NeMo/Megatron-Bridge,
skills/nemo-mbridge-perf-expert-parallel-overlap)."""


def _in_layout(software: Software, strategy: StrategyEntry) -> Software:
    usual = software.communication
    communication = replace(
        usual,
        ring=usual.ring or (strategy.context_parallel_size or 1) > 1,
        cuts_experts=usual.cuts_experts or strategy.expert_tensor_parallel_size > 1,
        sends_once=usual.sends_once or strategy.expert_dispatcher != "alltoall",
        hidden_exchange=HIDDEN_EXCHANGE if strategy.overlaps_expert_exchange else usual.hidden_exchange,
    )
    return replace(software, communication=communication)


def recomputing_some(workload: Workload, partition: StagePartition, number: int) -> Workload:
    """Return the model of which recompute "full" runs the first layers of each stage again (Megatron's `block`)."""
    layers, kept = list(workload.layers), dict[int, Layer]()
    for stage in workload.stages(partition):
        for index in [each for each in stage if layers[each].is_block][number:]:
            # Layers of one kind stay one object.
            layers[index] = kept.setdefault(id(layers[index]), replace(layers[index], recomputed=False))
    return replace(workload, layers=tuple(layers))


NamedBandwidth = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Bandwidth in the unit in the name of its field."""


class FlatCluster(Entry):
    """The cluster of a published trial: devices of one kind on equal nodes, in a few flat fields, and others not read.

    `intra_node_GBps` is from a device to another, in one direction; `inter_node_Gbps` of all network cards of a node.
    """

    model_config = ConfigDict(extra="ignore")

    device: DeviceOrName
    devices_per_node: DeviceCount | None = None
    num_devices: NodeCount
    intra_node_GBps: NamedBandwidth | None = None  # noqa: N815
    inter_node_Gbps: NamedBandwidth | None = None  # noqa: N815


def _cluster(document: dict[str, Any], where: str, half_flops: float | None) -> Cluster:
    found = _described_cluster(document, where)
    if half_flops is None:
        return found
    nodes = [replace(node, device=replace(node.device, half_flops=half_flops)) for node in found.nodes]
    return replace(found, nodes=tuple(nodes))


def _described_cluster(document: dict[str, Any], where: str) -> Cluster:
    if "nodes" in document or "device" not in document:
        return parse_cluster(document, f"{where}: cluster")[0]
    flat = read_entry(FlatCluster, document, where, "cluster")
    device, machine = flat.device.read(place(where, "cluster", "device"))
    node, per_node = replace(machine, device=device), flat.devices_per_node or machine.num_devices
    if flat.intra_node_GBps is not None:
        node = replace(node, inside=replace(node.inside, bandwidth=flat.intra_node_GBps * GIGABYTE))
    if flat.inter_node_Gbps is not None:
        # As many cards as the line rate of the device's usual machine needs.
        total = flat.inter_node_Gbps * GIGABIT
        cards = max(1, ceil(total / node.network.bandwidth - 1e-9))
        node = replace(node, network=replace(node.network, bandwidth=total / cards), num_network_cards=cards)
    sizes = [min(per_node, flat.num_devices - first) for first in range(0, flat.num_devices, per_node)]
    nodes = tuple(replace(node, name=f"node-{index}", num_devices=size) for index, size in enumerate(sizes, start=1))
    return Cluster(nodes=nodes, name=f"{flat.num_devices} x {device.name}")


def _schedule(entry: StrategyEntry) -> tuple[str, float | None]:
    return PUBLISHED_SCHEDULES.get(entry.schedule, (entry.schedule, None))


def _strategy(entry: StrategyEntry, workload: Workload, where: str) -> tuple[Strategy, bool]:
    """The strategy, and whether its stage partition counts the embedding and the head."""
    names = {each.name for each in fields(Strategy)}
    given = {name: value for name, value in (entry.model_extra or {}).items() if name in names}
    # Both share the tokens; how other ranks see keys and values is a fact of the trainer (`Communication.ring`).
    if (ring := entry.context_parallel_size) is not None:
        if given.get("sequence_parallel_size", ring) != ring:
            problem = f"contradicts sequence_parallel_size {given['sequence_parallel_size']}"
            raise fault(place(where, "strategy", "context_parallel_size"), ring, problem, "give one of the two")
        given["sequence_parallel_size"] = ring
    if entry.expert_tensor_parallel_size > 1:
        given["expert_parallel_size"] = given.get("expert_parallel_size", 1) * entry.expert_tensor_parallel_size
    strategy = Strategy.from_json({**DEFAULTS, **given, "schedule": _schedule(entry)[0]})
    changes: dict[str, Any] = {}
    if entry.num_micro_batches is not None:
        sequences = entry.num_micro_batches * strategy.micro_batch_size * strategy.data_parallel_size
        if strategy.global_batch_size not in (None, sequences):
            problem = f"contradicts global_batch_size {strategy.global_batch_size}"
            at = place(where, "strategy", "num_micro_batches")
            raise fault(at, entry.num_micro_batches, problem, f"with it the batch is {sequences}; give one of the two")
        changes["global_batch_size"] = sequences
    ranks, layers = strategy.pipeline_parallel_size, workload.num_dealt_layers
    if entry.schedule == ONE_LAYER_MODEL_CHUNKS and given.get("num_model_chunks") is None and (layers + 2) % ranks == 0:
        changes["num_model_chunks"] = (layers + 2) // ranks
    num_stages = ranks * changes.get("num_model_chunks", strategy.num_model_chunks)
    layers_per_stage = entry.layers_per_stage_counting_embedding_and_head
    if layers_per_stage is not None and len(layers_per_stage) != num_stages:
        at = place(where, "strategy", COUNTED)
        raise fault(at, layers_per_stage, f"does not have {num_stages} stages", "give one number a stage")
    if layers_per_stage is None and strategy.stage_partition == "uniform":
        # Published models that were sized so (BLOOM: 70 + 2 layers on 12 stages; Qi et al.: 22 + 2 on 8) were
        # partitioned so: only with both ends counted the layers divide among the stages.
        if layers % num_stages and (layers + 2) % num_stages == 0:
            layers_per_stage = [(layers + 2) // num_stages] * num_stages
    if layers_per_stage is not None:
        changes["stage_partition"] = bounds_counting_ends(workload, layers_per_stage)
    strategy = Strategy.from_json({**strategy.to_json(), **changes})
    if layers_per_stage is None:
        workload.partition(strategy.stage_partition, num_stages)
    return strategy, layers_per_stage is not None
