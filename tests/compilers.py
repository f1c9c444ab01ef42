"""The programs that kernels are built with, for tests that compile."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pyruntime.cubin.installed import manifest


def nvcc() -> str:
    """The nvcc of the build, of the wheel, or of a toolkit on the machine."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvcc")
    for path in (manifest()["nvcc"], str(wheel), "nvcc", "/usr/local/cuda/bin/nvcc"):
        if found := shutil.which(path):
            return found
    pytest.skip("no nvcc: neither the build's, nor the wheel nvidia-cuda-nvcc, nor one on PATH")


def cuda_includes() -> list[str]:
    """Where that nvcc has CUDA's headers from, as options of a compiler."""
    command = [nvcc(), "--dryrun", "-x", "cu", "-c", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (found,) = re.findall(r"^#\$ INCLUDES=(.*)$", said, re.MULTILINE)
    return shlex.split(shlex.split(found)[0])


def cmake() -> str:
    """The cmake of this environment, or of the machine."""
    for path in (str(Path(sys.executable).with_name("cmake")), "cmake"):
        if found := shutil.which(path):
            return found
    pytest.skip("no cmake")


def cxx() -> str:
    """A C++ compiler of the machine."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C++ compiler")
