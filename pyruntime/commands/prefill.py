"""`pyruntime prefill`: a prompt in, the likeliest next tokens out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from pyruntime.commands.options import (
    add_run,
    encode_prompt,
    loaded,
    print_json,
    printable,
    quoted,
    read_prompt,
    token_text,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pyruntime prefill", description=__doc__)
    add_run(parser)
    parser.add_argument("--top", type=int, default=5, help="how many tokens to show (default 5)")
    parser.add_argument(
        "--save", type=Path, help="write the logits, float32 [rows, vocab], as .npy"
    )
    parser.add_argument("--all", action="store_true", help="logits of every row, not of the last")
    parser.add_argument("--repeat", type=int, default=1, help="run so often, report the fastest")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_intermixed_args(argv)
    import numpy as np

    if args.top < 1 or args.repeat < 1:
        raise ValueError("--top and --repeat must be at least 1")
    if args.save is not None and not args.save.parent.is_dir():
        raise ValueError(f"--save {args.save}: there is no folder {args.save.parent}")
    prompt = read_prompt(args)
    with loaded(args) as engine:
        ids = encode_prompt(engine, args, prompt)
        rows: Literal["all", "last"] = "all" if args.all else "last"
        results = [engine.prefill(ids, logits=rows) for _ in range(args.repeat)]
        result = min(results, key=lambda r: r.timings["wall"])
        logits = np.asarray(result.logits)
        if args.save is not None:
            _save(args.save, logits)
        record = _record(engine, logits[-1], result, args.top)
    if args.json:
        print_json("prefill", record)
    else:
        _print(record)
    return 0


def _save(path: Path, logits: Any) -> None:
    import numpy as np

    try:
        with path.open("wb") as out:  # np.save would append .npy to the name
            np.save(out, logits)
    except OSError as error:
        raise OSError(f"--save {path}: {error.strerror or error}") from error


def _record(engine: Any, logits: Any, result: Any, top: int) -> dict[str, Any]:
    import numpy as np

    wide = logits.astype(np.float64)
    logprobs = wide - wide.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = np.argsort(-logprobs, kind="stable")[:top]
    wall = result.timings["wall"]
    return {
        "model": engine.config.name,
        "device": result.path,
        "tokens": result.tokens,
        "seconds": wall,
        "tokens_per_second": result.tokens / wall,
        "timings": result.timings,
        "next": [
            {"id": int(i), "token": token_text(engine, int(i)), "logprob": float(logprobs[i])}
            for i in best
        ],
    }


def _print(record: dict[str, Any]) -> None:
    from math import exp

    texts = [entry["token"] for entry in record["next"]]
    # A model without a vocabulary has ids only.
    shown = [] if None in texts else ["next token", *map(quoted, texts)]
    width = max(map(len, shown), default=0)
    columns = [f"{text:<{width}}  " for text in shown] or [""] * (1 + len(texts))
    print(f"{columns[0]}{'log-prob':>9}  {'prob':>7}  {'id':>7}")
    for column, entry in zip(columns[1:], record["next"], strict=True):
        p = exp(entry["logprob"])
        print(f"{column}{entry['logprob']:>9.4f}  {p:>7.2%}  {entry['id']:>7}")
    name, tokens = printable(record["model"]), record["tokens"]
    print(
        f"{name}: {tokens} token{'s' * (tokens != 1)} in {1e3 * record['seconds']:.2f} ms, "
        f"{record['tokens_per_second']:,.0f} tok/s on {record['device']}"
    )
