"""Checkpoints of Megatron-LM as checkpoints of one rank, of which each tensor is read when it is used.

Weights have the layout of ours under other names, so that a run of any layout takes its parts of them.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from megatron_terapipe.checkpoint.megatron_files import WEIGHT_OF_OPTIMIZER, MegatronFiles, open_files
from megatron_terapipe.checkpoint.megatron_model import MEGATRON
from megatron_terapipe.checkpoint.optimizer_state import ParameterState, SavedRun
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.folder_weights import FolderWeights


class _Tensors:
    """The tensors of a model as `FolderWeights` reads them: without the rows that pad the vocabulary.

    Args:
        state: of the optimizer, in place of the weights; None for the weights.
    """

    def __init__(self, files: MegatronFiles, model: ModelConfig, state: str | None) -> None:
        names = MEGATRON.names(model)
        self._files, self._words, self._state = files, model.vocab_size, state
        self._vocabulary = (names.words, names.output)
        self.names = files.names

    def read(self, name: str) -> Tensor:
        """Return a tensor [...]."""
        return self._files.read(name, self._state)[self._rows(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        first, *rest = self._files.shape(name)
        return (len(range(first)[self._rows(name)]), *rest)

    def _rows(self, name: str) -> slice:
        return slice(self._words if name.startswith(self._vocabulary) else None)


class MegatronWeights(FolderWeights):
    """The weights of a checkpoint, and the states of its optimizer.

    A weight is the optimizer's, in fp32, where that has one of its own: the model's is this, rounded.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self._files = files = open_files(directory)
        own = WEIGHT_OF_OPTIMIZER if WEIGHT_OF_OPTIMIZER in files.states else None
        super().__init__(directory, MEGATRON, model, _Tensors(files, model, own))
        self._moments = {
            state: FolderWeights(directory, MEGATRON, model, _Tensors(files, model, state))
            for state in sorted(files.states - {WEIGHT_OF_OPTIMIZER})
        }

    def moments(self, index: int, name: str) -> dict[str, Tensor]:
        """Return the states of the optimizer of a weight of a pipeline layer, by name and in its shape [...]."""
        return {state: weights.weight(index, name) for state, weights in self._moments.items()}

    @property
    def step(self) -> float | None:
        """Updates done by the optimizer; None if it does not count them."""
        return self._files.step

    def of(self, name: str, tensor_parallel_rank: int, elements: range) -> ParameterState:
        """Return the optimizer's state of some elements of a parameter, by its name in the engine."""
        first, _, rest = name.partition(".")
        # The only tied layers are the word embedding and the output layer.
        index, in_layer = (int(first), rest) if first.isdecimal() else (0, rest.partition(".")[2])
        moments = self.moments(index, in_layer).items()
        return ParameterState(
            weight=None,
            moments={state: each.flatten()[elements.start : elements.stop] for state, each in moments},
            step=self.step,
        )

    def run(self) -> SavedRun:
        """Return the counters of the run, and the loss scale if it was in fp16."""
        optimizer = self._files.common.get("optimizer")
        scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
        return SavedRun(
            places={},
            counters={"global_steps": self._files.iteration, "skipped_steps": 0},
            loss_scaler=SimpleNamespace(cur_scale=float(scaler["scale"])) if scaler else None,
        )

    def check_states(self) -> None:
        """Check that the optimizer's states can be read."""
        if not self._moments:
            raise CheckpointError(
                f"checkpoint {self._directory} of Megatron-LM has no state of the optimizer that can be read: "
                f"{self._files.no_states}; load only the weights, with --no-load-optim or --finetune"
            )
