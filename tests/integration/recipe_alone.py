"""Build the recipe as `rattler-build build` and `conda build` do: ``CHANNEL OUTPUT``.

Both go through this library; nothing of the orchestrator takes part, and the variants come from the
files that docs/building.md names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import rattler_build as rb

ROOT = Path(__file__).resolve().parents[2]


def main(channel: str, output: Path) -> None:
    """Build; the package's path is the last line."""
    release = (ROOT / "lock" / "default").read_text().strip()
    build = "linux-64" if os.uname().machine == "x86_64" else "linux-aarch64"
    variants = rb.VariantConfig()
    for path in (
        ROOT / "lock" / release / "variants.yaml",
        ROOT / "lock" / "platforms" / f"{build}.yaml",
    ):
        variants = variants.merge(rb.VariantConfig.from_file(path))
    platform = rb.PlatformConfig(
        target_platform="linux-aarch64", build_platform=build, host_platform="linux-aarch64"
    )
    recipe = rb.Stage0Recipe.from_file(ROOT / "recipes" / "vllm-sm75" / "recipe.yaml")
    (variant,) = recipe.render(variants, rb.RenderConfig(platform=platform))
    result = variant.run_build(
        tool_config=rb.ToolConfiguration(test_strategy="skip"),
        output_dir=output,
        channels=[channel],
    )
    print(result.packages[0], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
