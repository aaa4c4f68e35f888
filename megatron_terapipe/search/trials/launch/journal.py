"""The trials file: a line is written as soon as a run is over, so that an interruption loses one run at most."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.described import cluster_document, model_document
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.trials.launch.run import Outcome, over_rounds
from megatron_terapipe.search.trials.read import read_trials
from megatron_terapipe.search.trials.trial import Trial, trial_line
from megatron_terapipe.strategy import Strategy


def explicit(strategy: Strategy, workload: Workload) -> Strategy:
    """Return a strategy with its token slices and stages written out, so that two that run the same are equal."""
    num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    return replace(
        strategy,
        token_slices=strategy.cut(workload.seq_length).lengths,
        stage_partition=tuple(workload.partition(strategy.stage_partition, num_stages).bounds),
        global_batch_size=strategy.num_micro_batches * strategy.micro_batch_size * strategy.data_parallel_size,
    )


def same_run(strategy: Strategy) -> tuple[tuple[str, Any], ...]:
    """Return a key that is equal for explicit strategies that run the same."""
    return tuple(sorted((name, str(value)) for name, value in asdict(strategy).items() if name != "placement"))


SOURCE = "terapipe-trial"


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The trials of one model on one cluster in one precision."""

    path: Path
    """The file; others' trials in it stay."""
    workload: Workload
    """The model; the trainer can build it."""
    cluster: Cluster
    precision: str
    batch: int
    """Sequences of an iteration."""

    @property
    def group(self) -> str:
        """Name of what is ranked together: model, cluster, precision, batch."""
        model = sha256(dumps(model_document(self._model), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.workload.name} ({model}) on {self.cluster.name}, {self.precision}, batch {self.batch}"

    def trials(self) -> list[Trial]:
        """Trials of this group in the file.

        Raises:
            ConfigError: if the file holds something else.
        """
        if not self.path.exists() or not self.path.read_text().strip():
            return []
        return [trial for trial in read_trials(self.path) if (trial.source, trial.group) == (SOURCE, self.group)]

    def missing(self, strategies: Iterable[Strategy], rounds: int = 1) -> Iterator[Strategy]:
        """The strategies that have not been run yet, or in too few rounds, each once.

        Args:
            rounds: number of times that each is to be run, if it was not begun with fewer.
        """
        seen = {self._key(trial.strategy): trial for trial in self.trials()}
        done = {key for key, trial in seen.items() if len(trial.round_times_s) >= min(trial.rounds, rounds)}
        done |= {key for key, trial in seen.items() if not trial.round_times_s}
        for strategy in strategies:
            key = self._key(strategy)
            if key not in done:
                done.add(key)
                yield strategy

    def begun(self, strategy: Strategy) -> tuple[str, list[Outcome]]:
        """Return the name and the runs of a strategy that was interrupted between its rounds, or "" and no runs."""
        key = self._key(strategy)
        for trial in self.trials():
            if self._key(trial.strategy) == key:
                runs = [
                    Outcome(
                        iteration_time_s=time_s,
                        peak_memory_bytes=trial.peak_memory_bytes,
                        out_of_memory=time_s is None and bool(trial.out_of_memory),
                        reason=None if time_s is not None else str(trial.ignored.get("measured.reason", "it failed")),
                    )
                    for time_s in trial.round_times_s
                ]
                return trial.id, runs
        return "", []

    def write(self, strategy: Strategy, runs: Sequence[Outcome], *, trial_id: str, rounds: int = 1) -> None:
        """Add a trial, or what came of it so far.

        Args:
            rounds: number of runs that it will have; a line after a later one replaces this.

        Raises:
            ConfigError: if the file cannot be written.
        """
        outcome = over_rounds(runs)
        more: dict[str, Any] = {} if outcome.reason is None else {"reason": outcome.reason}
        if rounds > 1:
            more |= {"rounds": rounds, "round_times_s": [each.iteration_time_s for each in runs]}
        line = trial_line(
            source=SOURCE,
            group=self.group,
            model=model_document(self._model),
            cluster=cluster_document(self.cluster.nodes, self.cluster.name or "cluster"),
            strategy=explicit(strategy, self.workload),
            software="terapipe",
            precision=self.precision,
            iteration_time_s=outcome.iteration_time_s,
            peak_memory_bytes=outcome.peak_memory_bytes,
            out_of_memory=outcome.out_of_memory,
            trial_id=trial_id,
            more=more,
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"--trials {self.path} cannot be written ({error.strerror}): name another") from None

    def _key(self, strategy: Strategy) -> tuple[tuple[str, Any], ...]:
        return same_run(explicit(strategy, self.workload))

    @property
    def _model(self) -> ModelConfig:
        assert self.workload.config is not None, "checked by the command"
        return self.workload.config
