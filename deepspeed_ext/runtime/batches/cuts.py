"""How the micro-batches of a batch are cut into token slices: all alike, or each by its documents (ADR 51)."""

from collections.abc import Callable

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.sequence.documents import Documents
from deepspeed_ext.runtime.sequence.sequence_ranks import SequenceParallelRanks

CutByDocuments = Callable[[Documents], TokenSlices]
"""Lengths of the token slices of a micro-batch, given its documents: of them alone, so that all ranks cut alike."""


class Cuts:
    """Cuts of the micro-batches of one batch, and this rank's part of each token slice.

    Args:
        token_slices: lengths of the token slices; of micro-batches that are cut by their documents, how many these are
            and what they sum to.
        ranks: ranks that share each token slice.
        by_documents: gives the lengths of a micro-batch; None if all have those of `token_slices`.

    Raises:
        PlanError: if the ranks cannot share a token slice evenly.
    """

    def __init__(
        self, token_slices: TokenSlices, ranks: SequenceParallelRanks, by_documents: CutByDocuments | None = None
    ) -> None:
        self.token_slices, self.ranks, self._by_documents = token_slices, ranks, by_documents
        self._parts = ranks.parts(token_slices)
        self._known: dict[int, tuple[TokenSlices, TokenSlices]] = {}

    def cut(self, micro_batch: int, documents: Documents | None) -> None:
        """Cut a micro-batch, before anything else is done with it.

        Args:
            documents: its documents; None where they are not told apart.

        Raises:
            PlanError: if the ranks cannot share a token slice evenly.
            UserError: if the cut does not fit the schedule or the data.
        """
        if documents is None or self._by_documents is None:
            return
        cut, like = self._by_documents(documents), self.token_slices
        if len(cut) != len(like) or cut.seq_length != like.seq_length:
            raise UserError(
                f"cut_by_documents gave {len(cut)} token slices of {cut.seq_length} tokens ({cut}), and the module has "
                f"{len(like)} of {like.seq_length}: give as many"
            )
        self._known[micro_batch] = cut, self.ranks.parts(cut)

    def of(self, micro_batch: int) -> TokenSlices:
        """Return the lengths of the token slices of a micro-batch."""
        return self._known.get(micro_batch, (self.token_slices,))[0]

    def parts_of(self, micro_batch: int) -> TokenSlices:
        """Return the part of each of its token slices that this rank has."""
        return self._known[micro_batch][1] if micro_batch in self._known else self._parts
