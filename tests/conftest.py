"""Sees to it that the installed package is tested, wherever the tests are started."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

ROOT = str(Path(__file__).parents[1])

# `python -m pytest` looks in the working folder first: for sources without cubins and tools.
if ("-m", "pytest") in pairwise(sys.orig_argv) and not sys.flags.safe_path and ROOT in sys.path:
    sys.path.remove(ROOT)
os.environ["PYTHONSAFEPATH"] = "1"  # nor do the interpreters that tests start
