"""Cost of token slices on one rank: a step with token slices over a step without, in one run.

python -m benchmarks.slicing_overhead [--token-slices 2 4 8 16]
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch.distributed as dist

from benchmarks.measuring.workload import batches, benchmark_model, join_alone, our_engine, seconds_in_turns
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.pipeline import balanced_token_slices


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[2, 4, 8, 16], metavar="S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="as many as a stage of a model of 8 has")
    options = parser.parse_args(argv)
    join_alone()
    model = benchmark_model(options.layers)
    cuts = {"1": TokenSlices.uniform(model.seq_length, 1)}
    for count in options.token_slices:
        cuts[f"{count} uniform"] = TokenSlices.uniform(model.seq_length, count)
        cuts[f"{count} balanced"] = balanced_token_slices(model, count)
    engines = {name: our_engine(model, cut, 1, num_stages=1) for name, cut in cuts.items()}
    data = batches(model, for_deepspeed=False)
    steps = {name: partial(engine.train_batch, data) for name, engine in engines.items()}
    times = seconds_in_turns(steps, options.rounds)
    base = median(times["1"])
    print(f"{'token slices':>14} {'median s':>9} {'over 1':>7}")
    for name, seconds in times.items():
        print(f"{name:>14} {median(seconds):>9.3f} {median(seconds) / base - 1:>7.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
