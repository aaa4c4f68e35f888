"""Settings of the ranks and of the batch sizes."""

from math import prod

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def convert_parallel(conversion: Conversion) -> None:
    """Convert the ranks that share layers, the stages, and how layers are dealt to them."""
    # 0 stands for 1.
    conversion.flag("--tensor-model-parallel-size", max(1, conversion.count("model_parallel_size", 1) or 1))
    stages = max(1, conversion.count("pipe_parallel_size", 0) or 1)
    conversion.flag("--pipeline-model-parallel-size", stages)
    method = conversion.take("pipe_partition_method", "type:transformer|mlp")
    if stages > 1:
        ours = "parameters" if method == "parameters" else "uniform"
        conversion.flag("--stage-partition", ours)
        if not str(method).startswith("type:transformer") and method != "parameters":
            reason = "stages get the same number of transformer layers; see --stage-partition"
            conversion.remark("pipe_partition_method", reason)


def convert_batch(conversion: Conversion, world_size: int | None) -> None:
    """Convert the batch sizes. NeoX computes the global batch size from the others and the number of processes.

    Args:
        world_size: number of processes; None if it is not known.

    Raises:
        ConfigError: if the sizes do not fit together, or depend on a number of processes that is not known.
    """
    given = {key: None if conversion.take(key) == "auto" else conversion.count(key) for key in BATCH}
    whole, micro, accumulated = given.values()
    replicas = _replicas(conversion, world_size)
    if replicas is not None and whole is not None and micro is None:
        micro = whole // (replicas * (accumulated or 1))
    if replicas is not None and whole is None and micro is not None:
        whole = micro * replicas * (accumulated or 1)
    sequences = (micro or 1) * (replicas or 1) * (accumulated or 1)
    if micro == 0 or (whole is not None and (whole % sequences or (replicas and accumulated and whole != sequences))):
        listed = ", ".join(f"{key} {value}" for key, value in given.items() if value is not None)
        ranks = f"{replicas} data-parallel ranks" if replicas else "each other"
        raise ConfigError(f"{listed} do not fit {ranks}: change one of them")
    if micro is None and whole is not None:
        raise ConfigError(f"{BATCH[0]} {whole} is dealt to the processes of the run: give their number, --world-size N")
    if micro is not None and whole is None and (accumulated or 1) > 1:
        raise ConfigError(
            f"{BATCH[2]} {accumulated} makes a batch that grows with the processes of the run: give their number, "
            "--world-size N"
        )
    if micro is not None:
        conversion.flag("--micro-batch-size", micro)
    if whole is not None:
        conversion.flag("--global-batch-size", whole)


def _replicas(conversion: Conversion, world_size: int | None) -> int | None:
    """Return the data-parallel size, if it can be known."""
    everywhere = conversion.count("global_num_gpus")
    machine = [conversion.settings.get(key) for key in ("num_nodes", "num_gpus")]
    if world_size is None and everywhere:
        world_size = everywhere
    if world_size is None and all(isinstance(count, int) and count > 0 for count in machine):
        world_size = prod(machine)  # type: ignore[arg-type]
    if world_size is None:
        return None
    # 0 stands for 1.
    ranks = prod(max(1, conversion.count(key) or 1) for key in ("pipe_parallel_size", "model_parallel_size"))
    if world_size % ranks:
        raise ConfigError(
            f"{world_size} processes are not a multiple of the {ranks} ranks of a model: change one of them"
        )
    return world_size // ranks
