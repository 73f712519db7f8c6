"""Server-sent events, read as they come.

https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end by CR LF, LF or CR and by
nothing else. U+2028, U+0085 and the like stand unescaped inside a model's text, so that
``str.splitlines`` would cut it.
"""

from __future__ import annotations

import re

_END = re.compile(rb"\r\n|\n|\r")


class Events:
    """Takes the bytes of a stream in pieces, gives the data of whole lines.

    Comments and other fields are skipped. Each line of data is an event, as all servers of this
    protocol send them.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """The data that are whole with this piece."""
        found = self._rest + piece
        # Half of CR LF may still be on its way.
        held = b"\r" if found.endswith(b"\r") else b""
        *lines, self._rest = _END.split(found.removesuffix(held))
        self._rest += held
        return _data(lines)

    def close(self) -> list[str]:
        """What the stream ended with, whole or not."""
        lines, self._rest = _END.split(self._rest), b""
        return _data(lines)


def _data(lines: list[bytes]) -> list[str]:
    return [
        line.removeprefix(b"data:").decode("utf-8", errors="replace").strip()
        for line in lines
        if line.startswith(b"data:")
    ]
