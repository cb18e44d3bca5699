"""Why a schema is refused."""


class SchemaError(ValueError):
    """A schema says something that is wrong, or that cannot be enforced where it has to be.

    Attributes:
        path: JSON pointer of the keyword.
        reason: why it cannot be used.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path or 'the schema'}: {reason}")
