"""`pyruntime batch`: scores or embeds a data set, with one engine per GPU or CPU core."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from pyruntime.batch.options import BATCH_TOKENS, DEVICES, PART_ROWS
from pyruntime.commands.options import add_engine, add_json, add_model, print_json, printable

if TYPE_CHECKING:
    from pyruntime.batch.dataset import Report
    from pyruntime.batch.worker import Done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pyruntime batch", description=__doc__, conflict_handler="resolve"
    )
    add_model(parser)
    parser.add_argument("input", help="a .jsonl or .parquet file, or a folder of such files")
    parser.add_argument("output", help="a folder of results; one that is unfinished is continued")
    parser.add_argument("--task", choices=["score", "embed"], default="score", help="default score")
    for name, text in (
        ("prompt", "score: column of prompts, texts or lists of token ids"),
        ("continuation", "score: column of what is scored after them"),
        ("text", "embed: column of texts or lists of token ids"),
        ("id", "column that names rows; made where there is none"),
    ):
        parser.add_argument(
            f"--{name}", default=name, metavar="COLUMN", help=f"{text} (default {name})"
        )
    parser.add_argument("--pooling", choices=["mean", "last"], default="mean", help="embed: of the "
                        "hidden states (default mean)")  # fmt: skip
    parser.add_argument("--normalize", action="store_true", help="embed: vectors of length 1")
    parser.add_argument("--prefix", default="", help="before the names of the columns of results")
    parser.add_argument("--workers", type=int, metavar="N",
                        help="engines (default: one per GPU, or per CPU core)")  # fmt: skip
    parser.add_argument("--address", help="of a Ray cluster (default: Ray is started on this "
                        "machine, for this run)")  # fmt: skip
    parser.add_argument("--part-rows", type=int, default=PART_ROWS, metavar="N",
                        help=f"rows of a file of results (default {PART_ROWS})")  # fmt: skip
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, metavar="N",
                        help=f"tokens packed together (default {BATCH_TOKENS})")  # fmt: skip
    parser.add_argument("--allow-errors", action="store_true",
                        help="exit code 0 even where rows have an error")  # fmt: skip
    add_engine(parser)
    parser.add_argument(
        "--device", choices=DEVICES, default="auto",
        help="auto (default): all GPUs, or else the CPU; CUDA_VISIBLE_DEVICES says which GPUs",
    )  # fmt: skip
    add_json(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; 1: rows have an error, and --allow-errors was not given."""
    args = _parser().parse_args(argv)
    from tqdm import tqdm

    from pyruntime.batch.dataset import run
    from pyruntime.batch.tasks import Embed, Score

    task: Score | Embed = Score(args.prompt, args.continuation)
    if args.task == "embed":
        task = Embed(args.text, args.pooling, args.normalize)
    quiet = args.json or not sys.stderr.isatty()
    with tqdm(unit="row", leave=False, disable=quiet) as bar:

        def progress(done: Done) -> None:
            bar.update(done.rows)

        report = run(
            args.model, args.input, args.output, task=task, device=args.device,
            workers=args.workers, address=args.address, id=args.id, prefix=args.prefix,
            part_rows=args.part_rows, batch_tokens=args.batch_tokens, progress=progress,
            weights=args.weights, attention=args.attention, kv_dtype=args.kv_dtype,
            graphs=args.graphs, exact=args.exact, max_tokens=args.max_tokens,
        )  # fmt: skip
    if args.json:
        print_json("batch-report", asdict(report))
    else:
        _print(report)
    return 1 if report.errors and not args.allow_errors else 0


def _print(report: Report) -> None:
    before = f" ({report.resumed} of them before)" if report.resumed else ""
    rows, files, errors = (f"{n:,}" for n in (report.rows, report.parts, report.errors))
    print(f"{rows} rows in {files} files{before}, {errors} with an error")
    if report.first_error:
        print(f"  such as {printable(report.first_error)}")
    if report.device:
        print(
            f"{report.tokens:,} tokens in {report.seconds:.2f} s with {report.workers} "
            f"worker{'s' * (report.workers != 1)} on {report.device}"
        )
