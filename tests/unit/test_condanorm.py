"""A real rattler-build package, built in two places, becomes one and the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import rattler_build

from sm75.condanorm import normalize
from sm75.condapkg import iter_payload, read_info, read_info_files, verify_payload

RECIPE = """
package: {name: rbdemo, version: "1.0"}
build:
  string: h0_0
  dynamic_linking: {binary_relocation: false}
  script:
    - mkdir -p $PREFIX/bin $PREFIX/lib
    - printf "#!$PREFIX/bin/python\\n" > $PREFIX/bin/x
    - chmod +x $PREFIX/bin/x
    - printf "\\0\\1$PREFIX/lib\\0tail" > $PREFIX/lib/bin.dat
    - ln -s bin.dat $PREFIX/lib/l.dat
about: {license: MIT}
"""


def build(recipe: Path, out: Path) -> Path:
    stage0 = rattler_build.Stage0Recipe.from_file(recipe)
    platform = rattler_build.PlatformConfig(
        target_platform="linux-64", build_platform="linux-64", host_platform="linux-64"
    )
    variants = stage0.render(
        rattler_build.VariantConfig({}), rattler_build.RenderConfig(platform=platform)
    )
    result = variants[0].run_build(
        tool_config=rattler_build.ToolConfiguration(test_strategy="skip"),
        output_dir=str(out),
        channels=[],
    )
    return Path(result.packages[0])


def test_two_builds_become_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE)
    finished = []
    for name in ("one", "a-much-longer-name"):
        built = build(recipe, tmp_path / name)
        assert verify_payload(built) == []
        dst = tmp_path / f"{name}-normal"
        dst.mkdir()
        normalize(built, dst, level=3)
        finished.append(dst / built.name)
    assert finished[0].read_bytes() == finished[1].read_bytes()
    final = finished[0]
    assert verify_payload(final) == []
    place = str(tmp_path).encode()
    assert not [n for n, data in read_info_files(final).items() if place in data]
    assert not [m.name for m, raw in iter_payload(final) if place in raw.read()]
    entries = {e["_path"]: e for e in read_info(final)["paths"]["paths"]}
    assert entries["lib/bin.dat"]["file_mode"] == "binary"
    assert entries["lib/l.dat"]["sha256"] == entries["lib/bin.dat"]["sha256"]
