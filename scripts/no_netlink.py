#!/usr/bin/env python3
"""Runs a program without netlink sockets: `PROGRAM=… scripts/no_netlink.py [ARGUMENT...]`.

Chromium listens to netlink and ends all connection attempts with ERR_NETWORK_CHANGED when an
interface comes or goes. Docker makes one for every container: a browser test failed when another
test beside it started one. A seccomp filter answers `socket(AF_NETLINK, …)` with EAFNOSUPPORT,
and Chromium then takes the network as it is. Where the kernel has no such filter the program runs
without it. Source: linux/seccomp.h, linux/bpf_common.h, linux/audit.h.
"""

import ctypes
import os
import platform
import socket
import struct
import sys
from errno import EAFNOSUPPORT

# The audit architecture, and the number of `socket` on it.
ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def forbid_netlink() -> None:
    """Install the filter for this process and all that it starts."""
    if platform.machine() not in ARCHITECTURES:
        return
    architecture, number = ARCHITECTURES[platform.machine()]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (LOAD, 0, 0, ARCHITECTURE),
            (JUMP_IF_EQUAL, 0, 5, architecture),
            (LOAD, 0, 0, NUMBER),
            (JUMP_IF_EQUAL, 0, 3, number),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_IF_EQUAL, 0, 1, socket.AF_NETLINK),
            (RETURN, 0, 0, ERROR | EAFNOSUPPORT),
            (RETURN, 0, 0, ALLOW),
        )
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_SECCOMP, MODE_FILTER, filter_, 0, 0)


forbid_netlink()
program = os.environ.pop("PROGRAM")
os.execv(program, [program, *sys.argv[1:]])  # noqa: S606 - no shell is needed
