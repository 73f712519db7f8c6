"""Show what the environment has of the image's torch, or record where the image is."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from pathlib import Path

from dlami_torch import MODULES, image


def main() -> int:
    """Do it; 1 when the image's torch cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m dlami_torch", description=__doc__)
    parser.add_argument("--set", metavar="PATH", help="use the image's environment in PATH")
    parser.add_argument("--no-import", action="store_true", help="do not import torch")
    options = parser.parse_args()
    recorded = Path(sys.prefix) / image.LOCATION
    if options.set:
        recorded.parent.mkdir(parents=True, exist_ok=True)
        recorded.write_text(f"{Path(options.set).absolute()}\n", encoding="utf-8")
    place, source = image.configured()
    print(f"contract: {image.CONTRACT['name']} (torch {image.CONTRACT['torch']})")
    print(f"place: {place} ({source})")
    try:
        found = image.current()
        print(f"python: {found.python}\ntorch: {found.torch}\ncuda: {found.cuda}")
        if not options.no_import:
            image.check_arch(found, importlib.import_module("torch"))
    except ImportError as fault:
        print(fault, file=sys.stderr)
        return 1
    for name in MODULES:
        try:
            print(f"{name}: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not in the image")
    return 0


if __name__ == "__main__":
    sys.exit(main())
