"""Loads of experts, read from the layers before each line of the log with iterations."""

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.training.records import STARVED_FOR, ExpertLoads, latest_loads, starved_text
from megatron_terapipe.training.reporters import Reporters


class ExpertWatch:
    """Reports the loads of experts and the losses of routers, and each expert once that begins to be starved."""

    def __init__(self, model: ModelConfig, engine: TokenSlicePipelineEngine, report: Reporters) -> None:
        self._model, self._engine, self._report = model, engine, report
        self._layers = tuple(number for number, block in enumerate(model.blocks) if block.num_experts)
        self._recent: list[ExpertLoads] = []
        self._starved: set[tuple[int, int]] = set()
        self._next_check = 0

    def read(self, iteration: int) -> None:
        """Report the loads since the previous call; a collective operation of all ranks, and the host waits."""
        steps, counts, values = self._engine.take_tally()
        of_layers = [LAYERS_BEFORE_BLOCKS + number for number in self._layers]
        shares = counts[of_layers] / counts[of_layers].double().mean(1, keepdim=True)
        loads = ExpertLoads(
            iteration=iteration,
            iterations=steps,
            layers=self._layers,
            loads=tuple(tuple(round(load, 4) for load in of_layer) for of_layer in shares.tolist()),
            losses=dict(zip(self._model.router_losses, values[of_layers].mean(0).tolist(), strict=True)),
        )
        self._report(loads)
        self._recent = [*self._recent[-STARVED_FOR:], loads]
        if iteration < self._next_check:  # Means of many lines take long.
            return
        self._next_check = iteration + STARVED_FOR // 10
        latest = latest_loads(self._recent)
        assert latest is not None, "has a line"
        starved = {(layer, expert) for _, layer, expert in latest.starved}
        if starved - self._starved:
            self._report.note(f" warning: {starved_text(latest)}")
        self._starved = starved
