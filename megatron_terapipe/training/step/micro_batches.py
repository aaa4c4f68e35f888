"""The micro-batches that a rank reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.data.samples.blended_dataset import SampleDataset
from megatron_terapipe.data.samples.loader import MicroBatchLoader
from megatron_terapipe.errors import DataError
from megatron_terapipe.training.start.run import Run


@contextmanager
def micro_batches(
    run: Run, engine: TokenSlicePipelineEngine, dataset: SampleDataset, consumed_samples: int
) -> Iterator[Iterator[Any]]:
    """Read a dataset from `consumed_samples` on, if this rank's stage reads any.

    Between the first and the last stage nothing is read, unless attention must know where documents begin.
    """
    data = run.config.data
    if not engine.reads_data:
        yield iter(())
        return
    eod = run.tokenizer.eod
    with MicroBatchLoader(
        dataset,
        run.config.batch.micro_batch_size,
        run.layout.coordinate(run.launch.rank).data,
        run.layout.data_parallel_size,
        consumed_samples,
        num_workers=data.num_workers,
        separating_eod=eod if data.separates_documents else None,
        masked_eod=eod if data.eod_mask_loss else None,
        pin_memory=get_accelerator().device_name() != "cpu",
        seq_length=run.config.model.seq_length,
    ) as loader:
        yield _named(loader, run.launch.rank)


def _named(loader: MicroBatchLoader, rank: int) -> Iterator[Any]:
    """Yield the micro-batches; an error says which rank could not read its data, as others may read other files."""
    try:
        yield from loader
    except DataError as error:
        raise DataError(f"rank {rank}: {error}") from None
