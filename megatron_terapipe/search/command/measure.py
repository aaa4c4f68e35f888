"""`measure`: what ops and messages take on this machine."""

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.command.shared_flags import PRECISIONS, add_model_flags, model_of

if TYPE_CHECKING:
    from megatron_terapipe.config.model import ModelConfig
    from megatron_terapipe.search.op_times.profile import Profile

HELP = (
    "Measure the layers of a model on this machine as the trainer runs them (micro-batches, token slices, "
    "their prefixes, tensor-parallel sizes), the links between its devices, and the overhead of the engine. "
    "Write a profile for --profile."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_model_flags(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--precision", choices=PRECISIONS, help="type of the weights (default: bf16; fp32 on CPUs)")
    group.add_argument(
        "--tensor-parallel-size",
        metavar="N,N",
        help=(
            "tensor-parallel sizes; the part of each rank is measured alone (default: powers of two up to the number "
            "of devices)"
        ),
    )
    group.add_argument(
        "--micro-batch-size", metavar="N,N", default="1,2,4", help="sequences of a micro-batch (default: 1,2,4)"
    )
    group.add_argument(
        "--num-token-slices", metavar="N,N", help="numbers of equal token slices of a sequence (default: 1,2,4,8,16)"
    )
    group.add_argument(
        "--num-processes",
        type=int,
        metavar="N",
        help="ranks that measure at the same time (default: one per device; 2 on a CPU)",
    )
    group.add_argument(
        "--budget-s",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="start no new measurement after this time (default: 120)",
    )
    parser.add_argument("--json", metavar="FILE", default="profile.json", help="profile (default: profile.json)")


def run(options: argparse.Namespace) -> int:
    """Measure and write."""
    workload = model_of(options)
    if workload.config is None:
        raise ConfigError(f"{options.model} lists layers, which the trainer cannot build: give a model by its fields")
    if options.budget_s <= 0:
        raise ConfigError(f"--budget-s {options.budget_s:g} is not above 0: give seconds")
    from megatron_terapipe.search.measure.machine import default_num_processes, measure_machine, on_cpu
    from megatron_terapipe.search.measure.sizes import MeasuredSizes, default_numbers_of_token_slices
    from megatron_terapipe.search.op_times.profile import Profile
    from megatron_terapipe.search.op_times.profile_files import write_profile

    num_processes = options.num_processes or default_num_processes()
    listed = options.tensor_parallel_size
    model = workload.config
    sizes = MeasuredSizes(
        model=model,
        precision=options.precision or ("fp32" if on_cpu() else "bf16"),
        tensor_parallel_sizes=numbers(listed, "--tensor-parallel-size") if listed else _sizes(num_processes, model),
        micro_batch_sizes=numbers(options.micro_batch_size, "--micro-batch-size"),
        nums_token_slices=numbers(options.num_token_slices, "--num-token-slices")
        if options.num_token_slices
        else default_numbers_of_token_slices(model.seq_length),
        num_processes=num_processes,
        budget_s=options.budget_s,
    )
    profile = None
    with _Bar() as bar:
        for news in measure_machine(sizes):
            if isinstance(news, Profile):
                profile = news
            else:
                bar.show(news.share, news.doing)
    assert profile is not None, "the ranks tell it last, or fail"
    write_profile(profile, options.json)
    print(*summary(profile), f"wrote {options.json}", sep="\n")
    return 0


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the numbers of a list, each once, in rising order.

    Args:
        text: value of the flag.
        flag: the flag.

    Raises:
        ConfigError: if one is not a whole number from 1.
    """
    try:
        found = {int(word) for word in text.split(",")}
    except ValueError:
        found = {0}
    if min(found) < 1:
        raise ConfigError(f"{flag} {text} is not a list of whole numbers from 1: write it as 1,2,4")
    return tuple(sorted(found))


def summary(profile: "Profile") -> Iterable[str]:
    """Yield what was measured, in a few lines."""
    from megatron_terapipe.search.op_times.profile import shape_in_words
    from megatron_terapipe.search.op_times.profile_efficiency import message_line

    yield f"{profile.num_devices} x {profile.device}, {profile.precision}"
    for layer in profile.layers:
        if layer.recompute == "none":
            longest = max(layer.points, key=lambda point: (point.end - point.start, -point.micro_batch_size))
            backward = longest.input_gradient_s + longest.weight_gradient_s
            yield (
                f"  {shape_in_words(layer.shape)}, tensor-parallel size {layer.tensor_parallel_size}: "
                f"{longest.micro_batch_size} x {longest.end - longest.start} tokens forward "
                f"{1000 * longest.forward_s:.3g} ms, backward {1000 * backward:.3g} ms ({len(layer.points)} points)"
            )
    for link in profile.links:
        line = message_line(link.points)
        what = f"all-reduce of {link.num_ranks} ranks" if link.what == "all_reduce" else "message"
        yield f"  {what}: {1e6 * line.start_s:.3g} us + {1e-9 / line.byte_s:.3g} GB/s"
    if profile.engine is not None:
        engine = profile.engine
        yield (
            f"  engine: {1e6 * engine.op_s:.3g} us an op, {1e9 * engine.optimizer_s_per_parameter:.3g} ns a parameter, "
            f"{1000 * engine.iteration_s:.3g} ms an iteration"
        )


def _sizes(num_processes: int, model: "ModelConfig") -> tuple[int, ...]:
    """Return the powers of two that are worth measuring and that divide the model."""
    counts = [model.num_attention_heads]
    counts += [number for block in model.blocks for number in (block.num_key_value_heads, block.ffn_hidden_size)]
    sizes = (1, 2, 4, 8)
    return tuple(size for size in sizes if size <= max(num_processes, 1) and not any(count % size for count in counts))


class _Bar:
    """A line that says how far it is, on a terminal."""

    def __enter__(self) -> "_Bar":
        from tqdm import tqdm

        self._bar = tqdm(
            total=100, unit="%", file=sys.stderr, disable=None, bar_format="{percentage:3.0f}% |{bar}| {desc}"
        )
        return self

    def show(self, share: float, doing: str) -> None:
        """Say how far it is."""
        self._bar.set_description_str(doing)
        self._bar.update(100 * min(share, 1.0) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
