"""The server's process: connections, restart, and health checks from outside.

The healthcheck and the watchdog are programs of a few megabytes, so this package imports nothing.
"""
