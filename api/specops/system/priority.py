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

# By which niceness rises. Where both want a core, the other gets three quarters of it, at once.
_STEP = 5
log = logging.getLogger(__name__)


def lower_priority() -> None:
    """Let the calling thread, and those that it starts from now on, go behind the process's others.

    Only Linux has priorities of single threads; elsewhere all stay alike.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(
            os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _STEP
        )
    except OSError as error:
        log.warning("the engine's threads cannot give way to the event loop: %s", error)
