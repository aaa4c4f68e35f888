"""The places where DeepSpeed keeps weights and optimizer state, for each of its optimizers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine


def is_partitioned(engine: TokenSlicePipelineEngine) -> bool:
    """Whether DeepSpeed deals flat groups of parameters to the data-parallel ranks: under ZeRO 1, and in bf16."""
    return not isinstance(engine.optimizer, torch.optim.Optimizer)


def own_elements(engine: TokenSlicePipelineEngine, parameter: nn.Parameter) -> range:
    """Return the elements of a flattened parameter that this rank's optimizer works on: all, a fragment, or none."""
    if not is_partitioned(engine):
        return range(parameter.numel())
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return range(0)
    address = mapping.lp_fragment_address
    return range(address.start, address.start + address.numel)


class Destination:
    """The place where an engine keeps weights and the state of its optimizer.

    An optimizer of torch works on the parameters themselves. In DeepSpeed's flat groups this rank has a fragment of
    each parameter in fp32, or none.
    """

    def __init__(self, engine: TokenSlicePipelineEngine) -> None:
        self._engine, self._partitioned = engine, is_partitioned(engine)
        self._optimizer = engine.optimizer.optimizer if self._partitioned else engine.optimizer
        self._tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        self._numbers = {tensor: number for number, tensor in enumerate(self._tensors)}
        self._states: dict[int, dict[str, Any]] = {}

    def set_weight(self, parameter: nn.Parameter, weight: Tensor, own: Tensor | None) -> None:
        """Set a parameter, in the model's precision and in the optimizer's.

        Args:
            weight: [...], in the shape of the parameter.
            own: [elements] that the optimizer works on, in higher precision; None if `weight` is exact.
        """
        if not self._partitioned:
            parameter.data.copy_(weight if own is None else own.view(weight.shape))
            return
        parameter.data.copy_(weight)
        if elements := own_elements(self._engine, parameter):
            exact = weight.reshape(-1)[elements.start : elements.stop] if own is None else own
            parameter._hp_mapping.hp_fragment.data.copy_(exact)

    def set_state(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: float | None) -> None:
        """Set the optimizer's state of the elements of a parameter that this rank's optimizer works on.

        Args:
            moments: tensors by name, such as `exp_avg`: [elements].
            step: updates done; None where the rule does not count them.
        """
        if not self._partitioned:
            # Cloned, because the optimizer would update the pages of the file.
            state = {key: moment.view(parameter.shape).clone() for key, moment in moments.items()}
            self._states[self._numbers[parameter]] = state | self._counted(step)
            return
        mapping = parameter._hp_mapping
        # A group has one flat tensor.
        group, address = mapping.param_group_index, mapping.get_hp_fragment_address()
        state = self._states.setdefault(group, self._counted(step))
        for key, moment in moments.items():
            if key not in state:
                state[key] = torch.zeros_like(self._tensors[group], requires_grad=False)
            state[key].narrow(0, address.start, address.numel).copy_(moment)

    def finish(self) -> None:
        """Hand the optimizer the states that were set. The settings of its groups are still the flags' ones."""
        groups = self._optimizer.state_dict()["param_groups"]
        for group in groups:
            numbers = (number for number in group["params"] if number in self._states)
            step = next((self._states[number].get("step") for number in numbers), None)
            if isinstance(step, int):  # fused optimizers count for the whole group
                group["step"] = step
        self._optimizer.load_state_dict({"state": dict(self._states), "param_groups": groups})

    def _counted(self, step: float | None) -> dict[str, Any]:
        """Return the updates done, as the optimizer counts them: torch's in tensors, all others in whole numbers."""
        if step is None:
            return {}
        rules = [rule for rule in type(self._optimizer).__mro__ if rule.__module__.startswith("torch.optim.")]
        # The last is torch's class of all optimizers.
        return {"step": torch.tensor(step) if len(rules) > 1 else int(step)}
