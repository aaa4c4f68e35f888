"""Data of long sequences: seconds to order, read and prepare one sample, from short documents and from one long one.

python -m benchmarks.long_samples [--seq-length 4000000] [--document-length 40]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import DocumentCuts
from deepspeed_ext.runtime.attention.documents import DocumentAttention, Documents
from megatron_terapipe.data.gpt_dataset import GPTDataset
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.data.loader import Batch

VOCAB, END = 50257, 0
Result = TypeVar("Result")


def timed(what: str, action: Callable[[], Result]) -> Result:
    """Return the result of an action, and print its seconds."""
    start = time.perf_counter()
    result = action()
    print(f"  {what:44} {time.perf_counter() - start:8.3f} s", flush=True)
    return result


def prepare(prefix: Path, seq_length: int, token_slices: int) -> None:
    """Order, read and prepare one sample, and print what takes how long."""
    indexed = timed("open and check the index", lambda: IndexedDataset(prefix))
    documents = range(len(indexed))
    dataset = timed(
        "order of documents and samples",
        lambda: GPTDataset(indexed, documents, seq_length=seq_length, num_samples=4, seed=1, vocab_size=VOCAB),
    )
    ids = timed("read a sample", lambda: dataset[0])
    batch = timed(
        "tokens, labels, mask, documents",
        lambda: Batch.from_samples(torch.from_numpy(ids[None]), separating_eod=END, masked_eod=END),
    )
    found = Documents(batch.document_starts)
    cuts = DocumentCuts(
        seq_length=seq_length, num_token_slices=token_slices, linear_cost=24_576, attention_costs={None: 1}
    )
    cut = timed("lengths of token slices by documents", lambda: cuts.cut(batch.document_starts))
    timed("positions of all tokens", lambda: found.positions(0, seq_length))
    timed("runs of all token slices, for kernels", lambda: found.on(torch.device("meta"), TokenSlices(cut.lengths)))

    def pieces() -> int:
        return sum(
            sum(
                1 for _ in DocumentAttention(None, found, end)._pieces(torch.empty(1, end - start), torch.empty(1, end))
            )
            for start, end in cut.bounds()
        )

    number = timed("pieces of documents, for one layer on CPUs", pieces)
    print(f"  {len(batch.document_starts[0])} documents, {number} pieces in {len(cut)} token slices")


def main(argv: Sequence[str] | None = None) -> None:
    """Write data, measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4_000_000)
    parser.add_argument("--document-length", type=int, default=40, help="tokens of a short document")
    parser.add_argument("--token-slices", type=int, default=64, metavar="S")
    options = parser.parse_args(argv)
    tokens = options.seq_length * 4 + 1
    for name, length in (("short documents", options.document_length), ("one long document", tokens)):
        with TemporaryDirectory() as folder:
            prefix = Path(folder) / "corpus"
            document = np.full(length, 7, np.uint16)
            document[-1] = END
            with IndexedDatasetWriter(prefix, VOCAB) as writer:
                for _ in range(-(-tokens // length)):
                    writer.add_document(document)
            print(f"a sample of {options.seq_length:,} tokens from {name} of {length:,} tokens")
            prepare(prefix, options.seq_length, options.token_slices)


if __name__ == "__main__":
    main()
