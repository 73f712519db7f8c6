"""The package's INT8 GEMMs, as PTX for 7.5, on whatever newer GPU is here, against float64.

    python3 int8gemm.py --csrc CSRC --cutlass INCLUDE [--cutlass TOOLS] --json FILE

CSRC is the patched tree's ``csrc`` (with ``sm75/`` in it). Needs nvcc of the driver's CUDA or
older, g++, and torch with its headers. Exit code 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SIZES = [(m, n, k) for m in (1, 7, 16, 33, 64, 100, 128, 300, 512) for n, k in
         ((16, 16), (256, 512), (1536, 2048), (2048, 12288))]  # fmt: skip
# float16 rounds to a 2048th; sums of integers are exact, and scales are applied in float32.
RELATIVE = 2e-3


def build(csrc: Path, cutlass: list[Path], work: Path) -> Path:
    """Compile the two CUDA sources for compute_75, and link them with the binding."""
    includes = [f"-I{path}" for path in (csrc, *cutlass)]
    includes += [f"-I{path}" for path in cpp_extension.include_paths()]
    # As vLLM's own build defines them.
    defines = [
        "-DTORCH_TARGET_VERSION=0x020B000000000000ULL", "-DUSE_CUDA", "-DENABLE_SCALED_MM_C2X=1",
        "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
    ]  # fmt: skip
    here = Path(__file__).resolve().parent
    sources = [csrc / "sm75" / name for name in
               ("scaled_mm_plain.cu", "scaled_mm_azp.cu", "scaled_mm_sm75.cpp")]  # fmt: skip

    def compile_one(source: Path) -> str:
        out = work / f"{source.name}.o"
        subprocess.run(
            ["nvcc", "-std=c++20", "-O2", "-DNDEBUG", "-Xcompiler=-fPIC", "-w",
             "--expt-relaxed-constexpr", "-gencode=arch=compute_75,code=compute_75", *defines,
             *includes, "-c", str(source), "-o", str(out)],
            check=True,
        )  # fmt: skip
        return str(out)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, [*sources, here / "int8gemm.cpp"]))
    library = work / "int8gemm.so"
    links = [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run(
        ["nvcc", "-shared", "-o", str(library), *objects, *links, "-ltorch", "-ltorch_cpu"],
        check=True,
    )
    return library


def trials() -> list[dict[str, Any]]:
    """Run all sizes with all epilogues, scales a tensor or a row and column."""
    found = []
    torch.manual_seed(0)
    for m, n, k in SIZES:
        a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
        b = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda").t()
        exact = a.double() @ b.double()
        columns = b.double().sum(0, keepdim=True)
        size = (2.0 / (k**0.5 * 74 * 74)) ** 0.5
        for rows in (False, True):
            a_scales = size * (0.5 + torch.rand(m if rows else 1, 1, device="cuda"))
            b_scales = size * (0.5 + torch.rand(1, n if rows else 1, device="cuda"))
            scale = a_scales.double() * b_scales.double()
            for epilogue in ("plain", "bias", "azp", "azp bias", "azp a token"):
                bias = torch.randn(n, device="cuda").half() if "bias" in epilogue else None
                out = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")
                wanted = exact
                if "azp" not in epilogue:
                    torch.ops.sm75_int8.plain(out, a, b, a_scales, b_scales, bias)
                else:
                    token = epilogue.endswith("token")
                    azp = torch.randint(-20, 20, (m if token else 1, 1), device="cuda")
                    wanted = exact - azp.double() * columns
                    adjust = columns if token else azp.double() * columns
                    torch.ops.sm75_int8.azp(
                        out, a, b, a_scales, b_scales, adjust.int(),
                        azp.int() if token else None, bias,
                    )  # fmt: skip
                wanted = scale * wanted + (0 if bias is None else bias.double())
                error = (out.double() - wanted).abs()
                relative = (error.norm() / wanted.norm()).item()
                good = bool(torch.isfinite(out).all()) and relative < RELATIVE
                found.append(
                    {"m": m, "n": n, "k": k, "epilogue": epilogue,
                     "scales": "row and column" if rows else "tensor",
                     "max_error": error.max().item(), "relative_error": relative, "passed": good}
                )  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csrc", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, action="append", required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        torch.ops.load_library(str(build(given.csrc, given.cutlass, Path(work))))
        results = trials()
    version = (given.cutlass[0] / "cutlass" / "version.h").read_text()
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", version)
    nvcc = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[0]
    report = {
        "schema": 1, "kind": "compute_75 PTX, compiled by the driver of another GPU",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "driver": driver,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cutlass": ".".join(numbers), "nvcc": nvcc.stdout.strip().splitlines()[-2],
        "allowed_relative_error": RELATIVE, "passed": all(one["passed"] for one in results),
        "largest_relative_error": max(one["relative_error"] for one in results),
        "results": results,
    }  # fmt: skip
    given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"int8: {len(results)} GEMMs, largest relative error "
          f"{report['largest_relative_error']:.1e}; "
          + ("all right" if report["passed"] else "WRONG"))  # fmt: skip
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
