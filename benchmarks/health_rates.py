"""How often the judgement of ``health`` is wrong, on the corpus of its tests.

python3 -m benchmarks.health_rates [COUNT]     # of each kind of broken text; default 1000

Prints a table for docs/health.md.
"""

from __future__ import annotations

import sys

from sm75.health import text
from tests.unit import healthcorpus


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| texts | number | called broken |\n|---|---|---|")
    for name, texts in (
        ("sane: answers to the questions", healthcorpus.written()),
        ("sane: prose (documentation, docstrings)", healthcorpus.prose()),
        ("sane: prose of installed packages", healthcorpus.foreign_prose()),
    ):
        wrong = [one for one in texts if text.faults(one)]
        print(f"| {name} | {len(texts)} | {len(wrong) / len(texts):.2%} |")
        for one in wrong[:5]:
            print(f"  {text.faults(one)} {one!r}", file=sys.stderr)
    for kind in healthcorpus.BROKEN:
        texts = healthcorpus.broken(kind, count)
        if kind == "said by random models":
            # These are there; each once.
            texts = healthcorpus.said_by_random_models()
        missed = [one for one in texts if not text.faults(one)]
        print(f"| broken: {kind} | {len(texts)} | {1 - len(missed) / len(texts):.2%} |")
        for one in missed[:2]:
            print(f"  missed: {one[:150]!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
