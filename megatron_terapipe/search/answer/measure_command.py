"""`measure`: times of ops and messages on this machine, or on the hosts of a hostfile."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, ProgressLine, add_json_flag, up_to
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import slots_of_hosts
from megatron_terapipe.search.answer.flags import (
    CHANGES,
    PRECISIONS,
    above_zero,
    add_model_flags,
    whole_numbers,
)
from megatron_terapipe.search.answer.question import model_of
from megatron_terapipe.search.measure.machine import default_num_processes, measure_machine, on_cpu
from megatron_terapipe.search.measure.on_hosts import measure_hosts
from megatron_terapipe.search.measure.sizes import (
    LinkClass,
    MeasuredSizes,
    default_numbers_of_token_slices,
    undivided_number,
)
from megatron_terapipe.search.price.profile import Profile, sizes_measured_once, write_profile
from megatron_terapipe.search.price.profile_times import message_line

HELP = (
    "Measure the layers of a model as the trainer runs them (micro-batches, token slices, their prefixes, "
    "tensor-parallel sizes), the links between ranks, and the overhead of the engine: on this machine, or with "
    "--hostfile on several, and the links between them. Write a profile for --profile and the trainer's --op-profile. "
    "The layers are a GPT's, or with --program your own."
)

EXAMPLES = """\
examples:
  %(prog)s model.json --budget-s 60
  %(prog)s llama2-7b --hostfile hostfile --tensor-parallel-size 1,2,4 --json profile.json
  %(prog)s --budget-s 30 --program examples/pretrain_own_model.py --num-layers 4 --hidden-size 64 ..."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_model_flags(parser, required=False)
    parser.add_argument_group("model").add_argument(
        "--program",
        nargs=argparse.REMAINDER,
        metavar="FILE FLAG",
        help=(
            "instead of MODEL: a program that calls pretrain(layers), and its flags, as for a training; the last flag "
            "of this command, since all words after it are the program's"
        ),
    )
    group = parser.add_argument_group("measurements")
    group.add_argument("--precision", choices=PRECISIONS, help="type of the weights (default: bf16; fp32 on CPUs)")
    group.add_argument(
        "--tensor-parallel-size",
        type=whole_numbers,
        metavar="N,N",
        help=(
            "tensor-parallel sizes; each rank measures its own part (default: powers of two up to the number "
            "of devices)"
        ),
    )
    group.add_argument(
        "--micro-batch-size",
        type=whole_numbers,
        metavar="N,N",
        default=(1, 2, 4),
        help="sequences of a micro-batch (default: 1,2,4)",
    )
    group.add_argument(
        "--num-token-slices",
        type=whole_numbers,
        metavar="N,N",
        help="numbers of equal token slices of a sequence (default: 1,2,4,8,16)",
    )
    group.add_argument(
        "--num-processes",
        type=up_to(1024),
        metavar="N",
        help="ranks of this machine that measure at the same time (default: one per device; 2 on a CPU)",
    )
    group.add_argument(
        "--hostfile",
        metavar="FILE",
        help=(
            "measure on all slots of these hosts, started by DeepSpeed's launcher as the trainer is; two hosts show "
            "the network of many that are alike"
        ),
    )
    group.add_argument(
        "--budget-s",
        type=above_zero,
        default=120.0,
        metavar="SECONDS",
        help="start no new measurement after this time (default: 120)",
    )
    add_json_flag(parser.add_argument_group("output"), "the profile", default="profile.json")


def run(options: argparse.Namespace) -> int:
    """Measure and write."""
    model, precision = _measured_model(options)
    if options.num_processes is not None and options.hostfile is not None:
        raise ConfigError(
            f"--num-processes {options.num_processes}: the hostfile has the ranks of each host: drop one of the flags"
        )
    slots = None if options.hostfile is None else [n for n in slots_of_hosts(options.hostfile, "--hostfile") if n]
    ranks_of_a_node = options.num_processes or default_num_processes() if slots is None else max(slots)
    # Layers of one's own may need ranks that really exchange their parts.
    most = 1 if options.program else max(ranks_of_a_node, 1)
    divisors = [size for size in (1, 2, 4, 8) if size <= most and not undivided_number(model, size)]
    sizes = MeasuredSizes(
        model=model,
        precision=options.precision or precision or ("fp32" if on_cpu() else "bf16"),
        tensor_parallel_sizes=options.tensor_parallel_size or tuple(divisors),
        micro_batch_sizes=options.micro_batch_size,
        nums_token_slices=options.num_token_slices or default_numbers_of_token_slices(model.seq_length),
        budget_s=options.budget_s,
        program=tuple(options.program) if options.program else None,
    )
    alone = options.json == STANDARD_OUTPUT
    print(*plan(sizes, slots, ranks_of_a_node), sep="\n", file=sys.stderr if alone else sys.stdout, flush=True)
    measuring = (
        measure_machine(sizes, ranks_of_a_node)
        if slots is None
        else measure_hosts(sizes, options.hostfile, on_cpu=on_cpu())
    )
    profile = None
    with ProgressLine() as line:
        for news in measuring:
            if isinstance(news, Profile):
                profile = news
                continue
            share = min(news.share, 1.0)
            doing = f"{news.doing}, about {(1 - share) * options.budget_s:.0f} s left"
            line.part(doing)(share)
            if not sys.stderr.isatty():
                print(f"  {100 * share:3.0f} %  {doing}", file=sys.stderr, flush=True)
    if profile is None:
        raise ConfigError(f"the first rank of {options.hostfile} sent no profile: see the lines above")
    write_profile(profile, options.json)
    if not alone:
        print(*summary(profile), *next_steps(profile, options.model or "MODEL", options.json), sep="\n")
    return 0


