"""Installs a seccomp filter for this process and all that it starts.

It needs only the standard library, so that confined processes stay small. The numbers are from
<linux/filter.h>, <linux/seccomp.h>, <linux/audit.h> and <linux/prctl.h>.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

Instruction = tuple[int, int, int, int]  # BPF: code, jump if true, jump if false, operand

LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # ERROR | errno: the call fails with that
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(program: Sequence[Instruction]) -> str:
    """Install a filter; return an empty text, or why the kernel refuses the filter."""
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(_Program(len(program), packed)), 0, 0
    ):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""
