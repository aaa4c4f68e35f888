"""Makes an engine from DeepSpeed's configuration; the only place where DeepSpeed gets our engine class.

Start with `initialize`. `read_settings` refuses settings that pipelines cannot follow; those without effect are logged.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from weakref import finalize

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import log_dist

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.found_schedule import FoundSchedule
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.device import DeviceModel, ExpertExchange
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import ProvenSchedule, lowering_costs
from deepspeed_ext.plan.schedules import OPTIMISED, Schedule, interleaved, schedule_named
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.cuda_environment import hardware_queues
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.health.stall_watch import GRACE, StallWatch, watch_this_rank
from deepspeed_ext.runtime.launch import LaunchEnvironment
from deepspeed_ext.runtime.meeting import meeting_store
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.supported_versions import check_versions
from deepspeed_ext.runtime.topology import wait_as_long

__all__ = ["init_distributed", "initialize"]

REFUSED = {
    "curriculum_learning": "give batches of growing length, and their token_slices to train_batch",
    "data_efficiency.data_sampling.curriculum_learning": "choose samples in your data loader",
    "data_efficiency.data_routing.random_ltd": "no layer leaves out tokens here",
    "progressive_layer_drop": "no layer is left out here",
}
"""Sections on training that this engine cannot follow, if they are `enabled`, with a remedy."""

WITHOUT_EFFECT = {
    "activation_checkpointing": "recompute with the module's activation_checkpoint_interval",
    "sparse_attention": "attention is the layers' own",
    "pipeline.stages": "the module's layout decides",
    "pipeline.partition": "the module's partition decides",
    "pipeline.seed_layers": "layers are always seeded",
    "pipeline.pipe_partitioned": "activations are not partitioned",
    "pipeline.grad_partitioned": "gradients are not partitioned",
    "pipeline.use_reentrant": "recomputation is not reentrant",
}
"""Sections and settings without effect, with a remedy."""

_TRAIN, _MICRO, _COUNT = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_FREE = ("pipeline", "autotuning")
"""Sections in which DeepSpeed has values `auto` of its own."""


def read_settings(config: Mapping[str, Any] | str | Path | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration, from `config` or keywords of `deepspeed.initialize`, with a value for every key."""
    if config is None:
        config = keywords.get("config_params") or getattr(keywords.get("args"), "deepspeed_config", None)
    if config is None:
        raise UserError("initialize got no DeepSpeed configuration: give config, a dict or the path of a JSON file")
    if not isinstance(config, Mapping):
        try:
            config = load_ds_config(str(config))
        except (OSError, ValueError) as error:
            raise UserError(
                f"the DeepSpeed configuration {config} cannot be read ({str(error).splitlines()[0]}): give the path of "
                "a JSON file"
            ) from None
    settings = dict(config)
    open_keys = list(_open_keys(settings))
    if open_keys:
        raise UserError(
            f"the DeepSpeed configuration has the value 'auto' for {', '.join(open_keys)}, which only Hugging Face's "
            "Trainer fills in: give numbers"
        )
    if (shared := settings.get("sequence_parallel_size", 1)) != 1:
        raise UserError(
            f"the DeepSpeed configuration has sequence_parallel_size {shared}, by which its own engines share "
            "sequences: give the module layout=ParallelLayout(sequence_parallel_size=...) instead"
        )
    for section, remedy in REFUSED.items():
        found = _at(settings, section)
        if isinstance(found, Mapping) and found.get("enabled"):
            raise UserError(f"the DeepSpeed configuration enables {section}, which is not done here: {remedy}")
    return settings


