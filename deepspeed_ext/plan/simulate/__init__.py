"""Simulation of op orders: in plain Python, and compiled, many times faster.

    plain      the time of a schedule, or the reason why it deadlocks: read this one
    compiled   equal to it to the last bit, for searches; `arrays` puts orders into numbers and goes through them

Both read the dependencies of ops from one table, `ops.DEPENDENCIES`.
"""

from deepspeed_ext.plan.simulate.plain import (
    check_complete,
    check_order,
    check_orders,
    simulate,
    simulate_with_host_copies,
)

__all__ = ["check_complete", "check_order", "check_orders", "simulate", "simulate_with_host_copies"]
