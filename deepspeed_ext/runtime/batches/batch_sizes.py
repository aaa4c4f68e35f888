"""Batch sizes count sequences, though several ranks may share each: what DeepSpeed counts otherwise.

DeepSpeed takes all ranks with the same weights for readers of data of their own, so that it counts every sequence once
on each sequence-parallel rank. A user's configuration, and all sizes that the engine tells, count it once:

    train_batch_size = micro-batch size x micro-batches x data-parallel size
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed_ext.runtime.module import TokenSlicePipelineModule

TRAIN_BATCH_SIZE = "train_batch_size"


def for_deepspeed(settings: Mapping[str, Any], sequence_parallel_size: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration whose global batch size counts sequences as DeepSpeed does.

    Args:
        settings: the user's configuration.
        sequence_parallel_size: ranks that share each sequence.
    """
    size = settings.get(TRAIN_BATCH_SIZE)
    counted = {TRAIN_BATCH_SIZE: size * sequence_parallel_size} if isinstance(size, int) else {}
    return {**settings, **counted}


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

        Args:
            train_batch_size: sequences of a step.

        Raises:
            ValueError: if it is no multiple of the micro-batch size times the data-parallel size.
        """
        super().set_train_batch_size(train_batch_size * self.module.sequence_ranks.size)
        self._count_sequences()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size.

        Args:
            micro_batch_size: sequences of a micro-batch.
        """
        super().set_train_micro_batch_size(micro_batch_size)
        self._count_sequences()

    def deepspeed_io(
        self, dataset: Dataset, batch_size: int | None = None, route: str = ROUTE_TRAIN, **keywords: Any
    ) -> Any:
        """Return a loader of a dataset, by which all ranks of a replica read the same samples.

        Args:
            dataset: the samples.
            batch_size: samples of a micro-batch; None for those of training.
            route: what they are for, by DeepSpeed's names.
            **keywords: others of DeepSpeed's.
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
