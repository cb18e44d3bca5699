"""Reads memory figures on systems without procfs, such as macOS.

A call of the system's library returns the process's memory. Without that call, the process's peak
memory stands in: it may be too much, but never too little.
"""

import ctypes
import os
import resource
import sys

_RUSAGE_INFO_V0 = 0


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of macOS: <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("package_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("page_ins", ctypes.c_uint64),
        ("wired", ctypes.c_uint64),
        ("resident", ctypes.c_uint64),
        ("footprint", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
    )


def total_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def own_memory(library: ctypes.CDLL | None = None) -> tuple[int, int]:
    """Return this process's bytes of anonymous and of file-backed memory.

    Args:
        library: the system's library, with or without `proc_pid_rusage`; None: this system's.
    """
    read = getattr(library or ctypes.CDLL(None), "proc_pid_rusage", None)
    usage = _Usage()
    if read is not None and not read(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage)):
        return usage.footprint, max(0, usage.resident - usage.footprint)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024, 0
