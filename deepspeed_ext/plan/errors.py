"""Errors of people and of plans."""

__all__ = ["PlanError", "ScheduleDeadlock", "UserError"]

MOST_CHARACTERS = 2000
"""Characters of a message at most: a value of a million digits does not fit on a screen."""


class UserError(ValueError):
    """Bad input from outside: one line that names the value, the rule and the remedy.

    Every command prints it as `error: ...` and exits with code 2. Our own invariants are `assert`s instead. Messages
    quote values of users, which may contain line breaks, codes of terminals or half a character; here, in one place
    for all messages, it becomes a line that can be printed.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class PlanError(UserError):
    """A layout, a cut into token slices, an op or a schedule that breaks a rule of the plan."""


class ScheduleDeadlock(PlanError):
    """An order of ops in which every stage that is not done waits for another."""


def one_line(message: str) -> str:
    r"""Return a message as one line of printable characters, its middle left out if it is very long.

    Other characters are written as in Python's strings: a line break becomes `\n`.
    """
    if not message.isprintable():
        message = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in message)
    if len(message) <= MOST_CHARACTERS:
        return message
    end = MOST_CHARACTERS // 4  # The remedy, which comes last.
    left_out = f" ... ({len(message) - MOST_CHARACTERS} characters left out) ... "
    return message[: MOST_CHARACTERS - end] + left_out + message[-end:]
