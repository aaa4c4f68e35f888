"""Errors of people and of plans."""


class UserError(ValueError):
    """Bad input from outside: one line that names the value, the rule and the remedy.

    Every command prints it as `error: ...` and exits with code 2. Our own invariants are `assert`s instead.
    """


class PlanError(UserError):
    """A layout, a cut into token slices, an op or a schedule that breaks a rule of the plan."""


class ScheduleDeadlock(PlanError):
    """An order of ops in which every stage that is not done waits for another."""