def for_deepspeed(settings: Mapping[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    """Return a DeepSpeed configuration with a global batch size that counts sequences as DeepSpeed does."""
    size, factors = settings.get(_TRAIN), [settings[name] for name in (_MICRO, _COUNT) if name in settings]
    if not isinstance(size, int) or not all(isinstance(each, int) and each > 0 for each in factors):
        return dict(settings)  # DeepSpeed refuses missing and wrong sizes.
    replicas = layout.data_parallel_size
    least = prod(factors) * replicas
    fits = size == least if len(factors) == 2 else not size % least
    if not fits:
        named = " x ".join(f"{name} {settings[name]}" for name in (_MICRO, _COUNT) if name in settings)
        raise UserError(
            f"{_TRAIN} {size} does not fit {named or 'one sequence'} x data-parallel size {replicas} = {least}: "
            "change one of them; ranks that share a sequence do not count"
        )
    return {**settings, _TRAIN: size * layout.sequence_parallel_size}


def without_settings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `deepspeed.initialize` without a configuration, to replace it by another."""
    others = {name: value for name, value in keywords.items() if name != "config_params"}
    if getattr(others.get("args"), "deepspeed_config", None) is not None:
        others["args"] = copy(others["args"])
        others["args"].deepspeed_config = None
    return others


def settings_without_effect(settings: Mapping[str, Any]) -> str | None:
    """A warning that lists the sections without effect; None if there are none."""
    found = ((name, remedy, _at(settings, name)) for name, remedy in WITHOUT_EFFECT.items())
    idle = [f"{name} ({remedy})" for name, remedy, value in found if value is not None and value is not False]
    return f"without effect in the DeepSpeed configuration: {', '.join(idle)}" if idle else None


def _at(settings: Mapping[str, Any], path: str) -> Any:
    found: Any = settings
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _open_keys(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys with the value `auto`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            if key not in _FREE:
                yield from _open_keys(value, f"{path}{key}.")
        elif value == "auto":
            yield f"{path}{key}"


def initialize(
    model: TokenSlicePipelineModule,
    config: dict[str, Any] | str | Path | None = None,
    *,
    schedule: str | Schedule | ProvenSchedule = "1f1b",
    timeout: timedelta = timedelta(minutes=30),
    ledger_directory: str | Path = "stalled_pipeline",
    watch: StallWatch | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    check_token_slices: bool = True,
    key_value_gradients: torch.dtype | None = None,
    host_copies: HostCopySettings | None = None,
    expert_exchange: ExpertExchange = ExpertExchange.NONE,
    costs: Callable[[PipelineShape], OpCosts] | None = None,
    **keywords: Any,
) -> tuple[TokenSlicePipelineEngine, Any, Any, Any]:
    """Make the engine of a model, as `deepspeed.initialize` does.

    Args:
        model: the module of this rank.
        config: DeepSpeed configuration, or the file of one; may be in the keywords `args` or `config_params`, too.
        schedule: order of the ops: a name of `plan.schedules.SCHEDULES`, a generator of your own, or `optimised`, which
            is found for the costs of the ops before the first batch. Or a `ProvenSchedule`, which is not proven again,
            and has the `host_copies` and the `expert_exchange`.
        timeout: longest time that a rank may wait for another. After it, one line names the rank that blocks the run,
            and all processes end with the code `processes.STALLED`.
        ledger_directory: directory to which every rank then writes its completed and its current instructions.
        watch: the watch of this rank, with a timeout and a directory of its own; None to make one.
        overlap_grad_reduce: start to sum gradients over data-parallel ranks as soon as the last backward of the step
            has passed a layer; else after the last op. Settings of `config` that only DeepSpeed's own reductions
            support, such as ZeRO's `contiguous_gradients` and `overlap_comm`, turn it off.
        overlap_param_gather: under ZeRO 1 and in bf16, gather the weights that other ranks stepped while the next
            forward runs. Code that reads weights between two batches must call `engine.complete_weights()`.
        check_token_slices: run each layer in the first batch on a few tokens, whole and in token slices, and refuse it
            if the results differ, as with attention of its own.
        key_value_gradients: type in which gradients of keys and values are kept between the backwards of two token
            slices, such as `torch.bfloat16`; sums are rounded when they are stored. None for fp32, or the wider type of
            the model.
        host_copies: bytes of stage inputs, keys and values, and the rate of their copies: tensors that are not read
            for long enough are kept on the host. Needs a module with recompute_stages. None for no copies.
        expert_exchange: how layers exchange tokens with other replicas or sequence- or tensor-parallel ranks, for their
            experts: with `ExpertExchange.ALLTOALL` hosts may wait in every forward, and in no backward.
        costs: costs of the ops of a shape, the same on all ranks, for the schedule `optimised`; None for stages of
            equal work, with times of token slices by their tokens.
        **keywords: keywords of `deepspeed.initialize`, such as `optimizer`, `model_parameters` or `lr_scheduler`.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`, as `deepspeed.initialize`.
    """
    check_versions()
    if costs is not None and schedule != OPTIMISED:
        raise UserError("costs are for schedule='optimised', and another schedule is given: leave out one of them")
    if isinstance(schedule, str) and schedule != OPTIMISED:
        schedule = schedule_named(schedule)
    _check_model(model)
    if schedule == OPTIMISED:
        costs = costs or partial(_even_costs, model.token_slices)
        schedule = FoundSchedule(costs, model.token_slices)
    if isinstance(schedule, ProvenSchedule):
        proven = schedule
    else:
        queues = hardware_queues() if get_accelerator().device_name() == "cuda" else None
        device = DeviceModel(hardware_queues=queues, exchange=expert_exchange)
        proven = ProvenSchedule(schedule, device, host_copies, costs or lowering_costs)
    if proven.host_copies is not None and not model.recomputation.stages:
        raise UserError(
            "host_copies are of inputs of stages that are computed again, and the module keeps graphs: build it with "
            "recompute_stages=True"
        )
    settings = read_settings(config, keywords)
    if model.sequence_ranks.size > 1:
        config, keywords = for_deepspeed(settings, model.topology().layout), without_settings(keywords)
    warnings = [settings_without_effect(settings)]
    if schedule is interleaved and model.pipeline.num_model_chunks == 1:
        warnings.append(
            "the schedule 'interleaved' is '1f1b' with one model chunk: build the module with num_model_chunks=2"
        )
    for line in filter(None, warnings):
        log_dist(line, ranks=[0], level=logging.WARNING)
    # Before optimizers copy weights and choose the copies that count.
    model.connect_shared_modules()
    ends = watch is None
    if watch is None:
        watch = watch_this_rank(timeout, Path(ledger_directory), name=model.world_group.group_name)
    engine_class = partial(
        TokenSlicePipelineEngine,
        schedule=proven,
        watch=watch,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        check_token_slices=check_token_slices,
        key_value_gradients=key_value_gradients,
    )
    with _engine_class(engine_class):
        engine, *others = deepspeed.initialize(
            model=model, config=str(config) if isinstance(config, Path) else config, **keywords
        )
    if ends:
        finalize(engine, watch.end)
    wait_as_long(watch.timeout + GRACE)
    _check_precision(engine)
    engine.check_schedule()
    return engine, *others


def _even_costs(token_slices: TokenSlices, shape: PipelineShape) -> OpCosts:
    """Costs of stages with equal work and equal costs of all tokens."""
    even = len(token_slices) != shape.num_token_slices
    return attention_costs(shape, (1,) * shape.num_token_slices if even else token_slices.lengths, 0.0)


def _check_model(model: Any) -> None:
    """Refuse models of other classes, which have no token slices."""
    if not isinstance(model, TokenSlicePipelineModule):
        of_deepspeed = "" if not isinstance(model, PipelineModule) else ", or call deepspeed.initialize"
        raise UserError(
            f"initialize takes a TokenSlicePipelineModule, and the model is a {type(model).__name__}: build one of its "
            f"layers{of_deepspeed}"
        )


def _check_precision(engine: TokenSlicePipelineEngine) -> None:
    """Refuse settings with which DeepSpeed's pipelines would give wrong results."""
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise UserError(
            "fp16 with ZeRO stage 0: DeepSpeed divides a pipeline's gradients by a loss scale it never applied; "
            "use ZeRO stage 1, or bf16"
        )
    if engine.torch_autocast_enabled():
        raise UserError(
            "torch_autocast is set, under which layers compute in one dtype and keep keys, values and gradients in "
            "another: use the bf16 or fp16 section instead"
        )


def init_distributed(*, met: Callable[[], object] = lambda: None, **keywords: Any) -> None:
    """Join the process group as `deepspeed.init_distributed` does, without compiling an op.

    Rank and meeting place are read from the variables of the launcher; without one, this is the only process. On CPUs
    DeepSpeed would first build its shared-memory collectives with a C++ compiler, which gloo does not need.

    Args:
        met: called once the store of the ranks answers.
        **keywords: keywords of `deepspeed.init_distributed`.

    Raises:
        MeetingError: if the ranks cannot meet at the place that is named.
    """
    check_versions()
    store = None
    if not (dist.is_initialized() or keywords.keys() & {"rank", "init_method"}):
        launch = LaunchEnvironment.read()
        launch.export()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if "MASTER_ADDR" in os.environ and (agent or launch.world_size > 1) and keywords.get("dist_backend") != "fake":
            # torch connects again, to the server that is known to be there.
            store = meeting_store(launch, keywords.get("timeout", dist.distributed_c10d.default_pg_timeout))
            met()
        if agent:
            _join_apart_from_earlier_starts(keywords, store)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(**keywords)


def _join_apart_from_earlier_starts(keywords: Mapping[str, Any], store: Any) -> None:
    """Join the process group in a part of torchrun's store that no earlier start of the ranks has used.

    The store outlives all starts: otherwise torch finds addresses of ranks that have died, and waits for them.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or store is None:
        return
    accelerator, timeout = get_accelerator(), keywords.get("timeout", dist.distributed_c10d.default_pg_timeout)
    # As DeepSpeed does: groups are then split from this one.
    on_cuda = accelerator.device_name() == "cuda"
    dist.init_process_group(
        keywords.get("dist_backend") or accelerator.communication_backend_name(),
        store=dist.PrefixStore(f"start {restart}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=accelerator.device(int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else None,
    )


@contextmanager
def _engine_class(engine_class: Any) -> Iterator[None]:
    """Replace the class of engines that `deepspeed.initialize` makes: it looks the class up in its own module."""
    original = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original
