"""Makes the torch of an AWS Deep Learning AMI visible in a conda environment.

Nothing is copied: ``import torch`` finds the image's own files, and with it triton, torchvision and
torchaudio, and nothing else of the image. ``dlami_torch.pth`` calls :func:`install` when Python
starts; that must be cheap, so everything else waits for the first ``import torch``.

Environment variables:

``DLAMI_TORCH_PATH``
    the image's environment (or its python), where it is not in the default place
``DLAMI_TORCH_ACCEPT``
    for tests on other machines: names of checks to waive, of ``arch``, ``cuda``, ``version``;
    each waived check warns

``python -m dlami_torch`` shows what was found; ``python -m dlami_torch --set PATH`` records another
place for this environment.
"""

from __future__ import annotations

import sys

# Import names by distribution. What the image lacks is simply not found.
MODULES = {
    "torch": ("torch", "torchgen", "functorch"),
    "triton": ("triton",),
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
}
NAMES = frozenset(name for names in MODULES.values() for name in names)


class Finder:
    """Finds those modules, and the metadata of their distributions, in the image.

    It stands first in ``sys.meta_path``: a torch that some installer has put into the environment
    has no sm_75 code, and must not win.
    """

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find one of the image's modules; submodules are found by their parent's path."""
        if name not in NAMES:
            return None
        from dlami_torch import image

        return image.find_spec(name)

    def find_distributions(self, context):  # type: ignore[no-untyped-def]
        """Find the metadata of the image's distributions (``importlib.metadata``)."""
        from dlami_torch import image

        return image.find_distributions(context.name)

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


def install() -> None:
    """Put the finder into place, once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
