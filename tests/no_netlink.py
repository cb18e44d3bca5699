#!/usr/bin/env python3
"""Runs a program without netlink sockets: `PROGRAM=… tests/no_netlink.py [ARGUMENT...]`.

Chromium listens to netlink and ends all connection attempts with ERR_NETWORK_CHANGED when an
interface comes or goes. Docker makes one for every container: a browser test failed when another
test beside it started one. A seccomp filter answers `socket(AF_NETLINK, …)` with EAFNOSUPPORT,
and Chromium then takes the network as it is. Where the kernel has no such filter the program runs
without it.
"""

import os
import platform
import socket
import sys
from errno import EAFNOSUPPORT
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "api"))

from specops.system import seccomp

_SOCKET = {"x86_64": 41, "aarch64": 198}  # the number of the system call


def forbid_netlink() -> None:
    """Install the filter for this process and all that it starts."""
    if (machine := platform.machine()) in _SOCKET:
        seccomp.install(
            [
                (seccomp.LOAD, 0, 0, seccomp.ARCH),
                (seccomp.EQUAL, 0, 5, seccomp.ARCHITECTURES[machine]),
                (seccomp.LOAD, 0, 0, seccomp.NUMBER),
                (seccomp.EQUAL, 0, 3, _SOCKET[machine]),
                (seccomp.LOAD, 0, 0, seccomp.ARGUMENTS),
                (seccomp.EQUAL, 0, 1, socket.AF_NETLINK),
                (seccomp.RETURN, 0, 0, seccomp.ERROR | EAFNOSUPPORT),
                (seccomp.RETURN, 0, 0, seccomp.ALLOW),
            ]
        )


forbid_netlink()
program = os.environ.pop("PROGRAM")
os.execv(program, [program, *sys.argv[1:]])  # noqa: S606 - no shell is needed
