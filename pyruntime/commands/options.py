"""Arguments and output that the model commands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyruntime.engine import Engine


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL."""
    parser.add_argument(
        "model", help="a .gguf file, an alias (smollm2), or hf:owner/repo/file.gguf"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_run(parser: argparse.ArgumentParser) -> None:
    """MODEL, the prompt and how it runs."""
    add_model(parser)
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or none: standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from this UTF-8 file (one line "
                        "end at its end is not part of it)")  # fmt: skip
    parser.add_argument("--ids", help="token ids, separated by commas, instead of a text")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument("--system", help="system message (with --chat)")
    add_engine(parser)
    add_json(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options of `Engine.load` that `loaded` passes on."""
    parser.add_argument("--device", default="auto", help="auto (default), cpu, or cuda:N")
    parser.add_argument("--max-tokens", type=int, help="rows of one pass; longer prompts take more")
    parser.add_argument(
        "--weights", default="auto", metavar="MODE",
        help="on a GPU: fp16, dequantized when loaded; per-layer, in less memory, dequantized a "
        "layer ahead in each pass; int8, in the least memory, with activations rounded to 8 bits; "
        "auto (default), the best of them that fits",
    )  # fmt: skip
    parser.add_argument(
        "--attention", default="auto", metavar="VARIANT",
        help="auto (default, the fastest kernel), invariant, or a variant by name: "
        "wgmma, fast, r46_base, r46, r48, r50, r57 (docs/attention.md)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype", default="f16", metavar="TYPE",
        help="what the K/V cache holds: f16 (default), or e4m3, in about half the memory",
    )  # fmt: skip
    parser.add_argument(
        "--graphs", default="auto", metavar="MODE",
        help="on a GPU: auto (default), lengths of prompts that come again are replayed as a CUDA "
        "graph; off, kernels are always launched one by one",
    )  # fmt: skip
    parser.add_argument(
        "--exact", default="fast", metavar="CLASS",
        help="on a GPU: fast (default), or invariant: a row has the same bits whatever is run "
        "beside it and however its prompt was cut",
    )  # fmt: skip


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The text or token ids that the arguments name. Comes before loading: mistakes show at once.

    Raises:
        ValueError: none, more than one, empty, or not UTF-8. OSError: the file cannot be read.
    """
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat")
    if args.ids is not None:
        return _parse_ids(args)
    if args.file is not None and args.prompt is not None:
        raise ValueError("a prompt and --file: give one")
    text = _read_text(args)
    if not text:
        raise ValueError("the prompt is empty")
    return text


def _read_text(args: argparse.Namespace) -> str:
    if args.file is None and args.prompt not in (None, "-"):
        return str(args.prompt)
    if args.file is None and args.prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument, with --file, or on standard input")
    data = args.file.read_bytes() if args.file is not None else sys.stdin.buffer.read()
    try:
        text = str(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        where = args.file if args.file is not None else "standard input"
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _parse_ids(args: argparse.Namespace) -> list[int]:
    if args.prompt is not None or args.file is not None or args.chat:
        raise ValueError("--ids goes with no prompt, --file or --chat")
    try:
        return [int(item) for item in args.ids.split(",")]
    except ValueError:
        fault = "not integers separated by commas" if args.ids.strip() else "it is empty"
        raise ValueError(f"--ids {quoted(args.ids)}: {fault}") from None


def encode_prompt(engine: Engine, args: argparse.Namespace, prompt: str | list[int]) -> Any:
    """Token ids of what `read_prompt` gave, through the chat template if asked for."""
    if not isinstance(prompt, str):
        return prompt
    tokenizer = engine.tokenizer
    if not args.chat:
        return tokenizer.encode(prompt)
    from pyruntime.text.chat import conversation

    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages.append({"role": "user", "content": prompt})
    # The template writes the special tokens itself.
    return tokenizer.encode(conversation(tokenizer, messages), add_special=False)


def token_text(engine: Engine, token: int) -> str | None:
    """How a token is shown: rows of the embedding beyond the vocabulary are empty.

    None if the model has no vocabulary.
    """
    if not engine.has_vocabulary:
        return None
    return engine.tokenizer.token(token) if token < engine.tokenizer.vocab_size else ""


@contextmanager
def loaded(args: argparse.Namespace) -> Iterator[Engine]:
    """The engine that the arguments name, with a progress bar on a terminal while it loads."""
    from tqdm import tqdm

    from pyruntime.engine import Engine

    bar = tqdm(
        desc="loading",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=args.json or not sys.stderr.isatty(),
    )
    with bar:
        engine = Engine.load(
            args.model,
            device=args.device,
            weights=args.weights,
            attention=args.attention,
            kv_dtype=args.kv_dtype,
            graphs=args.graphs,
            exact=args.exact,
            max_tokens=args.max_tokens,
            progress=bar.update,
        )
    with engine:
        yield engine


def print_json(kind: str, record: dict[str, Any]) -> None:
    """Prints a record as strict JSON with its schema."""
    print(json.dumps({"schema": f"pyruntime.{kind}/1", **record}, allow_nan=False, indent=2))


def printable(text: str) -> str:
    """Text of a file for a terminal: control characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def quoted(token: str) -> str:
    """A token for a terminal: in double quotes, control characters escaped."""
    return f'"{printable(token)}"'
