"""Checkpoints of Megatron-LM as checkpoints of one rank, of which each tensor is read when it is used.

Weights have the layout of ours under other names, so that a run of any layout takes its parts of them.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_terapipe.checkpoint.megatron_files import WEIGHT_OF_OPTIMIZER, MegatronFiles, Tensors
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, NAMES, unreadable
from megatron_terapipe.checkpoint.optimizer_state import PARAMETER_NAMES, ParameterState, SavedRun
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.folder_weights import FolderWeights


class _Tensors:
    """Tensors as `FolderWeights` reads them: without the rows that pad the vocabulary."""

    def __init__(self, directory: Path, tensors: Tensors, model: ModelConfig) -> None:
        self._directory, self._tensors, self._words = directory, tensors, model.vocab_size
        self.names = frozenset(tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor [...]."""
        try:
            return self._tensors[name].read()[self._rows(name)]
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise unreadable(self._directory, error) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        first, *rest = self._tensors[name].shape
        return (len(range(first)[self._rows(name)]), *rest)

    def _rows(self, name: str) -> slice:
        return slice(self._words if name.startswith((NAMES.words, NAMES.output)) else None)


class MegatronWeights(FolderWeights):
    """The weights of a checkpoint, and the states of its optimizer.

    A weight is the optimizer's, in fp32, where that has one of its own: the model's is this, rounded.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self._files = files = MegatronFiles(directory)
        found = files.weights | files.states.get(WEIGHT_OF_OPTIMIZER, {})
        super().__init__(directory, MEGATRON, model, _Tensors(directory, found, model))
        moments = {state: tensors for state, tensors in files.states.items() if state != WEIGHT_OF_OPTIMIZER}
        self.no_states = None if moments else files.no_states
        """Why no state of the optimizer can be read; None if it can."""
        for state, tensors in moments.items():
            for name in self._spelled.values():
                if name.endswith(NAMES.router_bias):
                    continue  # No optimizer works on it.
                if name not in tensors or tensors[name].shape != found[name].shape:
                    self.no_states = f"{state} of {name} is missing or has another shape"
        self._moments = {
            state: FolderWeights(directory, MEGATRON, model, _Tensors(directory, tensors, model))
            for state, tensors in moments.items()
        }
        # A run reads one parameter several times, in parts and whole, before the next.
        self._weight = lru_cache(maxsize=1)(super().weight)
        self._state = lru_cache(maxsize=1)(self._read_state)

    def weight(self, index: int, name: str, tensor_parallel_rank: int = 0) -> Tensor:
        """Return a weight [...] of a pipeline layer, whole: the rank is always 0."""
        return self._weight(index, name)

    def of(self, name: str, tensor_parallel_rank: int, elements: range) -> ParameterState:
        """Return the optimizer's state of some elements of a parameter, by its name in the engine."""
        moments = {state: each.flatten()[elements.start : elements.stop] for state, each in self._state(name).items()}
        return ParameterState(weight=None, moments=moments, step=self._files.step)

    def _read_state(self, name: str) -> dict[str, Tensor]:
        """The states of a parameter by name, in its shape [...]."""
        first, _, rest = name.partition(".")
        # The only tied layers are the word embedding and the output layer.
        index, in_layer = (int(first), rest) if first.isdecimal() else (0, rest.partition(".")[2])
        return {state: weights.weight(index, in_layer) for state, weights in self._moments.items()}

    def run(self) -> SavedRun:
        """Return the counters of the run, and the loss scale if it was in fp16."""
        optimizer = self._files.common.get("optimizer")
        scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
        scale = scaler.get("scale") if isinstance(scaler, Mapping) else None
        restored = SimpleNamespace(cur_scale=float(scale)) if isinstance(scale, int | float | Tensor) else None
        return SavedRun(places={}, counters=self._counters, loss_scaler=restored)

    def state_of(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the content of a file of ours with the optimizer's state of some parameters."""
        step = {} if self._files.step is None else {"step": torch.tensor(self._files.step)}
        states = {number: self._state(name) | step for number, name in enumerate(names)}
        optimizer = {"param_groups": [{"params": list(states)}], "state": states}
        return {"optimizer": optimizer, PARAMETER_NAMES: [list(names)], **self._counters}

    @property
    def _counters(self) -> dict[str, int]:
        return {"global_steps": self._files.iteration, "skipped_steps": 0}

    def check_states(self) -> None:
        """Check that the optimizer's states can be read."""
        if self.no_states:
            raise CheckpointError(
                f"checkpoint {self._directory} of Megatron-LM has no state of the optimizer that can be read: "
                f"{self.no_states}; load only the weights, with --no-load-optim or --finetune"
            )
