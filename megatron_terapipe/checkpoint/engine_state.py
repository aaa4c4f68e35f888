"""The places where DeepSpeed keeps weights and optimizer state, for each of its optimizers."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine


class Destination(Protocol):
    """The place where an engine keeps weights and the state of its optimizer."""

    def elements(self, parameter: nn.Parameter) -> range:
        """Elements of a flattened parameter that this rank's optimizer works on."""

    def set_weight(self, parameter: nn.Parameter, weight: Tensor, own: Tensor | None) -> None:
        """Set a parameter, in the model's precision and in the optimizer's.

        Args:
            weight: [...], in the shape of the parameter.
            own: [elements] that the optimizer works on, in higher precision; None if `weight` is exact.
        """

    def set_state(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: float | None) -> None:
        """Set the optimizer's state of the elements of a parameter that this rank's optimizer works on.

        Args:
            moments: tensors by name, such as `exp_avg`: [elements].
            step: updates done; None where the rule does not count them.
        """

    def finish(self) -> None:
        """Hand the optimizer the states that were set."""


def destination_of(engine: TokenSlicePipelineEngine) -> Destination:
    """The place where an engine keeps weights and the state of its optimizer."""
    return _Partitions(engine.optimizer.optimizer) if is_partitioned(engine) else _Whole(engine.optimizer)


def is_partitioned(engine: TokenSlicePipelineEngine) -> bool:
    """Whether DeepSpeed deals flat groups of parameters to the data-parallel ranks: under ZeRO 1, and in bf16."""
    return not isinstance(engine.optimizer, torch.optim.Optimizer)


class _Whole:
    """An optimizer of torch over the parameters themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._states: dict[int, dict[str, Any]] = {}

    def elements(self, parameter: nn.Parameter) -> range:
        """All elements."""
        return range(parameter.numel())

    def set_weight(self, parameter: nn.Parameter, weight: Tensor, own: Tensor | None) -> None:
        """Set a parameter."""
        parameter.data.copy_(weight if own is None else own.view(weight.shape))

    def set_state(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: float | None) -> None:
        """Set what the optimizer knows of a parameter."""
        # Cloned, because the optimizer would go on in the pages of the file.
        state = {key: moment.view(parameter.shape).clone() for key, moment in moments.items()}
        self._states[self._numbers[parameter]] = state | _steps(step, self._optimizer)

    def finish(self) -> None:
        """Hand the optimizer the states that were set."""
        _load(self._optimizer, self._states)


class _Partitions:
    """DeepSpeed's flat groups: of each parameter this rank has a fragment in fp32, or none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._flat = [group["params"][0] for group in optimizer.param_groups]
        self._states: dict[int, dict[str, Any]] = {}

    def elements(self, parameter: nn.Parameter) -> range:
        """Elements of a parameter that are in this rank's fragment."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return range(0)
        address = mapping.lp_fragment_address
        return range(address.start, address.start + address.numel)

    def set_weight(self, parameter: nn.Parameter, weight: Tensor, own: Tensor | None) -> None:
        """Set a parameter, and this rank's fragment of it."""
        parameter.data.copy_(weight)
        if elements := self.elements(parameter):
            exact = weight.reshape(-1)[elements.start : elements.stop] if own is None else own
            parameter._hp_mapping.hp_fragment.data.copy_(exact)

    def set_state(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: float | None) -> None:
        """Set this rank's fragment of what the optimizer knows of a parameter."""
        mapping = parameter._hp_mapping
        flat, address = self._flat[mapping.param_group_index], mapping.get_hp_fragment_address()
        state = self._states.setdefault(mapping.param_group_index, _steps(step, self._optimizer))
        for key, moment in moments.items():
            if key not in state:
                state[key] = torch.zeros_like(flat, requires_grad=False)
            state[key].narrow(0, address.start, address.numel).copy_(moment)

    def finish(self) -> None:
        """Hand the optimizer the states that were set."""
        _load(self._optimizer, self._states)


def _steps(step: float | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The updates done, as an optimizer counts them: torch's in tensors, all others in whole numbers."""
    if step is None:
        return {}
    rules = [rule for rule in type(optimizer).__mro__ if rule.__module__.startswith("torch.optim.")]
    # The last is torch's class of all optimizers.
    return {"step": torch.tensor(step) if len(rules) > 1 else int(step)}


def _load(optimizer: torch.optim.Optimizer, states: Mapping[int, dict[str, Any]]) -> None:
    """Give an optimizer its states by the numbers of its parameters. What the flags say of the groups stays."""
    groups = optimizer.state_dict()["param_groups"]
    for group in groups:
        step = next((states[number].get("step") for number in group["params"] if number in states), None)
        if isinstance(step, int):  # fused optimizers count for the whole group
            group["step"] = step
    optimizer.load_state_dict({"state": dict(states), "param_groups": groups})
