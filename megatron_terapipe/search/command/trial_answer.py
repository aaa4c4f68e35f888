"""What trials say: measurements beside predictions, before and after these were learned from."""

from collections.abc import Sequence

import numpy as np

from megatron_terapipe.search.command.costs import Costs
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.report.documents import predicted_part, question
from megatron_terapipe.search.report.figures import speed_of, strategy_text
from megatron_terapipe.search.report.schema.schema import Errors, Predicted, TrialDocument, TrialEntry
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.search.trials import scores
from megatron_terapipe.search.trials.launch.journal import Journal
from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.strategy import Strategy


def trial_document(journal: Journal, costs: Costs, notes: Sequence[str]) -> TrialDocument:
    """Return the answer of `trial` as a document.

    Raises:
        ConfigError: if nothing can be learned from the trials.
    """
    trials = journal.trials()
    measured = [trial for trial in trials if trial.iteration_time_s is not None]
    # What a search with --calibrate on this file predicts.
    calibrated = costs.calibrated_on(trials) if measured else None
    entries = [
        TrialEntry(
            trial_id=trial.id,
            strategy=trial.strategy.to_json(),
            iteration_time_s=trial.iteration_time_s,
            peak_memory_bytes=trial.peak_memory_bytes,
            out_of_memory=trial.out_of_memory,
            predicted=_predicted(trial, journal, costs),
            calibrated=None if calibrated is None else _predicted(trial, journal, calibrated),
        )
        for trial in trials
    ]
    asked = question(
        journal.workload,
        journal.cluster,
        precision=journal.precision,
        software=TERAPIPE.name,
        global_batch_size=journal.batch,
    )
    done = [(entry.iteration_time_s, entry) for entry in entries if entry.iteration_time_s is not None]
    return TrialDocument(
        **asked,
        notes=list(notes),
        trials=str(journal.path),
        entries=entries,
        errors=_errors([(time_s, entry.predicted) for time_s, entry in done]),
        errors_calibrated=_errors([(time_s, entry.calibrated) for time_s, entry in done if entry.calibrated]),
    )


def print_trials(document: TrialDocument) -> None:
    """Print the trials, fastest first, and the errors of their predictions."""
    measured = [(entry.iteration_time_s, entry) for entry in document.entries if entry.iteration_time_s is not None]
    if not measured:
        print("nothing was measured")
        return
    print(f"\n{'measured s':>10}  {'before':>16}  {'calibrated':>16}  strategy")
    for time_s, entry in sorted(measured, key=lambda each: each[0]):
        cells = [_beside(time_s, predicted) for predicted in (entry.predicted, entry.calibrated)]
        print(f"{time_s:>10.4g}  {cells[0]:>16}  {cells[1]:>16}  {strategy_text(Strategy.from_json(entry.strategy))}")
    for name, errors in (("before", document.errors), ("calibrated on them", document.errors_calibrated)):
        if errors is not None:
            print(f"{name}: {_in_words(errors)}")
    print(f"{document.trials} has {len(document.entries)} trials of this question")


def _predicted(trial: Trial, journal: Journal, costs: Costs) -> Predicted:
    pricing: Pricing = costs.pricing_on(journal.cluster)
    prediction = costs.with_interval(trial.strategy, pricing.predict(trial.strategy), pricing)
    time_s = prediction.iteration_time_s
    return predicted_part(
        prediction, speed_of(trial.strategy, journal.workload, journal.cluster, time_s, journal.precision)
    )


def _errors(pairs: Sequence[tuple[float, Predicted]]) -> Errors | None:
    """Return the errors of predictions of measured seconds; None for nothing."""
    measured = np.array([time_s for time_s, _ in pairs])
    predicted = np.array([each.iteration_time_s for _, each in pairs])
    mean_error = scores.mape(measured, predicted)
    if mean_error is None:
        return None
    return Errors(
        mean_error=mean_error,
        spearman=scores.spearman((measured, predicted)),
        top1_regret=scores.top1_regret((measured, predicted)),
    )


def _in_words(errors: Errors) -> str:
    words = [f"mean error {errors.mean_error:.1%}"]
    if errors.spearman is not None:
        words.append(f"Spearman {errors.spearman:.2f}")
    if errors.top1_regret is not None:
        words.append(f"the one predicted best is {errors.top1_regret:.1%} slower than the best")
    return ", ".join(words)


def _beside(measured_s: float, predicted: Predicted | None) -> str:
    if predicted is None:
        return ""
    return f"{predicted.iteration_time_s:.4g} ({predicted.iteration_time_s / measured_s - 1:+.0%})"
