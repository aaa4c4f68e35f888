"""Costs of ops and transfers: tables of times, given, read from a file, or computed from the share of attention."""

from deepspeed_ext.plan.costs.op_costs import OpCosts, Table
from deepspeed_ext.plan.costs.transfer_costs import TransferCosts

__all__ = ["OpCosts", "Table", "TransferCosts", "attention_costs"]
