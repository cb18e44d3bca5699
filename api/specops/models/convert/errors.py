"""The one error of the exporter, so that a caller can tell bad input from a bug."""


class ExportError(Exception):
    """A checkpoint cannot be exported; the message names the culprit and what to do about it."""
