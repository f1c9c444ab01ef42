"""The command `pyruntime`: finds the subcommand's module and turns errors into exit codes.

Exit codes: 0 fine, 1 a finding or a failed run, 2 usage or unreadable input, 3 no driver or GPU.
Each module has `main(argv) -> int`; nothing but the chosen one is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys

from pyruntime import __version__
from pyruntime.errors import PyruntimeError, reason

COMMANDS = {
    "prefill": ("pyruntime.commands.prefill", "run a prompt and show the likeliest next tokens"),
    "generate": ("pyruntime.commands.generate", "continue a prompt greedily"),
    "serve": ("pyruntime.serve.command", "answer completions over HTTP, and show scores"),
    "eval": ("pyruntime.commands.eval", "run the lm-evaluation-harness on a model"),
    "batch": ("pyruntime.batch.command", "score or embed a data set with many engines"),
    "info": ("pyruntime.commands.info", "list a model's metadata, tensors and memory needs"),
    "doctor": ("pyruntime.commands.doctor", "tell what of driver, devices and cubins is there"),
    "wall": ("pyruntime.tools.wall", "show where a prefill's time goes, kernel by kernel"),
    "ab": ("pyruntime.tools.ab", "compare two variants, option sets or builds"),
    "lever": ("pyruntime.tools.lever", "price what could be made faster, before it is tried"),
    "synth": ("pyruntime.tools.synth", "write a model file with real shapes and random weights"),
    "inspect": ("pyruntime.tools.inspection", "show registers, memory and spills of kernels"),
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
    name = arguments[0] if arguments else ""
    try:
        code = _dispatch(name, arguments[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except PyruntimeError as error:
        return _failed(name, error, error.exit_code)
    except BrokenPipeError:
        # The reader of our output has left; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, ValueError, ImportError) as error:
        code = _failed(name, error, 2)
        if isinstance(error, OSError) and sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered may fail again
        return code
    except MemoryError:
        return _failed(name, MemoryError("out of host memory"), 1)
    except KeyboardInterrupt:
        return 130


def _dispatch(name: str, arguments: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a token may be beyond the terminal
    if name in ("", "-h", "--help", "help"):
        print(_help())
        return 0 if name else 2
    if name == "--version":
        print(f"pyruntime {__version__}")
        return 0
    if name not in COMMANDS:
        raise ValueError(f"unknown command; there are {', '.join(COMMANDS)}")
    level = os.environ.get("PYRUNTIME_LOG") or "WARNING"
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"PYRUNTIME_LOG={level}: a level such as DEBUG, INFO or WARNING")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("pyruntime: %(message)s"))
    log = logging.getLogger("pyruntime")
    log.addHandler(handler)
    log.setLevel(level.upper())
    code: int = importlib.import_module(COMMANDS[name][0]).main(arguments)
    return code


def _failed(name: str, error: Exception, code: int) -> int:
    command = f"pyruntime {name}".rstrip()
    if isinstance(error, ImportError):
        error = ImportError(f"{error}; is the package installed? ('pip install .')")
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {reason(error)}"
    with contextlib.suppress(OSError, AttributeError):  # no stderr to say it on
        print(f"{command}: {text}", file=sys.stderr)
    logging.getLogger("pyruntime").debug("traceback", exc_info=error)
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
