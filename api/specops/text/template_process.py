"""Renders chat templates in a separate process, which runs `template_worker`."""

import atexit
from collections.abc import Mapping
from typing import Any

from specops.text.confined_process import ConfinedProcess


class TemplateProcess(ConfinedProcess):
    """Renders templates, one after the other. Thread-safe."""

    worker = "specops.text.template_worker"
    what = "chat templates"
    seconds = 1.0  # a template takes milliseconds
    clock_seconds = 5.0

    def compile(self, source: str, names: Mapping[str, str]) -> None:
        """Check that a template can be used.

        Raises:
            ProgramRefusal, ProgramLimitExceeded, ProgramProcessError: see `render`.
        """
        self.run({"source": source, "names": dict(names), "values": None})

    def render(self, source: str, names: Mapping[str, str], values: Mapping[str, Any]) -> str:
        """Return the prompt that a template writes.

        Args:
            source: the template, in Jinja.
            names: variables of all its renderings, such as `bos_token`, with their texts.
            values: variables of this rendering, of JSON's types.

        Raises:
            ProgramRefusal: the template is not Jinja, or raises an error.
            ProgramLimitExceeded: the template takes too much time or memory.
            ProgramProcessError: no process could render it; a second try may succeed.
        """
        return self.run({"source": source, "names": dict(names), "values": dict(values)})


SHARED = TemplateProcess()
"""This program's process for templates."""
atexit.register(SHARED.close)
