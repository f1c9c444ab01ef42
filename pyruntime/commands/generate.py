"""`pyruntime generate`: continues a prompt with the likeliest token each time."""

from __future__ import annotations

import argparse
import time

from pyruntime.commands.options import add_run, encode_prompt, loaded, print_json, read_prompt


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser("pyruntime generate", description=__doc__)
    add_run(parser)
    parser.add_argument("-n", type=int, default=64, help="at most so many tokens (default 64)")
    args = parser.parse_intermixed_args(argv)
    if args.n < 0:
        raise ValueError(f"-n {args.n}: it must not be negative")
    prompt = read_prompt(args)
    with loaded(args) as engine:
        ids = encode_prompt(engine, args, prompt)
        started = time.perf_counter()
        tokens = engine.generate(ids, args.n)
        seconds = time.perf_counter() - started
        text = engine.tokenizer.decode(tokens) if engine.has_vocabulary else None
    if args.json:
        print_json(
            "generate",
            {
                "device": engine.path,
                "prompt_tokens": len(ids),
                "tokens": tokens,
                "text": text,
                "seconds": seconds,
            },
        )
    else:
        print(" ".join(map(str, tokens)) if text is None else text)
    return 0
