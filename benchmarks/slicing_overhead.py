"""Cost of token slices on one rank: a step with token slices over a step without, in one run.

python -m benchmarks.slicing_overhead [--token-slices 2 4 8 16]
"""

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median

import torch.distributed as dist

from benchmarks.workload import batches, benchmark_model, join, our_engine
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.balance import balanced_token_slices


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-slices", type=int, nargs="+", default=[2, 4, 8, 16], metavar="S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="as many as a stage of benchmarks.pipeline_speed has")
    options = parser.parse_args(argv)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    os.environ.update(alone, LOCAL_SIZE=str(len(os.sched_getaffinity(0))))
    join()
    model = benchmark_model(options.layers)
    cuts = {"1": TokenSlices.uniform(model.seq_length, 1)}
    for count in options.token_slices:
        cuts[f"{count} uniform"] = TokenSlices.uniform(model.seq_length, count)
        cuts[f"{count} balanced"] = balanced_token_slices(model, count)
    engines = {name: our_engine(model, cut, 1, num_stages=1) for name, cut in cuts.items()}
    data = batches(model, for_deepspeed=False)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.rounds + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.train_batch(data)
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - start)
    base = median(times["1"])
    print(f"{'token slices':>14} {'median s':>9} {'over 1':>7}")
    for name, seconds in times.items():
        print(f"{name:>14} {median(seconds):>9.3f} {median(seconds) / base - 1:>7.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
