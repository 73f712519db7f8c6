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
    print(f"contract: {image.CONTRACT['name']} (torch {image.CONTRACT['torch']})")
    try:
        if options.set is not None:
            _record(options.set, recorded)
        place, source = image.configured()
        print(f"place: {place} ({source})")
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


def _record(given: str, recorded: Path) -> None:
    """Record another place, once torch was found there.

    Raises:
        image.ImageError: Its torch will not do, or the record cannot be written.
    """
    place = Path(given).absolute()
    if not given or "\n" in given or place.as_posix() != place.as_posix().strip():
        raise image.ImageError(
            f"dlami-torch: {given!r} cannot be recorded: it is not one line without blanks at its "
            "ends. Nothing was recorded."
        )
    try:
        image.locate_in(place, "--set")
    except image.ImageError as fault:
        raise image.ImageError(f"{fault} Nothing was recorded.") from fault
    try:
        recorded.parent.mkdir(parents=True, exist_ok=True)
        recorded.write_text(f"{place}\n", encoding="utf-8")
    except (OSError, UnicodeEncodeError) as err:
        raise image.ImageError(f"dlami-torch: {recorded} cannot be written: {err}") from err


if __name__ == "__main__":
    sys.exit(main())
