"""The command `pyruntime`: finds the subcommand's module and turns errors into exit codes.

Exit codes: 0 fine, 1 a finding or a failed run, 2 usage or unreadable input, 3 no driver or GPU.
Each module has `main(argv) -> int`; nothing but the chosen one is imported.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

from pyruntime import __version__
from pyruntime.errors import PyruntimeError

COMMANDS = {
    "prefill": ("pyruntime.commands.prefill", "run a prompt and show the likeliest next tokens"),
    "generate": ("pyruntime.commands.generate", "continue a prompt greedily"),
    "info": ("pyruntime.commands.info", "list a model's metadata, tensors and memory needs"),
    "doctor": ("pyruntime.commands.doctor", "tell what of driver, devices and cubins is there"),
    "synth": ("pyruntime.tools.synth", "write a model file with real shapes and random weights"),
    "inspect": ("pyruntime.tools.inspect", "show registers, memory and spills of kernels"),
    "ledger": ("pyruntime.tools.ledger", "account for shared memory, plane by plane"),
    "occupancy": ("pyruntime.tools.occupancy", "count blocks per SM for given resources"),
    "banks": ("pyruntime.tools.banks", "find bank conflicts in accesses to shared memory"),
    "sass": ("pyruntime.tools.sass", "count machine instructions by kind and loop"),
    "audit": ("pyruntime.tools.audit", "weigh a kernel's structure, resources and behaviour"),
    "diff": ("pyruntime.tools.diff", "compare the kernels of two builds"),
    "gate": ("pyruntime.tools.gate", "fail when kernels break rules or a baseline"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: the process's) and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"pyruntime {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"pyruntime: unknown command {name!r}\n\n{_help()}", file=sys.stderr)
        return 2
    logging.basicConfig(
        format="pyruntime: %(message)s", level=os.environ.get("PYRUNTIME_LOG", "WARNING").upper()
    )
    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
        sys.stdout.flush()
        return code
    except PyruntimeError as error:
        return _failed(name, error, error.exit_code)
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output has left; keep Python from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        return _failed(name, error, 2)
    except KeyboardInterrupt:
        return 130


def _failed(name: str, error: Exception, code: int) -> int:
    print(f"pyruntime {name}: {error}", file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pyruntime COMMAND [...]   (pyruntime COMMAND --help; pyruntime --version)",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
