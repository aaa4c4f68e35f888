"""Modules that ranks share and that do not fit: one line on every rank, before any of them waits."""

import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.shared_modules import Declaration, WeightSpec, find_fault
from tests.distributed import run_distributed
from tests.runtime.shared_layers import BETWEEN, FIRST, LAST, layers, share
from tests.runtime.training import Setup, build

CUT = (9, 1, 8, 6)


def _mistake(name: str) -> str:
    def prepare(model: TokenSlicePipelineModule) -> None:
        if name == "shape":
            shared = model.share((0, 2))
            if model.stage_id == 0:
                shared.register_module(model.layer(FIRST), "position")
            if model.stage_id == 2:
                shared.register_module(model.layer(LAST).projection)
        elif name == "missing":
            shared = model.share((0, 2))
            if model.stage_id == 0:
                shared.register_module(model.layer(FIRST).words)
        elif name == "elsewhere":
            model.share((0, 2)).register_module(model.layer((FIRST, BETWEEN, LAST)[model.stage_id]))
        elif name == "twice":
            share(model)
            model.share_layers({FIRST: "words.weight", LAST: "projection.weight"})
        elif name == "rank":
            model.share((0, 3))
        elif name == "name":
            model.share_layers({FIRST: "word.weight"} if model.stage_id == 0 else {})

    try:
        build(Setup(pp=3, cut=CUT), layers=layers(), prepare=prepare, partition="0,2,5,7")
    except UserError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "shape",
            "with share((0, 2)) pipeline rank 2 registers weight [32, 16] float32, and pipeline rank 0 position "
            "[24, 16] float32: register weights of the same shapes and dtypes, in the same order",
        ),
        (
            "missing",
            "pipeline rank 2 registers no module with share((0, 2)): call register_module on each of its ranks before "
            "initialize",
        ),
        (
            "elsewhere",
            "pipeline rank 1 registers a module with share((0, 2)): name it among the ranks that share",
        ),
        (
            "twice",
            "words.weight [32, 16] is in share((0, 2)) and in share((0, 1, 2)), and its gradient would be summed "
            "twice: share it once, among all the ranks that hold it",
        ),
        ("rank", "share((0, 3)) names pipeline rank 3 of 3: name some of 0 to 2"),
    ],
)
def test_a_mistake_is_one_line_on_every_rank(name: str, message: str) -> None:
    assert run_distributed(_mistake, 3, name) == [message] * 3


def _declared(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> Declaration:
    return Declaration((0, 1), (tuple(WeightSpec(f"w{shape[0]}", shape, dtype, trained) for shape in shapes),))


def test_what_ranks_declare_is_compared_in_order() -> None:
    assert find_fault([[_declared((2, 3))], [_declared((2, 3))]]) is None
    assert find_fault([[_declared((2,)), _declared((4,))], [_declared((2,)), _declared((4,))]]) is None
    assert find_fault([[], []]) is None
    for first, other, words in (
        (_declared((2, 3)), _declared((3, 2)), "registers w3 [3, 2] float32, and pipeline rank 0 w2 [2, 3] float32"),
        (_declared((2,)), _declared((2,), dtype=torch.double), "registers w2 [2] float64"),
        (_declared((2,)), _declared((2,), trained=False), "registers w2 [2] float32 frozen"),
        (_declared((2,)), _declared((2,), (4,)), "registers 2 weights (w2 [2] float32, w4 [4] float32)"),
        (_declared((2,)), Declaration((0, 1)), "pipeline rank 1 registers no module with share((0, 1))"),
    ):
        fault = find_fault([[first], [other]])
        assert fault is not None
        assert words in fault
        assert "\n" not in fault
    assert find_fault([[_declared((2,)), _declared((4,))], [_declared((4,)), _declared((2,))]]) is not None


def test_a_module_without_such_a_weight_is_refused() -> None:
    assert run_distributed(_unknown_weight, 1) == [
        "Words has no weight word.weight to share: name some of position, words.weight"
    ]


def _unknown_weight() -> str:
    try:
        build(Setup(cut=CUT), layers=layers(), prepare=lambda model: model.share_layers({FIRST: "word.weight"}))
    except UserError as error:
        return str(error)
    return ""
