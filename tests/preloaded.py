"""Imported once by the server from which test ranks are forked. It may start no threads and use no device.

The imports of the first engine of a process take three seconds, with ZeRO eight, on every rank of every test: torch
imports its compiler as soon as a module is built on the meta device, DeepSpeed prepares it for an optimizer.
"""

import gc
import os
from importlib.util import find_spec

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops
import hypothesis.strategies  # noqa: F401
import numpy.testing  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch._refs
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401

import deepspeed_ext.runtime.initialize  # noqa: F401
import megatron_terapipe.training.build_engine
import megatron_terapipe.training.run_summary
import megatron_terapipe.training.trainer  # noqa: F401
import pretrain_gpt  # noqa: F401
import tests.end_to_end.launching  # noqa: F401
from deepspeed_ext.plan import found_schedule
from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.solve.orders import optimise
from megatron_terapipe.arguments import parse_arguments

# The parser of flags is made once, of tables that are read once.
parse_arguments(
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1"
    " --mock-data".split()
)
# A second of each rank that compares with it, half of it wandb.
if find_spec("megatron"):
    import megatron.core.models.gpt  # noqa: F401
# DeepSpeed tries the builders of its ops when it is first asked, and imports setuptools.
assert deepspeed.ops.__compatible_ops__
# numba compiles or loads the optimiser here, and in no rank.
optimise(PipelineShape(2, 2, 2), attention_costs(PipelineShape(2, 2, 2), (0.5, 0.5), 0.5), effort=1e-6)
# Ranks of tests need an order that was found, not a good one; tests of how good it is (tests/planning) start no ranks.
found_schedule.EFFORT = 1e-3
# As in tests/conftest.py: no file need outlive the machine.
os.fsync = lambda descriptor: None

# What is imported stays: a rank that collects garbage need not look at it.
gc.freeze()
