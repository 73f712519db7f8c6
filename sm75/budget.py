"""How much an archive may unpack to: a bomb is refused before it fills the memory or the disk."""

from __future__ import annotations

from typing import IO

from sm75.errors import ChannelError

# Bytes for one that is packed. Of the wheels of the 0.33.0 lock and its closure the most repetitive
# one has 12.8 (measured over the store); deflate reaches 1,032 on zeros, and zstd ten times that.
RATIO = 100
# What any archive may have, however small it is: bytes.
FLOOR = 64 << 20


class Budget:
    """Counts what is unpacked of one archive.

    Args:
        archive: Its name, for the message.
        packed: Its size in bytes.
    """

    def __init__(self, archive: str, packed: int) -> None:
        self._archive = archive
        self._limit = FLOOR + RATIO * packed
        self._taken = 0

    def take(self, size: int) -> None:
        """Account for a member before it is read.

        Args:
            size: Its bytes, unpacked, as the archive states them; readers give no more than that.

        Raises:
            ChannelError: The archive unpacks to more than one of its size plausibly does.
        """
        self._taken += size
        if size < 0 or self._taken > self._limit:
            raise ChannelError(
                f"refusing {self._archive}: it would unpack to more than {self._limit >> 20} MiB",
                why=f"that is {RATIO} times its size and more, as archives made to fill disks do",
                fix="get it again from where it was published",
            )

    def counted(self, stream: IO[bytes]) -> Counted:
        """A reader of ``stream`` that accounts for every byte of it, headers included."""
        return Counted(stream, self)


class Counted:
    """As much of a stream's interface as tarfile needs; see ``Budget.counted``."""

    def __init__(self, stream: IO[bytes], budget: Budget) -> None:
        self._stream = stream
        self._budget = budget

    def read(self, size: int = -1) -> bytes:
        """Read bytes.

        Raises:
            ChannelError: There are too many.
        """
        data = self._stream.read(size)
        self._budget.take(len(data))
        return data
