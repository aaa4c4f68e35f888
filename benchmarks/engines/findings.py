"""What a measurement says, in sentences: the fastest, where others win, memory, and how quiet the machine was."""

from collections.abc import Callable, Iterator
from statistics import median

from benchmarks.engines.names import IN_TWO_THREADS, OURS, is_ours, is_rival
from benchmarks.engines.results import Document, Measured, Run

MEGABYTE = 2**20


def findings(run: Run) -> list[str]:
    """Return what a table says, a sentence or two each."""
    ours, rivals = _timed(run, is_ours), _timed(run, is_rival)
    if not (ours and rivals):
        return []
    fastest = min(*ours, *rivals, key=_median)
    return [
        _fastest(min(ours, key=_median), min(rivals, key=_median)),
        *_without_token_slices(_timed(run, lambda each: each.engine == OURS), rivals),
        _memory(min(ours, key=_fullest), min(rivals, key=_fullest)),
        *_in_two_threads(_timed(run, lambda each: each.name == IN_TWO_THREADS), fastest),
    ]


def _fastest(ours: Measured, rival: Measured) -> str:
    first, second = sorted((ours, rival), key=_median)
    others = "rivals" if first is ours else "engines of ours"
    told_apart = "" if max(first.seconds) < min(second.seconds) else "; the ranges of their rounds overlap"
    return (
        f"Fastest pipeline: *{first.name}*, {first.median_s:.3f} s. The fastest of the {others} is *{second.name}*, "
        f"{second.median_s:.3f} s: {second.median_s / first.median_s - 1:.1%} slower{told_apart}."
    )


def _without_token_slices(whole: list[Measured], rivals: list[Measured]) -> Iterator[str]:
    if whole:
        best = min(whole, key=_median)
        faster = [f"*{each.name}*" for each in rivals if each.median_s < best.median_s]
        yield (
            f"Without token slices our fastest is *{best.schedule}*, {best.median_s:.3f} s. Faster than that: "
            f"{'; '.join(faster) if faster else 'none of the rivals'}."
        )


def _memory(ours: Measured, rival: Measured) -> str:
    mine, theirs = (f"{_fullest(each) / MEGABYTE:.0f} MB (*{each.name}*)" for each in (ours, rival))
    return f"Least memory on the fuller rank: ours {mine}, rivals {theirs}."


def _in_two_threads(alone: list[Measured], fastest: Measured) -> Iterator[str]:
    for each in alone:
        yield (
            f"Plain torch in one process with two threads takes {each.median_s:.3f} s, "
            f"{each.median_s / fastest.median_s - 1:+.1%} beside the fastest pipeline."
        )


def _timed(run: Run, chosen: Callable[[Measured], bool]) -> list[Measured]:
    return [each for each in run.timed if chosen(each)]


def _median(each: Measured) -> float:
    return each.median_s


def _fullest(each: Measured) -> int:
    return max(each.peak_bytes, default=0)


def circumstances(document: Document) -> list[str]:
    """Return machine, software, and how quiet the machine was, a sentence or two each."""
    software = ", ".join(f"{name} {version}" for name, version in document.software.items())
    sizes = ", ".join(f"{name} {value}" for name, value in document.model.items())
    rounds = ", ".join(f"{run.num_rounds} with {micro_batches(run.num_micro_batches)}" for run in document.runs)
    noise = document.noise
    products = [seconds / median(noise.product_s) - 1 for seconds in noise.product_s]
    spreads = [max(each.cpu_seconds) / min(each.cpu_seconds) - 1 for run in document.runs for each in run.timed]
    return [
        f"Measured on {document.date} in {document.wall_s / 60:.0f} minutes by `{document.command}`.",
        f"{document.machine}; {software}; gloo, fp32, SGD, one thread and one core a rank.",
        f"GPT ({sizes}) on {document.num_ranks} ranks. Rounds: {rounds}.",
        f"Noise: load {noise.load_at_start:.2f} at the start. Other processes took {noise.others_share:.1%} of the "
        f"cores' time, the host of the machine {noise.steal_share:.1%}. One matrix product, repeated before each "
        f"round, took {min(products):+.1%} to {max(products):+.1%} of its median.",
        "The same step of the same engine took the processors, waiting left out, up to "
        f"{max(spreads, default=0.0):.0%} longer in one round than in another; {median(spreads or [0.0]):.0%} for the "
        "median engine. Rows that differ by less may change places in another run.",
    ]


def micro_batches(count: int) -> str:
    """Return a number of micro-batches in words."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"
