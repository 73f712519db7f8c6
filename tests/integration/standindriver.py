"""A stand-in for NVIDIA's driver, for machines that have none: it says that there is one T4G.

Programs that only ask what there is (vLLM choosing its platform) get a T4G's answers from
libnvidia-ml.so.1: name, capability 7.5, 15,360 MiB. Programs that want to compute are told by
libcuda.so.1 that there is no device. Nothing runs on it, and nothing of the package is changed: the
two libraries stand in the library path, where a real driver's would be.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

GCC = "aarch64-linux-gnu-gcc"
NAME = "NVIDIA T4G (stand-in)"
# CUDA_ERROR_NO_DEVICE; cuda.h.
_NO_DEVICE = 100
# What vllm-sm75's extensions take of it.
CUDA = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
)
# The calls of nvml.h that vLLM and torch make when they look for devices; 0 is success, 2 an
# invalid argument. What is not here is a function that the driver lacks.
_NVML = f"""
typedef unsigned int u32;
typedef unsigned long long u64;
static int put(char *to, u32 room, const char *from) {{
    u32 i = 0;
    for (; from[i] && i + 1 < room; i++) to[i] = from[i];
    to[i] = 0;
    return 0;
}}
static int device;
int nvmlInit(void) {{ return 0; }}
int nvmlInit_v2(void) {{ return 0; }}
int nvmlInitWithFlags(u32 flags) {{ return 0; }}
int nvmlShutdown(void) {{ return 0; }}
const char *nvmlErrorString(int code) {{ return "an error of the stand-in driver"; }}
int nvmlSystemGetDriverVersion(char *to, u32 room) {{ return put(to, room, "595.71.05"); }}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {{ *version = 13020; return 0; }}
int nvmlDeviceGetCount(u32 *count) {{ *count = 1; return 0; }}
int nvmlDeviceGetCount_v2(u32 *count) {{ *count = 1; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle) {{
    *handle = &device;
    return index ? 2 : 0;
}}
int nvmlDeviceGetIndex(void *handle, u32 *index) {{ *index = 0; return 0; }}
int nvmlDeviceGetName(void *handle, char *to, u32 room) {{ return put(to, room, "{NAME}"); }}
int nvmlDeviceGetUUID(void *handle, char *to, u32 room) {{
    return put(to, room, "GPU-00000000-0000-0000-0000-000000000075");
}}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {{
    *major = 7;
    *minor = 5;
    return 0;
}}
int nvmlDeviceGetMemoryInfo(void *handle, u64 *total_free_used) {{
    total_free_used[0] = 15360ull << 20;
    total_free_used[1] = 15000ull << 20;
    total_free_used[2] = 360ull << 20;
    return 0;
}}
"""


def make(place: Path) -> Path:
    """Make the two libraries in ``place`` and return it; anew each time, it takes no time."""
    place.mkdir(parents=True, exist_ok=True)
    functions = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in CUDA)
    for soname, text in (("libnvidia-ml.so.1", _NVML), ("libcuda.so.1", functions)):
        source = place / f"{soname}.c"
        source.write_text(text)
        subprocess.run(
            [GCC, "-shared", "-fPIC", "-nostdlib", "-w", "-O1", "-fno-builtin",
             f"-Wl,-soname,{soname}", "-o", str(place / soname), str(source)],
            check=True,
        )  # fmt: skip
    return place
