"""Makes the fixture cubins of this folder, and expected.json: what NVIDIA's own tools say of them.

Needs wheels that the tests do not: nvcc 13.0 and 13.5 (cuda-toolkit[nvcc,cccl]), NVRTC 12.9
(nvidia-cuda-nvrtc-cu12==12.9.*), cuobjdump (nvidia-cuda-cuobjdump) and triton, in any environments:

    python make.py --nvcc-13.0 NVCC --nvcc-13.5 NVCC --nvrtc-12.9 LIBNVRTC.so.12 \
        --cuobjdump CUOBJDUMP --triton-python PYTHON
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARCHITECTURES = ("80", "90a", "100a", "120")
PTXAS = {
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "registers": r"Used (\d+) registers",
    "barriers": r"used (\d+) barriers",
    "static_shared": r"(\d+) bytes smem",
}


def from_ptxas(log: str) -> dict[str, dict[str, int]]:
    """kernel -> figures, from the lines of `ptxas -v`; a figure it leaves out is 0."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    return {
        name: {
            field: int(found[1]) if (found := re.search(pattern, text)) else 0
            for field, pattern in PTXAS.items()
        }
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def from_cuobjdump(tool: Path, cubin: Path) -> dict[str, dict[str, int]]:
    """kernel -> figures, from `cuobjdump -res-usage`."""
    log = run(tool, "-res-usage", cubin)
    found = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) .*?CONSTANT\[0\]:(\d+)", log
    )
    names = ("REG", "STACK", "SHARED", "CONSTANT0")
    return {name: dict(zip(names, map(int, values), strict=True)) for name, *values in found}


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout + done.stderr


def nvcc(tool: Path, arch: str, out: Path) -> str:
    target = f"arch=compute_{arch},code=sm_{arch}"
    return run(tool, "-cubin", "-DTILE", "-std=c++17", "-Xptxas", "-v", "-gencode", target,
               "-o", out, "kernels.cu")  # fmt: skip


def nvrtc(library: Path, arch: str, out: Path) -> str:
    """Compiles with NVRTC; 12.9 writes ABI 7 below sm_100."""
    lib = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = (HERE / "kernels.cu").read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    options = [f"--gpu-architecture=sm_{arch}".encode(), b"--ptxas-options=-v"]
    status = lib.nvrtcCompileProgram(program, 2, (ctypes.c_char_p * 2)(*options))
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if status:
        raise SystemExit(log.value.decode())
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    out.write_bytes(cubin.raw)
    return log.value.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--nvcc-13.0", "--nvcc-13.5", "--nvrtc-12.9", "--cuobjdump", "--triton-python"):
        parser.add_argument(option, dest=re.sub(r"\W", "_", option[2:]), type=Path, required=True)
    args = parser.parse_args()
    logs = {}
    for arch in ARCHITECTURES:
        name = f"nvcc-13.0-sm_{arch}.cubin"
        logs[name] = nvcc(args.nvcc_13_0, arch, HERE / name)
    logs["nvcc-13.5-sm_90a.cubin"] = nvcc(args.nvcc_13_5, "90a", HERE / "nvcc-13.5-sm_90a.cubin")
    for arch in ("90a", "100a"):
        name = f"nvrtc-12.9-sm_{arch}.cubin"
        logs[name] = nvrtc(args.nvrtc_12_9, arch, HERE / name)
    triton = "triton-sm_90a.cubin"
    run(args.triton_python, "triton_kernel.py", HERE / triton)
    expected: dict[str, Any] = {
        name: {
            "ptxas": from_ptxas(logs.get(name, "")),
            "cuobjdump": from_cuobjdump(args.cuobjdump, HERE / name),
        }
        for name in [*logs, triton]
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    targets = [
        "-gencode",
        "arch=compute_80,code=sm_80",
        "-gencode",
        "arch=compute_90,code=[sm_90,compute_90]",
    ]
    for mode, kind in (("speed", "lz4"), ("size", "zstd")):
        run(args.nvcc_13_0, "-fatbin", f"-compress-mode={mode}", "-Xfatbin", "-compress-all",
            *targets, "-o", f"host-{kind}.fatbin", "host.cu")  # fmt: skip
    run(args.nvcc_13_0, "-c", "-Xcompiler", "-fPIC", *targets, "-o", "host.o", "host.cu")
    run(args.nvcc_13_0, "-rdc=true", "-c", "-arch=sm_90", "-o", "unlinked.o", "host.cu")
    run("g++", "-shared", "-s", "-o", "libhost.so", "host.o")


if __name__ == "__main__":
    main()
