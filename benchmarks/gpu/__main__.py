"""Speed on one CUDA device, as one table: `make gpu-bench`.

python -m benchmarks.gpu                  # llama3-1b in bf16, 8k and 32k tokens, and single operators
python -m benchmarks.gpu --cpu --tiny     # on a CPU over gloo, to try the program itself
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import links, operators
from benchmarks.gpu.machine import SHARINGS, Sharing, has_gpu, join, possible_sharings, software
from benchmarks.gpu.training_speed import training_speed
from benchmarks.measuring.report import Section, progress, publish
from benchmarks.measuring.workload import benchmark_model
from benchmarks.measuring.worlds import RankFailed, World
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.presets import find_preset


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-preset", default="llama3-1b")
    parser.add_argument("--seq-length", type=int, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--token-slices", type=int, nargs="+", default=[1, 4, 16], metavar="S")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="run on a CPU where there is no GPU, to try the program")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu-bench"), help="folder for report.md and report.json"
    )
    options = parser.parse_args(argv)
    if not (has_gpu() or options.cpu):
        print("no CUDA GPU here: nothing was run")
        return 0
    sections: list[Section] = []
    for section in _sections(options):
        sections.append(section)
        # After each, so that what was measured is not lost with what was not.
        text = publish("make gpu-bench", software(), sections, options.output)
    print(text)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[Section]:
    """The tables, each when it is measured."""
    lengths, rounds = ([64], 1) if options.tiny else (options.seq_length, options.rounds)
    alone = possible_sharings(1)[0]
    for length in lengths:
        model = _model(options.model_preset, length, tiny=options.tiny)
        name = "tiny Llama" if options.tiny else options.model_preset
        yield training_speed(model, name, tuple(options.token_slices), rounds=rounds, sharing=alone)
    yield from _of_operators(alone, tiny=options.tiny, rounds=rounds)
    yield from _of_links(tiny=options.tiny, rounds=rounds)


def _model(preset: str, seq_length: int, *, tiny: bool) -> ModelConfig:
    if tiny:
        return replace(benchmark_model(1, llama=True), seq_length=seq_length, max_position_embeddings=seq_length)
    settings = find_preset(preset).settings
    return ModelConfig(**dict(settings) | {"seq_length": seq_length, "max_position_embeddings": seq_length})


def _of_operators(sharing: Sharing, *, tiny: bool, rounds: int) -> list[Section]:
    progress("products and kernels")
    sizes = ((64, 32, 32),) if tiny else tuple((tokens, 8192, 2048) for tokens in (512, 2048, 8192))
    with tempfile.TemporaryDirectory() as folder:
        log, variables = Path(folder, "log.txt"), [sharing.of_rank(0, {})]
        try:
            with World(1, join, 600.0, variables=variables, timeout_s=900.0, log=log) as world:
                products = world.run(operators.products, rounds, sizes)
                return products + world.run(operators.kernels, 4, 64 if tiny else 2048)
        except RankFailed as failed:
            failure = Section("Single operators", ("", "result"))
            failure.fail("all", failed)
            return [failure]


def _of_links(*, tiny: bool, rounds: int) -> list[Section]:
    sharing = _working_sharing()
    if sharing is None:
        tried = " nor by ".join(each.name for each in SHARINGS)
        return [
            Section("Two ranks", ("", "result"), [("all", f"failed: they cannot share this GPU, neither by {tried}")])
        ]
    return [
        links.receives(sharing, delay_s=0.5 if tiny else 5.0),
        links.queues(sharing, seq_length=64 if tiny else 2048, rounds=rounds),
    ]


def _working_sharing() -> Sharing | None:
    for sharing in possible_sharings(2):
        if not links.receives(sharing, delay_s=0.0).rows[0][1].startswith("failed"):
            return sharing
    return None


if __name__ == "__main__":
    sys.exit(main())
