"""What an explainer says of a subject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What there is to say of a subject.

    Attributes:
        subject: What it is about.
        parts: Label and text, in the order in which they are read.
    """

    subject: str
    parts: tuple[tuple[str, str], ...]

    @property
    def exit_code(self) -> int:
        """Of the command that prints it."""
        return 0

    def lines(self) -> list[str]:
        """One line a part, labels in a column."""
        width = max(len(label) for label, _ in self.parts)
        return [self.subject, *(f"  {label:<{width}}  {text}" for label, text in self.parts)]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data; a label that stands several times keeps all its texts."""
        return {
            "subject": self.subject,
            "parts": [{"label": label, "text": text} for label, text in self.parts],
        }
