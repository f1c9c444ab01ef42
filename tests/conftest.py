"""Sees to it that the installed package is tested, and each time with the same examples."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])

# `python -m pytest` looks in the working folder first: for sources without cubins and tools.
if ("-m", "pytest") in pairwise(sys.orig_argv) and not sys.flags.safe_path and ROOT in sys.path:
    sys.path.remove(ROOT)
os.environ["PYTHONSAFEPATH"] = "1"  # nor do the interpreters that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate", choices=("80", "90a", "100", "120"), metavar="ARCHITECTURE",
        help="run tests/gpu on the host, with kernels as they are for sm_80, ...: see "
        "tests/emulated_driver.py",
    )  # fmt: skip
    parser.addoption(
        "--multiprocessors", type=int, default=24, metavar="COUNT",
        help="with --emulate: of the GPU; where they are few, blocks that stay have more to do",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--emulate") and config.option.markexpr == "not gpu":  # nothing was said
        config.option.markexpr = "gpu"


def pytest_collection_finish() -> None:
    """What is there before the first test stays: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


with suppress(ImportError):  # tests on a GPU need none
    from hypothesis import HealthCheck, settings

    # `pytest --hypothesis-profile=default` looks for new examples.
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "same", derandomize=True, deadline=None, database=None, suppress_health_check=slow
    )
    settings.load_profile("same")
