"""The most that a card's memory allows, and how far from it a server is.

Decoding one token of one stream reads all weights that take part and the keys and values of what
stands before. Streams decoded together share the weights. So a step of n streams takes at least
(weights + n x kv) / bandwidth, each stream gets one token of it. Nothing else is in this ceiling:
no arithmetic, no launches, no activations; with many streams or long prompts arithmetic limits
first, and the true ceiling is lower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sm75.bench.weights import Reads

GIGA = 1e9
T4G_READ = 277.0
"""GB/s read, measured on a T4G; from the field report of a g5g, not by us."""
T4G_COPY = 234.0
"""GB/s read and written together by a copy, same source. One way alone would be more than half of
the theoretical 320."""
T4G_THEORETICAL = 320.0
"""GB/s: 256 bits of GDDR6 at 10 Gbit/s (NVIDIA's data sheet of the T4, a sibling)."""
REPORTED_RATE = 43.1
REPORTED = (
    "field report of a g5g, not ours: Gemma 4 E2B, one stream, one sample (no spread), attention "
    "of the FMA path (Triton without tensor cores, head 512 with tile 16 and 4 warps); a floor, "
    "not a goal"
)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A ceiling.

    Attributes:
        bandwidth: GB/s (1e9 bytes).
        bandwidth_from: Where that is from.
        reads: What a token reads; None where it is not known.
    """

    bandwidth: float
    bandwidth_from: str
    reads: Reads | None

    def step_bytes(self, context: float, streams: int) -> float | None:
        """Bytes read for a token of each stream."""
        if self.reads is None:
            return None
        return self.reads.weights + streams * self.reads.kv(round(context))

    def rate(self, context: float, streams: int) -> float | None:
        """The most tokens a second that each of so many streams can get.

        Args:
            context: Tokens before the decoded one, in the mean.
            streams: How many are decoded together.
        """
        read = self.step_bytes(context, streams)
        return self.bandwidth * GIGA / read if read else None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        reads = self.reads
        return {
            "bandwidth_gb_s": self.bandwidth,
            "bandwidth_from": self.bandwidth_from,
            "weight_bytes_a_token": reads.weights if reads else None,
            "weight_bytes_from": reads.source if reads else None,
            "weight_kinds": {
                kind: {"bytes": there, "read_a_token": read}
                for kind, (there, read) in (reads.kinds.items() if reads else ())
            },
            "kv_layers": [
                {"bytes_a_token_of_context": size, "window": window}
                for size, window in (reads.layers if reads else ())
            ],
        }


def field_report() -> dict[str, Any]:
    """What others measured, to stand beside our figures."""
    return {
        "tokens_s": REPORTED_RATE,
        "conditions": REPORTED,
        "read_gb_s": T4G_READ,
        "copy_gb_s": T4G_COPY,
        "theoretical_gb_s": T4G_THEORETICAL,
    }
