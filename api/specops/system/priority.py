"""Which threads go first where they share the cores: the event loop, then those that compute.

The loop needs a core for microseconds at a time, to take a request in, to refuse one, to send a
token on. Threads that compute, or spin in wait for the next pass, would make it queue behind them
like one of their own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

# Where both want a core, one at 0 gets three quarters of it and is let in at once.
_NICE = 5
log = logging.getLogger(__name__)


def lower_priority() -> None:
    """Let the calling thread, and those that it starts from now on, go behind the others.

    Only Linux has priorities of single threads; elsewhere all stay alike.
    """
    if sys.platform != "linux":
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError as error:
        log.warning("the engine's threads cannot give way to the event loop: %s", error)
