"""The plan of a run, found before it starts: number of ranks, cost model, strategy, schedule and token slices.

All of this follows from the flags, the files that they name and the numbers of ranks, and from no device of this
process. So a run, a dry run on a login node and the commands of the search give the same answer (docs/adr/0029); of the
ranks of a run the first one searches. Read from the end: `plan_run` calls everything above it. The search is imported
within functions, because it loads numpy and solvers, and not every run needs them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.found_schedule import EFFORT, FoundSchedule
from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.ops import PipelineShape, Placement, check_num_ops
from deepspeed_ext.plan.programs.device import DeviceModel, ExpertExchange
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import FEW_OPS, ProvenSchedule, lowering_costs
from deepspeed_ext.plan.schedule_file import schedule_from_file
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, Schedule, memory_of_1f1b
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import flag
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError, SearchError, errors_in
from megatron_terapipe.strategy import FoundStrategy, Strategy

if TYPE_CHECKING:
    from megatron_terapipe.search.learn.costs import Costs
    from megatron_terapipe.search.machine.cluster import Cluster
    from megatron_terapipe.search.price.cost_model import CostModel
    from megatron_terapipe.search.price.profile import Profile
    from megatron_terapipe.search.rank.token_slices import SolvedCut, TabulatedCosts


def stated_ranks(config: Config) -> int | None:
    """Return the slots of the hostfile, or the ranks that `--data-parallel-size` makes; None if neither is given."""
    path = config.training.hostfile
    if path is None:
        return None if config.parallel.data_parallel_size is None else config.parallel.least_world_size
    return sum(slots_of_hosts(path, "--hostfile"))


def slots_of_hosts(path: str, flag: str) -> list[int]:
    """Return the slots of each host of a hostfile."""
    # Imported where a hostfile is named: the search is not needed otherwise.
    from megatron_terapipe.launch.hostfile import parse_hostfile

    text = read_text(path, flag)
    with errors_in(flag):
        return [host.slots for host in parse_hostfile(text, path)]


DEVICE = "A100-SXM4-80GB"
"""Device of the nodes that are assumed where no flag names a cluster, as in the defaults of `HardwareEfficiency`."""

DEVICES_OF_A_NODE = 8


def cost_model_of(config: Config, world_size: int) -> "CostModel":
    """Return the cost model that prices the ops of a run."""
    cluster = named_cluster(config.parallel.cluster, world_size)
    return costs_of_run(config, cluster).pricing_on(cluster).cost_model


def costs_of_run(config: Config, cluster: "Cluster") -> "Costs":
    """Return the sources of prices that the flags of a run name."""
    from megatron_terapipe.search.learn.costs import read_costs
    from megatron_terapipe.search.price.workload import gpt_workload

    parallel, profile = config.parallel, profile_of_run(config)
    flags = [flag(name) for name in ("op_profile", "op_calibration") if getattr(parallel, name) is not None]
    with errors_in(", ".join(flags)):
        return read_costs(
            gpt_workload(config.model),
            cluster,
            config.precision.dtype,
            profile=profile,
            calibration_path=parallel.op_calibration,
        )


def profile_of_run(config: Config) -> "Profile | None":
    """Return the measured times of a run: of the layers of a user's own model, or of `--op-profile`; None for none."""
    from megatron_terapipe.search.price.profile import parse_profile, read_profile

    if config.measured is not None:
        return parse_profile(config.measured, "the measured layers")
    with errors_in("--op-profile"):
        return None if config.parallel.op_profile is None else read_profile(config.parallel.op_profile)


def prices_ops(config: Config) -> bool:
    """Whether token slices, stages, an order or copies on the host are found by the times of ops."""
    parallel = config.parallel
    finds = parallel.token_slices == AUTO or parallel.pipeline_schedule == OPTIMISED or parallel.stage_partition == AUTO
    return finds or config.training.offload_token_slices


Measure = Callable[[Config], Mapping[str, Any]]
"""Returns the profile, as its JSON, of the layers that a program has in place of the GPT's."""


