"""Measured kernels for the devices of a cluster, as the flag `--tables` asks for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster import Cluster, Device
from megatron_terapipe.search.cost.op_times import LayerTimes, OpTimes
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.cost.roofline import Roofline
from megatron_terapipe.search.cost.tables import measured_tables, why_no_tables
from megatron_terapipe.search.software import TERAPIPE
from megatron_terapipe.search.workload import Layer


@dataclass(frozen=True)
class TablesByDevice:
    """Op times of several kinds of devices; an `OpTimes`.

    Attributes:
        by_name: of each kind, by the name of the device.
    """

    by_name: Mapping[str, OpTimes]

    @property
    def includes_collectives(self) -> bool:
        """Reductions are priced elsewhere, by the links that they cross."""
        return False

    def __call__(self, layer: Layer, device: Device, **sizes: Any) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        return self.by_name[device.name](layer, device, **sizes)


def tables_of(cluster: Cluster, precision: str, physics: Physics | None) -> tuple[TablesByDevice, tuple[str, ...]]:
    """Read the tables of all devices of a cluster; kinds without any keep the formulas, and a note says so.

    Args:
        cluster: whose devices.
        precision: of matrix products.
        physics: of all that is not in the tables; None = the defaults.

    Raises:
        ConfigError: if there are tables of none of the devices.
    """
    if precision == "fp32":
        raise ConfigError("--tables hold products in half precision alone: drop it, or give --precision bf16")
    physics = physics or Physics()
    by_name: dict[str, OpTimes] = {}
    missing = []
    for name in sorted({node.device.name for node in cluster.nodes}):
        found = measured_tables(name, physics=physics)
        if found is None:
            missing.append(why_no_tables(name))
        by_name[name] = found or Roofline(physics, TERAPIPE, precision)
    if len(missing) == len(by_name):
        raise ConfigError(f"--tables: {missing[0]} without the flag")
    return TablesByDevice(by_name), tuple(missing)
