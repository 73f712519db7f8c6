"""Telling systemd how a start goes (sd_notify(3): a datagram to the socket that it names)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

VARIABLE = "NOTIFY_SOCKET"
READY = "READY=1"


def notify(environment: Mapping[str, str], *states: str) -> None:
    """Tell a supervisor that listens; where none does, nothing.

    Args:
        environment: Variables; ``NOTIFY_SOCKET`` has the socket, with ``@`` an abstract one.
        states: Such as ``READY=1`` or ``STATUS=loading``.
    """
    address = environment.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with (
        contextlib.suppress(OSError),  # it has gone; the server matters more
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as stream,
    ):
        stream.connect("\0" + address[1:] if address[0] == "@" else address)
        stream.sendall("\n".join(states).encode())
