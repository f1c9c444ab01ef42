"""`pyruntime eval`: EleutherAI's lm-evaluation-harness on a GGUF model."""

from __future__ import annotations

import sys

from pyruntime.errors import ToolError

HELP = """usage: pyruntime eval --model_args pretrained=MODEL[,OPTION=VALUE...] --tasks TASK [...]

Runs EleutherAI's lm-evaluation-harness on a GGUF model (docs/clients/lm-eval.md). Ours are only:

  --model pyruntime   the default
  --model_args        pretrained=MODEL (a .gguf file, an alias, or hf:owner/repo/file.gguf),
                      max_length, prefix_token_id, and options of Engine.load, such as weights,
                      kv_dtype, max_tokens and kv_tokens
  --device            auto (default), cpu, or cuda:N
  --batch_size        no effect: requests are packed into passes of max_tokens rows

All arguments go to the harness, those of `pyruntime eval ls tasks` and `validate`, too.
"""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    asked_help = argv in ([], ["-h"], ["--help"])
    if asked_help:
        print(HELP)
        argv = ["run", "--help"]
    elif argv[0].startswith("-"):
        argv = ["run", *argv]
    try:
        from pyruntime.clients.lm_eval import MODEL
    except ToolError as error:
        if not asked_help:
            raise
        print(error)
        return 0
    from lm_eval.__main__ import HarnessCLI, setup_logging  # isort: skip

    before, sys.argv = sys.argv, ["pyruntime eval", *argv]  # where the harness looks for them
    try:
        harness = HarnessCLI()
        args = harness.parse_args()
    finally:
        sys.argv = before
    if args.command == "run" and args.config is None:
        args.model = args.model or MODEL
        if args.model == MODEL:
            args.device = args.device or "auto"  # the harness's own default is cuda:0
    setup_logging()
    try:
        harness.execute(args)
    except ImportError as error:
        raise ToolError(
            f"lm-evaluation-harness: {error} (other models, and some tasks, need extras of the "
            "harness's own, such as 'lm-eval[hf]')"
        ) from error
    return 0
