"""Times the layers of a user's own model, also in a run before it starts.

    [before ...,  A A A B B A A ...,  after ...]  loss
     embedding    blocks              head            the layers of a GPT of the same flags that have their times

Each class of blocks is timed on its first layers that follow one another, with inputs that the layers before them make.
The time of a block is the mean over all blocks, each with the time of its class.
"""

import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.topology import ExpertParallelRanks, SequenceParallelRanks
from megatron_terapipe.config import Config
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.gpt import ModelRanks, gpt_loss
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.measure.layers import BuiltLayer, TimedLayers, measured_layers, profile_here
from megatron_terapipe.search.measure.sizes import MeasuredSizes, default_numbers_of_token_slices
from megatron_terapipe.search.price.profile import LayerShape, profile_to_json
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.training.own_layers import blocks_of
from megatron_terapipe.training.trained_model import TrainedModel

MOST_OF_A_CLASS = 4
"""Blocks of a class that are timed: others of the class count as equal to them."""


def build_own_layers(
    model: TrainedModel,
    config: Config,
    ranks: TensorParallelRanks,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: str = "none",
) -> list[TimedLayers]:
    """Return an entry for each class of blocks and each shape of a GPT's block, and for both ends."""
    with device:
        layers = list(model.layers(config, ModelRanks(ranks, ExpertParallelRanks(), SequenceParallelRanks())))
    blocks, num_layers = blocks_of(layers, config.model.num_layers), config.model.num_layers
    if len(blocks) != num_layers:
        raise ConfigError(
            f"the costs of the layers of {model.program} were to be measured, and --num-layers {num_layers} is not the "
            "number of its blocks, the layers from the first to the last whose class occurs more than once: correct it"
        )
    kinds = [each.typename if isinstance(each, LayerSpec) else type(each) for each in layers]
    timed = {kind: _first_of(kind, kinds, blocks) for kind in dict.fromkeys(kinds[block] for block in blocks)}
    tied: dict[str, torch.nn.Module] = {}
    with device:
        built = {
            number: BuiltLayer.of(layers[number], dtype, device, tied)
            for number in (*range(max(span.stop for span in timed.values())), *range(blocks.stop, len(layers)))
        }
    before = tuple(built[number] for number in range(blocks.start))
    after = tuple(built[number] for number in range(blocks.stop, len(layers)))
    embedding, *of_blocks, norm, head = (LayerShape.of(each) for each in gpt_workload(config.model).layers)
    found = [
        TimedLayers(
            shape,
            tuple(built[number] for number in span),
            tuple(built[number] for number in range(span.start)),
            count=len(span),
            weight=sum(kinds[block] is kind for block in blocks),
        )
        for shape in dict.fromkeys(of_blocks)
        for kind, span in timed.items()
    ]
    inputs = tuple(built[number] for number in built if number < blocks.stop)
    return [
        *found,
        TimedLayers(embedding, before),
        TimedLayers(norm),
        TimedLayers(head, after, inputs, model.loss or gpt_loss),
    ]


def _first_of(kind: Any, kinds: Sequence[Any], blocks: range) -> range:
    """Return the first blocks of a class that follow one another, `MOST_OF_A_CLASS` at most."""
    first = end = kinds.index(kind, blocks.start)
    while end < min(blocks.stop, first + MOST_OF_A_CLASS) and kinds[end] is kind:
        end += 1
    return range(first, end)


BUDGET_S = 3.0
"""Seconds after which a run that waits for its plan begins no further size, once the layers are built."""


def measure_here(model: TrainedModel, config: Config) -> dict[str, Any]:
    """Measure the layers of a run on this rank only, before its process group, and return their profile as its JSON.

    Raises:
        ConfigError: if they cannot be built or run on one rank.
    """
    begun = time.perf_counter()
    searches = config.parallel.strategy == AUTO
    numbers = default_numbers_of_token_slices(config.model.seq_length)
    sizes = MeasuredSizes(
        model=config.model,
        precision=config.precision.dtype,
        tensor_parallel_sizes=(1,),
        micro_batch_sizes=(1, 2, 4) if searches else (config.batch.micro_batch_size,),
        # A whole sequence may need more memory than its token slices, for which they are found.
        nums_token_slices=numbers[1:] or (1,),
        budget_s=BUDGET_S,
        program=(model.program,),
    )
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    try:
        with _process_group_of_one(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            # Of two lengths, so that the time is known that does not depend on them.
            layers = measured_layers(sizes, partial(build_own_layers, model, config), device, BUDGET_S, least=2)
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ConfigError(
            f"the layers of {model.program} cannot be measured on one rank ({type(error).__name__}): see the lines "
            "above, or drop the flags that search by their times, such as --token-slices auto"
        ) from None
    gc.collect()  # The forward of an attached linear layer refers to the layer.
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    print(f" measured the layers of {model.program} in {time.perf_counter() - begun:.1f} s", flush=True)
    return profile_to_json(profile_here(layers, sizes, num_devices=1))


@contextmanager
def _process_group_of_one() -> Iterator[None]:
    """A process group of this rank, for layers that need one; where there is one already, nothing."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
