"""`python -m pyruntime` is the command `pyruntime`."""

import sys

from pyruntime.cli import main

sys.exit(main())
