"""Finds the address at which a program on this machine reaches a server.

The healthcheck and the watchdog use it, so it uses nothing of the service.
"""

import socket

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 # nosec B104


def reachable(host: str) -> str:
    """Return the address of a server that listens on `host`, an address or a name.

    Nobody can connect to "all addresses": the family's loopback address replaces it.
    """
    try:
        first = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return host  # connecting will fail with the reason
    return _LOOPBACK.get(str(first[4][0]), host)