def with_measured_layers(config: Config, program: str | None, measure: Measure | None, ask: "Ask | None") -> Config:
    """Return a configuration with the measured times of a program's own layers; with --op-profile, as it is.

    Args:
        program: the program; None = the layers are the GPT's, which have formulas.
        measure: None = this process measures nothing.
        ask: asks the first rank: ranks with other times would find other programs, and hang.
    """
    if config.parallel.op_profile is not None:
        profile = profile_of_run(config)
        if profile is not None and profile.own_model != program:
            raise ConfigError(
                f"--op-profile {config.parallel.op_profile} has times of the layers of {profile.own_model or 'a GPT'}, "
                f"and this run trains the layers of {program or 'a GPT'}: give a profile of these, or none"
            )
    elif program is not None and config.measured is None:
        if measure is None:
            raise ConfigError(
                f"a dry run does not measure, and this plan needs the times of the layers of {program}: give "
                f"--op-profile, the file that `terapipe search measure --program {program}` with the same flags writes"
            )
        find = partial(measure, config)
        return replace(config, measured=find() if ask is None else ask("times of the layers", find))
    return config


def machine_in_words(config: Config, machine: str | None = None) -> str:
    """Return the machine for which the ops of a run are priced, in words; `machine` is one that no flag names."""
    parallel = config.parallel
    if machine is None:
        default = f"nodes of {DEVICES_OF_A_NODE} {DEVICE}, since no --cluster is given"
        machine = default if parallel.cluster is None else f"the cluster {parallel.cluster}"
    profile = "" if parallel.op_profile is None else f" with the profile {parallel.op_profile}"
    profile = ", with the measured times of its layers" if config.measured is not None else profile
    return machine + profile + ("" if parallel.op_calibration is None else f", calibrated on {parallel.op_calibration}")


def _nodes_of(device: str, devices: int, count: int, described: str) -> "Cluster":
    from megatron_terapipe.search.machine.cluster_files import parse_cluster

    return parse_cluster({"nodes": [{"device": device, "devices": devices, "count": count}]}, described)[0]


