"""The commands for one CUDA device as tables of steps, the most telling first. Nothing is imported for them."""

from benchmarks.measuring.steps import Step

_FACTS, _MARKED, _ENGINE = "tests.gpu.facts", "tests.gpu.marked", "tests.gpu.engine"
_AS_WRITTEN = {"TERAPIPE_COMPILE_POINTWISE": "never"}
"""Attention written out is compiled anew for each shape otherwise, which takes minutes."""

FACTS = (
    Step("versions", f"{_FACTS}:versions", 60),
    Step("tests", f"{_MARKED}:other_tests", 120),
    Step("context", f"{_FACTS}:context", 100, on_cpu=None),
    Step(
        "products",
        f"{_FACTS}:products",
        60,
        {"tokens": 2048, "sizes": [[2048, 3072], [2048, 2048], [2048, 16384], [8192, 2048]], "repeats": 20},
        on_cpu={"tokens": 64, "sizes": [[16, 32]], "repeats": 1},
    ),
    Step(
        "attention",
        f"{_FACTS}:attention",
        100,
        {
            "shapes": [[1, 0], [1, 4096], [7, 33], [128, 4096], [1000, 1000], [2048, 0], [2048, 6144], [2048, 30720]],
            "long": [2048, 30720],
            "repeats": 10,
        },
        on_cpu={"shapes": [[1, 0], [7, 33], [64, 128]], "long": [32, 64], "repeats": 1},
        variables=_AS_WRITTEN,
    ),
    Step("attention tests", f"{_MARKED}:attention_tests", 150, variables=_AS_WRITTEN),
)

ENGINE = (
    Step("no wait", f"{_MARKED}:no_wait", 180),
    Step("numbers of one rank", f"{_ENGINE}:one_rank", 120),
    Step("two ranks", f"{_ENGINE}:two_ranks", 300, {"transfer_timeout_s": 12.0}),
)

CASES = (Step("all cases", f"{_ENGINE}:all_cases", 6 * 3600, {"transfer_timeout_s": 30.0}),)
"""Every case and every setup: hours."""