def _measured_model(options: argparse.Namespace) -> tuple[ModelConfig, str | None]:
    """Return the model whose layers are measured, and the precision of its training; None where no flags give one."""
    if options.program:
        # Imported where a program is run: it loads torch.
        from megatron_terapipe.search.measure.program import model_of_program

        if options.model is not None or any(getattr(options, name) is not None for name in CHANGES):
            raise ConfigError(
                f"MODEL and the flags that change it describe a GPT, and --program {options.program[0]} has layers of "
                "its own: give flags after the program"
            )
        config = model_of_program(options.program)[1]
        return config.model, config.precision.dtype
    if options.model is None:
        raise ConfigError("nothing is named to be measured: give MODEL, or --program FILE with the flags of a training")
    workload = model_of(options)
    if workload.config is None:
        raise ConfigError(f"{options.model} lists layers, which the trainer cannot build: give a model by its fields")
    for kind in filter(None, (layer.never_measured for layer in workload.layers)):
        raise ConfigError(f"{options.model} has {kind}, which are not measured: rank it without --profile")
    return workload.config, None


def plan(sizes: MeasuredSizes, slots: Sequence[int] | None, ranks: int) -> Iterator[str]:
    """Yield the measurements, where, and how long, a line each; `slots`: ranks of each host, None = this machine."""
    where = f"{ranks} ranks of this machine" if slots is None else f"{sum(slots)} ranks on {len(slots)} hosts"
    runs = [run for size, recompute, _ in sizes.layouts() for run in sizes.runs(size, recompute)]
    yield f"measuring on {where}, {sizes.precision}: the engine, then links, then {len(runs)} sizes of layers"
    yield (
        f"this takes about {sizes.budget_s:.0f} s (--budget-s): sizes that are not reached by then are left out, the "
        "least important ones; other work on these machines makes times longer"
    )


def next_steps(profile: Profile, model: str, path: str) -> Iterator[str]:
    """Yield the file that was written, missing measurements, and the commands that read it."""
    yield f"wrote {path}"
    if profile.num_nodes == 1:
        yield "not measured: links between hosts, which stay as in the data sheet; --hostfile measures them"
    if not any(link.where == "inside" for link in profile.links):
        yield "not measured: links inside a node, since each host has one rank; they stay as in the data sheet"
    for sizes in sizes_measured_once(profile):
        yield f"measured: only {sizes}; op times of others are a guess, and a longer --budget-s measures them"
    if profile.own_model is not None:
        yield f"next: train with --op-profile {path}; or describe a GPT of the same sizes as MODEL, and:"
    yield f"next: terapipe search rank {model} CLUSTER --global-batch-size N --profile {path}"
    if profile.own_model is None:
        yield "  or: terapipe search trial with the same words, which runs the best and calibrates"


def summary(profile: Profile) -> Iterator[str]:
    """Yield a summary of the measurements, a line each."""
    nodes = f"{profile.num_nodes} hosts of " if profile.num_nodes > 1 else ""
    own = "" if profile.own_model is None else f", the layers of {profile.own_model}"
    yield f"{nodes}{profile.num_devices} x {profile.device}, {profile.precision}{own}"
    for layer in profile.layers:
        name = layer.shape if profile.own_model is None else layer.shape.kind
        if layer.recompute == "none":
            longest = max(layer.points, key=lambda point: (point.end - point.start, -point.micro_batch_size))
            backward = longest.input_gradient_s + longest.weight_gradient_s
            yield (
                f"  {name}, tensor-parallel size {layer.tensor_parallel_size}: "
                f"{longest.micro_batch_size} x {longest.end - longest.start} tokens forward "
                f"{1000 * longest.forward_s:.3g} ms, backward {1000 * backward:.3g} ms ({len(layer.points)} points)"
            )
    for link in profile.links:
        line = message_line(link.points)
        measured = LinkClass(link.where, link.what, (tuple(range(link.num_ranks)),), link.ranks_per_node, link.flows)
        yield f"  {measured.words}: {1e6 * line.start_s:.3g} us + {1e-9 / line.byte_s:.3g} GB/s"
    if profile.engine is not None:
        engine = profile.engine
        yield (
            f"  engine: {1e6 * engine.op_s:.3g} us an op, {1e9 * engine.optimizer_s_per_parameter:.3g} ns a parameter, "
            f"{1000 * engine.iteration_s:.3g} ms an iteration"
        )
