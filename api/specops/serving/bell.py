"""Wakes the event loop from the engine's thread, which keeps the interpreter meanwhile.

`call_soon_threadsafe` lets other threads run while it writes to a socket. So the event loop takes
the interpreter at once, and the engine waits for all that the loop does before its next pass. Here
the loop gets the interpreter when the pass begins, and works during the pass.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_write = ctypes.PyDLL(None).write  # calls of a `PyDLL` keep the interpreter's lock
_write.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_RINGS = 4096  # that are taken at once


class Bell:
    """Has the event loop call a function.

    Args:
        loop: the event loop.
        call: called after a ring, or once after several.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call = loop, call
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        loop.add_reader(self._ends[0], self._rung)

    def ring(self) -> None:
        """Have the event loop call the function soon. Any thread; not after `close`."""
        _write(self._ends[1], b"\0", 1)

    def close(self) -> None:
        """Give the pipe back; on the event loop."""
        self._loop.remove_reader(self._ends[0])
        for end in self._ends:
            os.close(end)

    def _rung(self) -> None:
        os.read(self._ends[0], _RINGS)
        self._call()
