"""Batch sizes count sequences, though several ranks may share each: what DeepSpeed counts otherwise.

DeepSpeed takes all ranks with the same weights for readers of data of their own, so that it counts every sequence once
on each sequence-parallel rank. A user's configuration, and all sizes that the engine tells, count it once:

    train_batch_size = micro-batch size x micro-batches x data-parallel size
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.module import TokenSlicePipelineModule

_TRAIN, _MICRO, _COUNT = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def for_deepspeed(settings: Mapping[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    """Return a DeepSpeed configuration whose global batch size counts sequences as DeepSpeed does.

    Raises:
        UserError: if the sizes contradict each other.
    """
    size, factors = settings.get(_TRAIN), [settings[name] for name in (_MICRO, _COUNT) if name in settings]
    if not isinstance(size, int) or not all(isinstance(each, int) and each > 0 for each in factors):
        return dict(settings)  # DeepSpeed says what is missing or wrong.
    replicas = layout.data_parallel_size
    least = prod(factors) * replicas
    fits = size == least if len(factors) == 2 else not size % least
    if not fits:
        named = " x ".join(f"{name} {settings[name]}" for name in (_MICRO, _COUNT) if name in settings)
        raise UserError(
            f"{_TRAIN} {size} does not fit {named or 'one sequence'} x data-parallel size {replicas} = {least}: "
            "change one of them; ranks that share a sequence do not count"
        )
    return {**settings, _TRAIN: size * layout.sequence_parallel_size}


class BatchSizesEngine(PipelineEngine):
    """DeepSpeed's pipeline engine, whose batch sizes count sequences. Arguments are those of `PipelineEngine`."""

    module: TokenSlicePipelineModule

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._count_sequences()
        self.tput_timer.batch_size = self.train_batch_size()

    @property
    def num_replicas(self) -> int:
        """Data-parallel size: groups of ranks that read data of their own."""
        return self.module.topology().layout.data_parallel_size

    @property
    def replica(self) -> int:
        """Number of this rank's replica: the same on all ranks that read the same data."""
        return self.module.topology().layout.coordinate(self.global_rank).data

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size, by another number of micro-batches.

        Raises:
            ValueError: if it is no multiple of the micro-batch size times the data-parallel size.
        """
        super().set_train_batch_size(train_batch_size * self.module.sequence_ranks.size)
        self._count_sequences()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size."""
        super().set_train_micro_batch_size(micro_batch_size)
        self._count_sequences()

    def deepspeed_io(
        self, dataset: Dataset, batch_size: int | None = None, route: str = ROUTE_TRAIN, **keywords: Any
    ) -> Any:
        """Return a loader of a dataset, by which all ranks of a replica read the same samples.

        Args:
            batch_size: samples of a micro-batch; None for those of training.
            route: what they are for, by DeepSpeed's names.
        """
        shared = self.module.sequence_ranks.size > 1 and not isinstance(dataset, IterableDataset)
        if shared and keywords.get("data_sampler") is None:
            keywords["data_sampler"] = self._sampler(dataset, shuffle=route == ROUTE_TRAIN)
        return super().deepspeed_io(dataset, batch_size, route, **keywords)

    def _build_data_iter(self, dataset: Dataset) -> None:
        loader = self.deepspeed_io(dataset, data_sampler=self._sampler(dataset, shuffle=False))
        self.set_dataloader(RepeatingLoader(loader))

    def _sampler(self, dataset: Dataset, *, shuffle: bool) -> DistributedSampler:
        return DistributedSampler(dataset, self.num_replicas, self.replica, shuffle=shuffle)

    def _count_sequences(self) -> None:
        self._config.train_batch_size //= self.module.sequence_ranks.size
