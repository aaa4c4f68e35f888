"""Peak activation memory of the first stage, measured beside the closed form.

    deepspeed --num_accelerators 2 --module benchmarks.activation_memory [--llama] [--recompute selective]

Closed form: 1F1B keeps min(p - i - 1 + s, m s) token slices alive on stage i. Each holds its activations; each of the
micro-batches they belong to holds keys and values of its whole sequence, and, while it runs backward, fp32 gradients
of the keys and values before its last token slice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from benchmarks.measuring.closed_forms import block_activation_bytes_per_token, key_value_bytes_per_token
from benchmarks.measuring.command import Parser
from benchmarks.measuring.counters import LiveBytes
from benchmarks.measuring.workload import batches, benchmark_model, join, our_engine
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.clocks import Observer
from megatron_terapipe.config import ModelConfig

FP32_BYTES = 4


def closed_form(
    model: ModelConfig, num_layers: int, num_token_slices: int, num_stages: int, num_micro_batches: int, recompute: str
) -> int:
    """Bytes alive on the first stage at the peak of 1F1B, with uniform token slices and one row in each micro-batch."""
    live = min(num_stages - 1 + num_token_slices, num_micro_batches * num_token_slices)
    length = model.seq_length // num_token_slices
    block = model.blocks[0]
    key_value = key_value_bytes_per_token(model, block, FP32_BYTES)
    token = block_activation_bytes_per_token(model, block, FP32_BYTES, recompute) - key_value
    live_micro_batches = -(-live // num_token_slices)
    owed = key_value * (model.seq_length - length)
    return num_layers * (live * length * token + live_micro_batches * model.seq_length * key_value + owed)


class BesideBackwards(Observer):
    """The most bytes alive right before or after a backward."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.most = live, 0

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Read the bytes beside a backward."""
        before = self._live.now
        yield
        if op.kind is not OpKind.FORWARD:
            self.most = max(self.most, before, self._live.now)


def measure(model: ModelConfig, num_token_slices: int, num_micro_batches: int, recompute: str) -> tuple[int, int]:
    """Bytes of activations on this rank: the most between two ops, and the most at any moment."""
    cut = TokenSlices.uniform(model.seq_length, num_token_slices)
    stages = dist.get_world_size()
    engine = our_engine(model, cut, num_micro_batches, num_stages=stages, recompute=recompute)
    data = batches(model, for_deepspeed=False)
    engine.train_batch(data)
    # Weight gradients are made anew in every step; by the time the peak comes they are all there.
    gradients = sum(parameter.nbytes for parameter in engine.module.parameters())
    with LiveBytes() as live, engine.observers.joined_by(BesideBackwards(live)) as beside:
        engine.train_batch(data)
    return beside.most - gradients, live.peak - gradients


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--local_rank", help="set by the launcher")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step (default: 4)")
    parser.add_argument("--llama", action="store_true", help="Llama's parts instead of GPT-2's")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    options = parser.parse_args(argv)
    join()
    model, stages = benchmark_model(llama=options.llama), dist.get_world_size()
    layers = model.num_layers // stages
    if dist.get_rank() == 0:
        print(f"{stages} stages, {options.micro_batches} micro-batches, {layers} layers on stage 0, MB")
        print("without token slices, 1F1B keeps the activations A of p micro-batches: p x A")
        titles = f"{'measured':>9} {'closed form':>12} {'error':>7} {'of p x A':>9} {'with workspace':>15}"
        print(f"{'token slices':>12} {titles}")
    whole = 0
    for num_token_slices in (1, 2, 4, 8, 16):
        measured, peak = measure(model, num_token_slices, options.micro_batches, options.recompute)
        expected = closed_form(model, layers, num_token_slices, stages, options.micro_batches, options.recompute)
        whole = whole or measured
        if dist.get_rank() == 0:
            error = measured / expected - 1
            row = [value / 2**20 for value in (measured, expected, peak)]
            numbers = f"{row[0]:>9.1f} {row[1]:>12.1f} {error:>7.1%} {measured / whole:>9.0%} {row[2]:>15.1f}"
            print(f"{num_token_slices:>12} {numbers}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
