"""The one error of the converter: callers can tell bad input from a bug."""


class ExportError(Exception):
    """A checkpoint cannot be exported; the message names the cause and what to do about it."""