def named_cluster(path: str | None, world_size: int) -> "Cluster":
    """Return the cluster that `--cluster` names, or the default one with room for all ranks."""
    from megatron_terapipe.launch.hostfile import is_hostfile
    from megatron_terapipe.search.machine.cluster_files import read_cluster

    if path is None:
        return _nodes_of(DEVICE, DEVICES_OF_A_NODE, -(-world_size // DEVICES_OF_A_NODE), "default")
    names_devices = not is_hostfile(read_text(path, "--cluster"), path)
    with errors_in("--cluster"):
        cluster = read_cluster(path, device=None if names_devices else DEVICE)
    if cluster.num_devices < world_size:
        raise ConfigError(
            f"--cluster {path} has {cluster.num_devices} devices, fewer than the {world_size} ranks of this run: name "
            "a cluster with as many"
        )
    return cluster


TOP = 10
"""Best strategies for which token slices, stages and nodes are solved: as many as `rank` lists."""

BATCH = "global_batch_size"


class Ranks(NamedTuple):
    """Numbers of ranks of a run."""

    all: int
    on_a_host: int


def best_strategy(config: Config, ranks: Ranks, constraints: Mapping[str, tuple[Any, ...]]) -> FoundStrategy:
    """Return the best strategy of a run.

    Args:
        config: the configuration with its vocabulary size; its layout and batch are not read.
        constraints: values that dimensions may have, by name, the global batch size among them.
    """
    from megatron_terapipe.search.price.workload import gpt_workload
    from megatron_terapipe.search.rank.search import search
    from megatron_terapipe.search.rank.space import SearchProblem, all_choices

    cluster, machine = cluster_of_run(config, ranks)
    batch = constraints[BATCH][0]
    problem = SearchProblem(
        workload=gpt_workload(config.model),
        cluster=cluster,
        global_batch_size=batch,
        precision=config.precision.dtype,
    )
    others = {name: values for name, values in constraints.items() if name != BATCH}
    costs = costs_of_run(config, cluster)
    problem = costs.problem_with(problem, others)
    result = search(problem, all_choices(problem).constrained(others), costs.pricing_on, top=TOP)
    # The launcher has placed the ranks.
    best = next((entry for entry in result.entries if entry.strategy.placement is None), None)
    if best is None:
        raise ConfigError(
            f"--strategy auto found no strategy for {machine} that keeps the other flags and fits its memory: `python "
            "-m megatron_terapipe.search rank --explain` with the same model, cluster and batch explains it"
        )
    strategy = replace(best.strategy, global_batch_size=batch)
    settings = (f"{name.replace('_', '-')} {value}" for name, value in strategy.to_json().items() if value is not None)
    chosen = (
        f"--strategy auto chose, of {result.counts.total:,} strategies for {machine}, one that is predicted to take "
        f"{best.iteration_time_s:.4g} s an iteration: {' '.join(settings)}"
    )
    return FoundStrategy(strategy, AUTO, (chosen,))


def cluster_of_run(config: Config, ranks: Ranks) -> "tuple[Cluster, str]":
    """Return the cluster of a run, and its words: the cluster of `--cluster`, or hosts as the launcher fills them.

    The devices of these hosts are the profile's, or `DEVICE`.
    """
    parallel = config.parallel
    if parallel.cluster is not None:
        cluster = named_cluster(parallel.cluster, ranks.all)
        if cluster.num_devices != ranks.all:
            raise ConfigError(
                f"--cluster {parallel.cluster} has {cluster.num_devices} devices, more than the {ranks.all} ranks of "
                "this run, and --strategy auto uses all of them: name a cluster with as many"
            )
        return cluster, machine_in_words(config)
    if ranks.all % ranks.on_a_host:
        raise ConfigError(
            f"--strategy auto: {ranks.all} ranks are not {ranks.on_a_host} on each host: describe the hosts in a file "
            "for --cluster"
        )
    device, assumed, described = DEVICE, " (assumed: give --cluster or --op-profile)", "default"
    if (profile := profile_of_run(config)) is not None:
        device, assumed, described = profile.device, "", "--op-profile"
        if profile.accelerator == "cpu":
            device = "cpu-core"
    count = ranks.all // ranks.on_a_host
    words = f"{count} {'host' if count == 1 else 'hosts'} of {ranks.on_a_host} {device}{assumed}"
    return _nodes_of(device, ranks.on_a_host, count, described), machine_in_words(config, words)


Ask = Callable[[str, Callable[[], Any]], Any]
"""Returns on every rank the result, of values of JSON, that a function has on the first rank, for a question."""


def pipeline_schedule(config: Config, data_parallel_size: int, ask: Ask | None = None) -> Schedule:
    """Return the schedule of `--pipeline-schedule`; one to be found is found at its first op.

    Args:
        ask: asks the first rank; None = this process searches.
    """
    name = config.parallel.pipeline_schedule
    if name == OPTIMISED:
        priced = cache(lambda: _priced_ops(config, data_parallel_size))
        limit = config.parallel.schedule_memory_limit
        return FoundSchedule(lambda _: priced(), config.token_slices(), limit, ask)
    return SCHEDULES[name] if name in SCHEDULES else schedule_from_file(name)


def proven_schedule(
    schedule: Schedule, config: Config, data_parallel_size: int, hardware_queues: int | None = None
) -> ProvenSchedule:
    """Return a schedule on the devices of a run, with timelines in seconds where its ops are priced.

    Args:
        hardware_queues: hardware queues of the accelerator; None for as many as there are streams.
    """
    costs: Callable[[PipelineShape], OpCosts] = lowering_costs
    if isinstance(schedule, FoundSchedule):
        costs = schedule.costs
    elif config.training.offload_token_slices:
        # Whether a copy is made depends on its time compared with that of the ops.
        priced = _priced_ops(config, data_parallel_size)
        costs = lambda shape: priced  # noqa: E731
    device = DeviceModel(hardware_queues=hardware_queues, exchange=expert_exchange(config))
    return ProvenSchedule(schedule, device, host_copies(config, data_parallel_size), costs)


def host_copies(config: Config, data_parallel_size: int) -> HostCopySettings | None:
    """Return the offloaded tensors, by the timelines of `proven_schedule`; None without offload."""
    if not config.training.offload_token_slices:
        return None
    if config.parallel.stage_partition == "parameters":
        raise ConfigError(
            "--offload-token-slices plans copies by the layers of each stage, and --stage-partition parameters deals "
            "them when the model is built: give a list, or uniform"
        )
    strategy = Strategy.of_config(config, data_parallel_size)
    model = cost_model_of(config, strategy.world_size)
    settings = model.host_copy_settings(model.placed(strategy))
    # How many token slices a window reaches depends on their lengths, which differ where documents cut them. Windows of
    # a program's own layers are not known.
    profile = profile_of_run(config)
    own = profile is not None and profile.own_model is not None
    return replace(settings, windows=()) if own or config.document_cuts() else settings


def expert_exchange(config: Config) -> ExpertExchange:
    """Return how tokens reach the experts of other ranks."""
    if config.parallel.expert_model_parallel_size == 1:
        return ExpertExchange.NONE
    return ExpertExchange(config.model.moe_token_dispatcher_type)


def with_dispatcher(config: Config, data_parallel_size: int) -> Config:
    """Return the configuration with the faster dispatcher for `--moe-token-dispatcher-type auto`; others as they are.

    Both are priced as the search prices them: bytes by class of link, rows that are held for nothing, and the wait
    (`CostModel.dispatched`).
    """
    if config.model.moe_token_dispatcher_type != AUTO or config.parallel.expert_model_parallel_size == 1:
        return config
    sends_to_all = False
    if not config.expert_ranks_cut_apart:
        strategy = Strategy.of_config(config, data_parallel_size)
        experts = cost_model_of(config, strategy.world_size).dispatched(strategy).workload.experts
        sends_to_all = experts is not None and experts.sends_to_all
    model = replace(config.model, moe_token_dispatcher_type="allgather" if sends_to_all else "alltoall")
    return replace(config, model=model)


def check_schedule(schedule: ProvenSchedule, config: Config, micro_batches: Iterable[int]) -> str | None:
    """Prove that a schedule ends for every number of micro-batches of a run.

    Returns:
        A warning if this is proven only for streams that share no hardware queue.
    """
    name = config.parallel.pipeline_schedule
    try:
        proofs = [schedule.proof(config.parallel.pipeline(number)) for number in micro_batches]
    except (PlanError, SearchError) as error:
        kind = SearchError if isinstance(error, SearchError) else ConfigError
        raise kind(f"--pipeline-schedule {name}: {error}") from None
    if not any(proof.assumes_queues for proof in proofs):
        return None
    return (
        f"--pipeline-schedule {name} is proven to end only if no two streams of a rank share a hardware queue, which "
        f"CUDA does not guarantee: if a step hangs, use 1f1b or breadth-first with at most {FEW_OPS:,} ops"
    )


def _priced_ops(config: Config, data_parallel_size: int) -> OpCosts:
    """Return the seconds of a run's ops, whatever the number of micro-batches."""
    strategy = Strategy.of_config(config, data_parallel_size)
    return cost_model_of(config, strategy.world_size).pipeline_costs(strategy)


def with_found_token_slices(config: Config, data_parallel_size: int) -> Config:
    """Return the configuration with the token slices of `--token-slices auto`; any other as it is.

    They are those that `terapipe search slices` finds for this strategy on this cluster. With
    `--stage-partition auto` the layers of the stages are found first.
    """
    parallel = config.parallel
    if parallel.token_slices != AUTO:
        return config
    from megatron_terapipe.search.rank.token_slices import solve_cut

    count = parallel.num_token_slices
    if (count or 1) * config.token_granularity > config.model.seq_length:
        raise ConfigError(
            f"--token-slices auto: {count or 1} token slices of {config.model.seq_length} tokens, each a multiple of "
            f"{config.token_granularity}: give fewer"
        )
    strategy = Strategy.of_config(config, data_parallel_size)
    cost_model = cost_model_of(config, strategy.world_size)

    def solved(strategy: Strategy, counts: Sequence[int] | None) -> "tuple[SolvedCut, Placement]":
        limit = parallel.schedule_memory_limit
        cuts = (
            (solve_cut(cost_model, strategy, counts=counts, memory_limit=limit, model_chunk_placement=each), each)
            for each in parallel.placements
        )
        return min(cuts, key=lambda found: found[0].iteration_time_s)

    counts, stages = None if count is None else (count,), parallel.stage_partition
    if stages == AUTO:
        # How many token slices are best hardly depends on where a few layers are.
        counts = counts or (len(solved(strategy, None)[0].token_slices),)
        partition = _solved_stages(config, cost_model, strategy, counts[0])
        stages, strategy = str(partition), replace(strategy, stage_partition=partition.bounds)
    solution, placement = solved(strategy, counts)
    cut = TokenSlices(solution.token_slices)
    found = replace(
        parallel,
        token_slices=str(cut),
        num_token_slices=len(cut),
        stage_partition=stages,
        model_chunk_placement=placement.value,
    )
    return replace(config, parallel=found)


def _solved_stages(config: Config, cost_model: "CostModel", strategy: Strategy, count: int) -> StagePartition:
    """Return the layers of each stage with which a step of so many token slices is short."""
    from deepspeed_ext.plan.solve import solve_stages
    from megatron_terapipe.search.rank.token_slices import TabulatedCosts, places_to_cut, whole_messages

    parallel, seq_length = config.parallel, config.model.seq_length
    shape = replace(parallel.pipeline(strategy.num_micro_batches), num_token_slices=count)
    grid = places_to_cut(seq_length, strategy, count)
    optimised = parallel.pipeline_schedule == OPTIMISED
    even = TokenSlices.uniform(seq_length, count)

    def costs_of_layers(layers: Sequence[int]) -> "TabulatedCosts":
        bounds = tuple(accumulate(map(int, layers), initial=0))
        cut = replace(strategy, stage_partition=bounds, num_token_slices=count, token_slices=even.lengths)
        return TabulatedCosts.of(cost_model, cut, grid)

    solved = solve_stages(
        shape,
        config.model.num_layers,
        seq_length,
        costs_of_layers,
        schedule=None if optimised else SCHEDULES[parallel.pipeline_schedule],
        memory_limit=parallel.schedule_memory_limit or memory_of_1f1b(shape, even) if optimised else None,
        granularity=grid.granularity,
        min_length=grid.min_length,
        transfer=whole_messages(cost_model, strategy),
        effort=EFFORT,
    )
    return solved.partition


FOUND_FIELDS = (
    *("token_slices", "num_token_slices", "stage_partition", "model_chunk_placement"),
    "moe_token_dispatcher_type",
)
"""Fields of the sections `parallel` and `model` that may be left open."""


def checked_layout(config: Config, world_size: int) -> ParallelLayout:
    """Return the layout of a configuration over ranks, once it is known that batches and programs fit it."""
    layout = config.parallel.layout(world_size)
    replicas = layout.data_parallel_size
    evaluated = config.evaluation_batch(replicas).num_micro_batches
    check_num_ops(config.parallel.pipeline(max(config.num_micro_batches(replicas), evaluated)))
    return layout


def plan_run(config: Config, world_size: int, ask: Ask | None = None) -> tuple[Config, frozenset[str]]:
    """Return a configuration for ranks with all found that it leaves open but its schedule, and the fields found.

    Args:
        config: the configuration; where token slices or a dispatcher are to be found, its vocabulary size is known.
        ask: asks the first rank; None = this process searches.
    """
    layout = checked_layout(config, world_size)
    replicas = layout.data_parallel_size
    sections = (config.parallel, config.model)
    left_open = frozenset(each for each in FOUND_FIELDS for part in sections if getattr(part, each, None) == AUTO)
    if layout.expert_parallel_size == 1:
        left_open -= {"moe_token_dispatcher_type"}
    if left_open:

        def find() -> dict[str, Any]:
            found = with_dispatcher(with_found_token_slices(config, replicas), replicas)
            parts = (found.parallel, found.model)
            return {each: getattr(part, each) for part in parts for each in FOUND_FIELDS if hasattr(part, each)}

        found = find() if ask is None else ask("token slices, stages and dispatcher", find)
        config = replace(config, parallel=_with_fields(config.parallel, found), model=_with_fields(config.model, found))
    return config, left_open


def _with_fields(section: Any, values: Mapping[str, Any]) -> Any:
    names = {each.name for each in fields(section)}
    return replace(section, **{name: value for name, value in values.items() if name in names})


def check_trainable(strategy: Strategy, model: ModelConfig, **more: Any) -> None:
    """Check all that the trainer checks of a strategy without files, devices or other ranks.

    The order of the ops is checked, too. An `optimised` schedule is not searched: if all else is right, there is one.
    """
    config, _ = plan_run(strategy.config(model, **more), strategy.world_size)
    if strategy.schedule != OPTIMISED:
        schedule = pipeline_schedule(config, strategy.data_parallel_size)
        proven = ProvenSchedule(schedule, DeviceModel(exchange=expert_exchange(config)))
        check_schedule(proven, config, config.numbers_of_micro_batches(strategy.data_parallel_size))
