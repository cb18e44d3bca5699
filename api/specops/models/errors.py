"""The errors of models that cannot be used: callers can tell bad input from a bug."""


class ModelError(RuntimeError):
    """A model cannot be prepared; the message names the cause and what to do about it."""


class ExportError(ModelError):
    """A checkpoint cannot be converted."""
