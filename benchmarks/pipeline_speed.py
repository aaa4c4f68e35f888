"""Times this engine against DeepSpeed's own on two ranks: `deepspeed --num_accelerators 2 -m ...`."""

import argparse, json, time, sys
from statistics import median
import torch, torch.distributed as dist
from benchmarks.workload import *


def timed(engine, data):
    dist.barrier()
    t = time.perf_counter()
    engine.train_batch(data)
    dist.barrier()
    return time.perf_counter() - t


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--local_rank")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--micro-batches", type=int, default=1)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--cuts", nargs="*", default=["uniform8"])
    o = p.parse_args()
    join()
    model = benchmark_model(o.layers)
    n = dist.get_world_size()
    from megatron_terapipe.model import flops

    a = flops.attention_flops_per_position(model)
    l = flops.linear_flops_per_token(model) + a
    E = (
        {"deepspeed": (deepspeed_engine(model, o.micro_batches, num_stages=n), batches(model, for_deepspeed=True))}
        if n > 1
        else {}
    )
    for c in o.cuts:
        k = "".join(x for x in c if x.isdigit() or x == ",")
        cut = (
            TokenSlices.parse(k)
            if "," in k
            else TokenSlices.uniform(SEQ_LENGTH, int(k))
            if c.startswith("u")
            else TokenSlices.balanced(SEQ_LENGTH, int(k), linear_cost=l, attention_cost=a * 1.5)
        )
        E[c] = (our_engine(model, cut, o.micro_batches, num_stages=n), batches(model, for_deepspeed=False))
        if dist.get_rank() == 0:
            print(c, cut)
    times = {k: [] for k in E}
    for r in range(o.rounds + 1):
        for k, (e, d) in E.items():
            t = timed(e, d)
            if r:
                times[k].append(t)
    if dist.get_rank() == 0:
        for k, v in times.items():
            print(k, "median %.3f" % median(v), "min %.3f" % min(v), ["%.2f" % x for x in v])
    for k, (e, d) in E.items():
        if k != "deepspeed":
            with e.timeline() as tl:
                e.train_batch(d)
            t = tl[0]
            if dist.get_rank() == 0:
                print(
                    k,
                    "bubble",
                    round(t.bubble_ratio, 4),
                    "makespan",
                    round(t.makespan, 3),
                    "busy",
                    [round(b, 3) for b in t.busy],
                )


if __name__ == "__main__":
    main()
