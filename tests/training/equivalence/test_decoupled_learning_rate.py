"""`--decoupled-lr`: each weight moves by its own rate times the gradient of plain autograd, under every layout."""

import numpy as np
import pytest

from megatron_terapipe.training import build_engine as trainer_engine
from megatron_terapipe.training.optimizer import set_step_sizes
from tests.distributed import run_each
from tests.training.equivalence.test_gpt_equivalence import expected_gradients
from tests.training.gpt_runs import Key, Setup, _key, batches, run_of

FLAGS = "--num-token-slices 4 --optimizer sgd --sgd-momentum 0 --weight-decay 0 --decoupled-lr 1"
RATE, OF_ENDS = 2.0, 32.0
SETUPS = [
    Setup(2, f"{FLAGS} --pipeline-model-parallel-size 2 --zero-stage 1"),
    Setup(2, f"{FLAGS} --zero-stage 1 --untie-embeddings-and-output-weights"),
    Setup(2, f"{FLAGS} --tensor-model-parallel-size 2"),
]


def moved(setup: Setup) -> dict[Key, np.ndarray]:
    """How far one step moved each weight."""
    run = run_of(setup)
    engine = trainer_engine.build_engine(run)
    named = {_key(engine, name, each): each for name, each in engine.module.named_parameters()}
    before = {key: each.detach().double().numpy().copy() for key, each in named.items()}
    set_step_sizes(engine.optimizer, learning_rate=RATE, of_ends=OF_ENDS, weight_decay=0.0)
    engine.train_batch(iter(batches(setup, run.layout.coordinate(run.launch.rank).data)))
    return {key: before[key] - each.detach().double().numpy() for key, each in named.items()}


def test_the_words_on_both_ends_move_by_their_own_rate() -> None:
    for setup, ranks in zip(SETUPS, run_each(moved, 2, SETUPS), strict=True):
        expected = expected_gradients(setup)[1]
        untied = "--untie" in setup.flags
        ends = {"layers.0.weight"} | ({next(name for name in expected if "linear.weight" in name)} if untied else set())
        for found in ranks:
            for (name, share, cut), distance in found.items():
                size = 2 if "--tensor" in setup.flags else 1
                gradient = expected[name] if cut is None else np.split(expected[name], size, axis=cut)[share]
                wanted = gradient * (OF_ENDS if name in ends else RATE)
                assert distance == pytest.approx(wanted, rel=1e-4, abs=1e-5), f"{name} in {setup}"
