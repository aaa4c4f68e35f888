"""How ZeRO 3 with Ulysses can be run: ranks that share a sequence, sequences at once, and what is kept on the host."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_terapipe.search.inputs.layer import Attention
from megatron_terapipe.search.inputs.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalSettings:
    """One way to run it."""

    sequence_parallel_size: int
    """Ranks that share the tokens of a sequence, and the heads of its attention."""
    data_parallel_size: int
    """Groups of such ranks, each with sequences of its own."""
    micro_batch_size: int
    """Sequences of a group at once."""
    num_micro_batches: int
    """Of each group in an iteration."""
    offloads_checkpoints: bool
    """Whether the inputs of layers are kept in the host's memory."""
    offloads_optimizer: bool
    """Whether gradients and the optimizer's state are, and the host steps."""
    offloads_weights: bool
    """Whether the ranks' parts of the weights are."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it uses, which divide the weights among themselves."""
        return self.sequence_parallel_size * self.data_parallel_size

    @property
    def num_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.data_parallel_size * self.micro_batch_size * self.num_micro_batches

    @property
    def on_host(self) -> tuple[str, ...]:
        """Names of what is kept on the host."""
        kept = {
            "checkpoints": self.offloads_checkpoints,
            "optimizer": self.offloads_optimizer,
            "weights": self.offloads_weights,
        }
        return tuple(name for name, offloads in kept.items() if offloads)


OFFLOADED = ((False, False), (True, False), (True, True))
"""Whether the optimizer is on the host, and whether the weights are; the recipes move weights last."""


def all_settings(workload: Workload, num_devices: int, global_batch_size: int) -> Iterator[RivalSettings]:
    """Yield every way to run a model on as many devices as it can use.

    A group has at most as many ranks as the attention has heads, and needs a sequence: a small batch leaves devices
    unused. Only sizes that use most of them are tried.
    """
    sizes = [
        (sequence, data)
        for sequence in _divisors(num_devices)
        if _can_share(workload, sequence)
        for data in _divisors(num_devices // sequence)
        if global_batch_size % data == 0
    ]
    most = max((sequence * data for sequence, data in sizes), default=0)
    for sequence, data in sizes:
        if sequence * data < most:
            continue
        of_group = global_batch_size // data
        for micro_batch in _divisors(of_group):
            for optimizer, weights in OFFLOADED:
                for checkpoints in (False, True):
                    yield RivalSettings(
                        sequence_parallel_size=sequence,
                        data_parallel_size=data,
                        micro_batch_size=micro_batch,
                        num_micro_batches=of_group // micro_batch,
                        offloads_checkpoints=checkpoints,
                        offloads_optimizer=optimizer,
                        offloads_weights=weights,
                    )


def _can_share(workload: Workload, ranks: int) -> bool:
    """Whether so many ranks can share a sequence: its tokens, and all heads."""
    attentions = {layer.attention for layer in workload.layers if layer.attention is not None}
    return workload.seq_length % ranks == 0 and all(_divides_heads(each, ranks) for each in attentions)


def _divides_heads(attention: Attention, ranks: int) -> bool:
    """As `UlyssesSPAttentionHF` asks for: heads of keys are copied where ranks are more."""
    keys = attention.key_value_heads
    return attention.query_heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
