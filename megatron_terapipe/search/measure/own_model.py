"""Times the layers of a user's own model in a run, before it starts."""

import gc
import os
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.config import Config
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.measure.layers import measured_layers, profile_here
from megatron_terapipe.search.measure.sizes import MeasuredSizes, default_numbers_of_token_slices
from megatron_terapipe.search.price.profile import profile_to_json
from megatron_terapipe.training.trained_model import TrainedModel

BUDGET_S = 3.0
"""Seconds after which a run that waits for its plan begins no further size, once the layers are built."""


def measure_here(trained: TrainedModel, config: Config) -> dict[str, Any]:
    """Measure the layers of a run on this rank only, before its process group, and return their profile as its JSON.

    Raises:
        ConfigError: if they cannot be built or run on one rank.
    """
    begun, accelerator = time.perf_counter(), get_accelerator()
    device = torch.device(accelerator.current_device_name())
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:  # As in training, or ranks wait for each other.
        launch = LaunchEnvironment.read(local_rank=config.parallel.local_rank)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_size))
    sizes = MeasuredSizes(
        model=config.model,
        precision=config.precision.dtype,
        tensor_parallel_sizes=(1,),
        micro_batch_sizes=(1, 2, 4) if config.parallel.strategy == AUTO else (config.batch.micro_batch_size,),
        # A whole sequence may need more memory than its token slices, for which they are found.
        nums_token_slices=default_numbers_of_token_slices(config.model.seq_length)[1:] or (1,),
        budget_s=BUDGET_S,
        program=(trained.program,),
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            layers = measured_layers(sizes, trained, config, device, BUDGET_S)
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ConfigError(
            f"the layers of {trained.program} cannot be measured on one rank ({type(error).__name__}): see the lines "
            "above, or drop the flags that search by their times, such as --token-slices auto"
        ) from None
    finally:
        dist.destroy_process_group()
    gc.collect()  # The forward of an attached linear layer refers to the layer.
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    print(f" measured the layers of {trained.program} in {time.perf_counter() - begun:.1f} s", flush=True)
    return profile_to_json(profile_here(layers, sizes, num_devices=1))
