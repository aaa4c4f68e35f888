"""`slices`: how many token slices, and how long, for one strategy."""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import replace

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag, up_to
from megatron_terapipe.console import output_console, plain_table
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import DEVICE
from megatron_terapipe.search.answer.answer import question
from megatron_terapipe.search.answer.figures import speed_of
from megatron_terapipe.search.answer.flags import (
    add_question_flags,
    read_one_strategy,
    whole_numbers,
)
from megatron_terapipe.search.answer.json_documents import Cut, TokenSlicesDocument
from megatron_terapipe.search.answer.output_files import write_document
from megatron_terapipe.search.answer.question import question_of
from megatron_terapipe.search.rank.rules import broken_rule
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM, SearchProblem
from megatron_terapipe.search.rank.token_slices import MOST_TOKENS, PricedCut, SolvedCut, solve_cut
from megatron_terapipe.strategy import Strategy

HELP = (
    "Find the number and the lengths of the token slices with which a strategy takes the shortest time. The "
    "token slices of the given strategy are ignored."
)

EXAMPLES = """\
examples:
  %(prog)s llama2-7b hostfile --device A100-80GB --strategy plan/strategy.json
  %(prog)s llama2-7b hostfile --device A100-80GB --strategy plan/strategy.json --count 4,8,16 --granularity 128"""

SHOWN = 8  # lengths of a cut that the table shows; longer cuts end in dots


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_question_flags(parser)
    group = parser.add_argument_group("strategy")
    group.add_argument(
        "--strategy", metavar="FILE", required=True, help="JSON file of a strategy, or of an entry that rank wrote"
    )
    group.add_argument(
        "--count",
        type=whole_numbers,
        metavar="N,N",
        help="numbers of token slices to price (default: 1 and the most promising up to 128)",
    )
    group.add_argument(
        "--granularity",
        type=up_to(MOST_TOKENS),
        metavar="N",
        help=(
            "lengths are multiples of N tokens (default: 16 if token slices are long, otherwise the number that the "
            "trainer needs)"
        ),
    )
    add_json_flag(parser.add_argument_group("output"), "the answer")


def run(options: argparse.Namespace) -> int:
    """Find the cut, print it with the curve over the number of token slices, and return 0."""
    strategy = read_one_strategy(options.strategy, "--strategy")
    asked, notes = question_of(options, strategy.num_sequences)
    problem, costs, pricing = asked.problem, asked.costs, asked.pricing
    reason = broken_rule(replace(strategy, num_token_slices=1, token_slices=None), problem)
    if reason is not None:
        raise ConfigError(f"{options.strategy}: {reason}: change the strategy")
    counts = None if options.count is None else (1, *options.count)
    try:
        solved = solve_cut(pricing.cost_model, strategy, counts=counts, granularity=options.granularity)
    except PlanError as error:
        raise ConfigError(f"{options.strategy}: {error}") from None
    flags = flags_of(solved.token_slices)
    if costs.profile is not None or costs.calibration.num_trials:
        # Other notes of `costs` are about intervals, and there are none here.
        notes = (*notes, *costs.notes)
    if strategy.schedule == OPTIMISED:
        # The trainer then finds the same order for the same cluster and profile.
        profile = [] if options.profile is None else ["--op-profile", options.profile]
        flags += f" {shlex.join(['--cluster', options.cluster, *profile])}"
        notes = (*notes, *_unlike_the_trainer(options, problem))
    cut = replace(strategy, num_token_slices=len(solved.token_slices), token_slices=solved.token_slices)
    memory = pricing.memory(cut)
    reasons = (pricing.why_it_does_not_fit(cut, memory, headroom) for headroom in (0.0, MEMORY_HEADROOM))
    if (reason := next(filter(None, reasons), None)) is not None:
        notes = (*notes, f"with these token slices: {reason}")
    document = token_slices_document(solved, strategy, problem, flags=flags, notes=notes)
    if options.json != STANDARD_OUTPUT:
        print_cuts(document)
    write_document(options.json, document)
    return 0


def token_slices_document(
    solved: SolvedCut, strategy: Strategy, problem: SearchProblem, *, flags: str, notes: tuple[str, ...]
) -> TokenSlicesDocument:
    """Return the answer as a document; speed-ups are null if the sequence was not priced whole."""
    without_s = next((cut.iteration_time_s for cut in solved.alternatives if len(cut.token_slices) == 1), None)

    def cut(found: SolvedCut | PricedCut) -> Cut:
        time_s = found.iteration_time_s
        return Cut(
            **speed_of(problem, strategy, time_s).model_dump(),
            num_token_slices=len(found.token_slices),
            token_slices=list(found.token_slices),
            speedup=None if without_s is None else without_s / time_s,
        )

    return TokenSlicesDocument(
        **question(problem, problem.global_batch_size),
        notes=list(notes),
        strategy=strategy,
        best=cut(solved),
        curve=[cut(each) for each in solved.alternatives],
        flags=flags,
    )


def flags_of(token_slices: tuple[int, ...]) -> str:
    """Return the flags of the trainer for a cut."""
    if len(token_slices) == 1:
        return "--num-token-slices 1"
    return f"--num-token-slices {len(token_slices)} --token-slices {','.join(map(str, token_slices))}"


def _unlike_the_trainer(options: argparse.Namespace, problem: SearchProblem) -> Iterator[str]:
    """Yield how the trainer's own search for an optimised order would differ, a line each."""
    if options.device is not None and {node.device.name for node in problem.cluster.nodes} != {DEVICE}:
        yield f"the trainer takes the devices of a hostfile for {DEVICE}: give --cluster a file of nodes"
    if options.calibrate or options.calibration:
        yield "the trainer finds the order of the ops without trials: lengths are as given here"


def print_cuts(document: TokenSlicesDocument) -> None:
    """Print the curve, the flags of the best cut, and the notes."""
    table = plain_table(("token slices", "seconds", "speed-up", "lengths"), left=("lengths",))
    for cut in document.curve:
        shown = ",".join(map(str, cut.token_slices[:SHOWN])) + (",..." if len(cut.token_slices) > SHOWN else "")
        factor = "" if cut.speedup is None else f"{cut.speedup:.2f}"
        best = cut.token_slices == document.best.token_slices
        cells = str(cut.num_token_slices), f"{cut.iteration_time_s:.4g}", factor, shown
        table.add_row(*cells, style="bold" if best else "")
    print("predicted seconds of an iteration, with the best lengths for each number of token slices")
    output_console(highlight=False, markup=False).print(table)
    print(f"flags of the best: {document.flags}")
    for note in document.notes:
        print(f"note: {note}")
