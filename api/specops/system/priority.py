"""Priorities of threads: the event loop goes before the threads that compute.

The event loop needs a core for microseconds at a time: to admit or refuse a request, or to send a
token. With equal priorities, the loop would wait for threads that compute, or that spin until the
next pass.
"""

import logging
import os
import sys
import threading

# Added niceness. If both want a core, the event loop gets three quarters of it, at once.
_STEP = 5
log = logging.getLogger(__name__)


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts from now on.

    Only Linux has priorities of single threads; on other systems nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(
            os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _STEP
        )
    except OSError as error:
        log.warning("the engine's threads cannot get a lower priority: %s", error)
