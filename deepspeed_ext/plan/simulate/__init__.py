"""Op orders simulated: the plain statement of it, and the same compiled, many times faster.

    plain      what a schedule takes, and why it deadlocks: read this one
    compiled   equal to it to the last bit, for searches; `arrays` puts orders into numbers and goes through them

Both read what ops wait for from one table, `ops.DEPENDENCIES`.
"""

from deepspeed_ext.plan.simulate.plain import (
    check_complete,
    check_order,
    check_orders,
    simulate,
    simulate_with_host_copies,
)

__all__ = ["check_complete", "check_order", "check_orders", "simulate", "simulate_with_host_copies"]
