"""The trials file: a line a run, written as soon as it is over, so that an interruption loses one run at most."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.described import cluster_document, model_document
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.trials.read import read_trials
from megatron_terapipe.search.trials.run import Outcome
from megatron_terapipe.search.trials.trial import Trial, trial_line
from megatron_terapipe.strategy import Strategy


def explicit(strategy: Strategy, workload: Workload) -> Strategy:
    """Return a strategy with its token slices and stages written out, so that two that run the same are equal.

    Args:
        strategy: the strategy.
        workload: the model.
    """
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
    """The trials of one model on one cluster in one precision.

    Attributes:
        path: the file; others' trials in it stay.
        workload: the model; the trainer can build it.
        cluster: where it runs.
        precision: of matrix products.
        batch: sequences of an iteration.
    """

    path: Path
    workload: Workload
    cluster: Cluster
    precision: str
    batch: int

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

    def missing(self, strategies: Iterable[Strategy]) -> Iterator[Strategy]:
        """The strategies that have not been run yet, each once."""
        seen = {same_run(explicit(trial.strategy, self.workload)) for trial in self.trials()}
        for strategy in strategies:
            key = same_run(explicit(strategy, self.workload))
            if key not in seen:
                seen.add(key)
                yield strategy

    def write(self, strategy: Strategy, outcome: Outcome, *, trial_id: str) -> None:
        """Add a run.

        Args:
            strategy: its strategy.
            outcome: its result.
            trial_id: its name in the file.

        Raises:
            ConfigError: if the file cannot be written.
        """
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
            more={} if outcome.reason is None else {"reason": outcome.reason},
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"--trials {self.path} cannot be written ({error.strerror}): name another") from None

    @property
    def _model(self) -> ModelConfig:
        assert self.workload.config is not None, "checked by the command"
        return self.workload.config
