"""The browser of the tests does not notice interfaces that come and go beside it."""

import os
import platform
import sys
from errno import EAFNOSUPPORT

import pytest

from tests.stack.support import ROOT, succeed

OPEN_SOCKETS = """
import socket
for family in socket.AF_INET, socket.AF_UNIX, socket.AF_NETLINK:
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
    except OSError as error:
        print(family.name, error.errno)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"},
    reason="tests/no_netlink.py has no filter for this machine",
)
def test_a_browser_gets_no_netlink_socket() -> None:
    environment = {**os.environ, "PROGRAM": sys.executable}
    printed = succeed(ROOT / "tests/no_netlink.py", "-c", OPEN_SOCKETS, env=environment)
    assert printed.split() == ["AF_NETLINK", str(EAFNOSUPPORT)]
