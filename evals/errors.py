"""The one error that the evaluations raise for bad input; the command line prints it as a line and exits 2."""


class EvalError(ValueError):
    """An evaluation was asked for something impossible: the message says where, what came, and what to do."""
