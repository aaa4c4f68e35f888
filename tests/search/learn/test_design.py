import numpy as np

from megatron_terapipe.search.learn.calibration import no_calibration
from megatron_terapipe.search.learn.cluster_calibrations import propose, propose_strategies
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.cost_model import CostModel
from tests.search.learn.synthetic import CLUSTER, STRATEGIES, WORKLOAD

SPREAD = 0.05


def variance_left(slopes: np.ndarray, covariance: np.ndarray, chosen: list[int]) -> float:
    precision = slopes[chosen].T @ slopes[chosen] / SPREAD**2 + np.linalg.inv(covariance)
    return float(np.einsum("np,pq,nq->n", slopes, np.linalg.inv(precision), slopes).mean())


def test_the_first_one_teaches_most() -> None:
    random = np.random.default_rng(0)
    slopes, covariance = random.normal(size=(20, 4)), np.diag([1.0, 0.5, 0.1, 2.0])
    left = [variance_left(slopes, covariance, [index]) for index in range(20)]
    assert propose(slopes, covariance, SPREAD, 1, misfit_share=0.0) == [int(np.argmin(left))]


def test_chosen_trials_beat_random_ones() -> None:
    random = np.random.default_rng(1)
    slopes = random.normal(size=(60, 8)) * np.array([3, 1, 1, 0.3, 0.3, 0.1, 0.1, 0.1])
    covariance = np.eye(8)
    chosen = propose(slopes, covariance, SPREAD, 8, misfit_share=0.0)
    assert len(set(chosen)) == 8
    others = [variance_left(slopes, covariance, list(random.choice(60, 8, replace=False))) for _ in range(50)]
    assert variance_left(slopes, covariance, chosen) < np.quantile(others, 0.1)


def test_strategies() -> None:
    model = CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, precision="fp16")
    chosen = propose_strategies(model, STRATEGIES, no_calibration(), 4)
    assert len(chosen) == 4 and all(strategy in STRATEGIES for strategy in chosen)
    # Layouts that differ, since each shows other links and sizes of products.
    assert len({(one.tensor_parallel_size, one.pipeline_parallel_size) for one in chosen}) >= 3
    assert len(propose_strategies(model, STRATEGIES[:2], no_calibration(), 5)) == 2
