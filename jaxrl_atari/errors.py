"""Errors that a user can put right: each is one line, and the command line prints it and exits with status 2."""


class UserError(Exception):
    """Something the user can correct. The message is one line that says what is wrong and what to do.

    A program catches it at its top, prints the message to stderr and exits with `exit_status`; any other
    exception is a bug of ours and keeps its traceback.
    """

    exit_status = 2

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class ConfigError(UserError, ValueError):
    """A config field with a value that cannot be used.

    Args:
      field: the dotted name of the field, such as ``ppo.gae_lambda``.
      value: what it was set to.
      expected: what it may be, completing "expected ...".
      hint: what to do, if more can be said than ``expected`` says.
    """

    def __init__(self, field: str, value: object, expected: str, hint: str = ""):
        self.field = field
        self.value = value
        self.expected = expected
        self.hint = hint
        super().__init__(f"{field} = {value!r}: expected {expected}" + (f"; {hint}" if hint else ""))

    def __reduce__(self):
        # A session may run in another process: exceptions cross it by pickle, which calls type(*args).
        return type(self), (self.field, self.value, self.expected, self.hint)


class SessionsFailed(UserError):
    """Some sessions of a trial failed, and the others have finished."""

    exit_status = 1
