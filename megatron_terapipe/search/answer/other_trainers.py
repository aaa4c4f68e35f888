"""Other trainers for the same question: the best strategy of each, found by the same search."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from math import gcd

from megatron_terapipe.search.answer.figures import bytes_text, strategy_text, time_text
from megatron_terapipe.search.answer.json_documents import TrainerPart
from megatron_terapipe.search.answer.what_if import Question
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import ALST, FSDP, MEGATRON_CORE
from megatron_terapipe.search.price.prediction import Prediction
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM
from megatron_terapipe.search.rank.rivals import best_rival, has_rival
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

FASTER = 0.98  # seconds of another trainer, relative to the winner, up to which a note advises it


def other_trainers(asked: Question) -> Iterator[TrainerPart]:
    """Yield the best of each other trainer on all devices; of ZeRO 3 with Ulysses only for long sequences on GPUs."""
    problem, cluster = asked.problem, asked.problem.cluster
    if not all(node.device.is_gpu for node in cluster.nodes):
        return
    for software in (MEGATRON_CORE, FSDP):
        precisions = {each.precision for each in software.states}
        if software.name == problem.software.name or problem.precision not in precisions:
            continue
        theirs = asked.changed({}, software=software)
        if not software.can_run("pipeline_parallel_size", 2):
            # Each rank needs a sequence of its own.
            theirs = theirs.changed(cluster=cluster.at_most(gcd(cluster.num_devices, problem.global_batch_size)))
        result = theirs.search(effort=1.0)
        if result.entries:
            entry = result.entries[0]
            price = theirs.costs.with_interval(entry.strategy, entry.price, theirs.pricing)
            yield _part(problem, software, entry.strategy, price)
        else:
            broken = [name for name, number in result.counts.rejected.items() if number][-1:]
            rule = f"the last of its strategies break the rule '{''.join(broken)}'"
            if broken and broken[0] in (FITS, HEADROOM):
                rule = "no strategy of it fits the memory"
            yield _part(problem, software, why_not=rule)
    if has_rival(problem):
        theirs = asked.changed({}, software=ALST)
        rival = best_rival(theirs.pricing, problem.global_batch_size, headroom=problem.memory_headroom)
        if rival is not None:
            price = theirs.costs.with_interval(rival.strategy, rival.prediction, theirs.pricing)
            lacking = [f"{bytes_text(needed)} of a {at}, of {bytes_text(limit)}" for at, needed, limit in rival.lacking]
            why_not = f"it needs {' and '.join(lacking)}" if lacking else None
            yield _part(problem, ALST, rival.strategy, price, on_host=rival.on_host, why_not=why_not)


def _part(
    problem: SearchProblem,
    software: Software,
    strategy: Strategy | None = None,
    price: Prediction | None = None,
    *,
    on_host: Iterable[str] = (),
    why_not: str | None = None,
) -> TrainerPart:
    fullest = None if price is None else max(price.memory, key=lambda memory: memory.total)
    return TrainerPart(
        software=software.name,
        title=software.title,
        strategy=None if strategy is None else strategy.to_json(),
        iteration_time_s=None if price is None else price.iteration_time_s,
        interval_s=None if price is None else price.interval_s,
        memory=None if fullest is None else {**asdict(fullest), "total": fullest.total},
        on_host=list(on_host),
        why_not=why_not,
        measured_on_such_devices=problem.cluster.generations <= set(software.measured_on),
    )


def trainer_notes(trainers: Iterable[TrainerPart], problem: SearchProblem, winner_s: float | None) -> Iterator[str]:
    """Yield a line on each other trainer, and one on the trainer of the ranking if it was never measured.

    Args:
        winner_s: seconds of the first of the ranking; None = there is none.
    """
    measured = []
    for each in trainers:
        known = f"{'' if each.measured_on_such_devices else 'never '}measured on such devices"
        if each.strategy is None or each.iteration_time_s is None or each.memory is None:
            yield f"{each.title} cannot run it: {each.why_not}"
            continue
        ratio = 0.0 if winner_s is None else each.iteration_time_s / winner_s
        compared = f", {ratio:.3g} times as long as rank 1" if ratio else ""
        strategy = Strategy.from_json(each.strategy)
        ranks = strategy.world_size
        if ranks < problem.cluster.num_devices:
            compared += f", on {ranks} of the {problem.cluster.num_devices} devices"
        on_host = f"; on the host: {', '.join(each.on_host)}" if each.on_host else ""
        line = (
            f"{each.title} would take {time_text(each.iteration_time_s)}{compared}, with "
            f"{bytes_text(each.memory['total'])} of a device ({strategy_text(strategy)}{on_host}); {known}"
        )
        if each.why_not is not None:
            yield f"{line}; it does not fit, because {each.why_not}"
            continue
        measured += [each.software] if each.measured_on_such_devices else []
        advice = "train with it" if each.software == ALST.name else f"--software {each.software} ranks its strategies"
        yield f"{line}: {advice}" if ratio <= FASTER else line
    if winner_s is not None and measured and not problem.cluster.generations <= set(problem.software.measured_on):
        yield (
            f"{problem.software.title} was never measured on such devices, and {' and '.join(measured)} "
            f"{'were' if len(measured) > 1 else 'was'}: run a trial of rank 1 before it is preferred"
        )
