"""Our products and prefills against the libraries' in one process, interleaved in random order.

Products: ours against cuBLAS, GPU time of CUDA graphs, weights from more memory than L2 holds.
"fused" also do what follows them in a model (cases.toml says what).
Prefills: ours against all of the model's products by cuBLAS and its attention by cuDNN, in one
graph and nothing between them. Ours are timed for their caller and on the GPU.

burst: rest before each timing, clocks as for a single prompt. sustained: back to back, as the power
limit holds them. Random-normal data and weights; models are synthesized.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from peers_cases import (
    CASES,
    Case,
    choose,
    expected_seconds,
    findings,
    table,
)
from regimes import told

from pyruntime.errors import DriverNotFoundError, InputError
from pyruntime.measure.records import identity, load_record, save_record
from pyruntime.measure.telemetry import Telemetry
from pyruntime.tools.arms import require_gpu

KIND = "peers"
MODEL = "qwen2.5-7b"  # that --model and --llama-bench are about


def measure(args: argparse.Namespace, chosen: list[Case]) -> dict[str, Any]:
    """Runs the chosen cases; the record grows on disk as it goes."""
    import torch
    from peers_contest import Field, product
    from stopwatch import Gpu, Stopwatch

    from pyruntime.cubin.installed import installed_code

    gpu = Gpu()
    record: dict[str, Any] = identity(gpu.device, (), args.commit)
    record |= {"versions": versions("transformers"), "cases": {}, "failed": {}, "llama_bench": {}}
    record["quoted"] = CASES["quoted"]
    del record["plan"]  # each case has its own
    code = installed_code(record["architecture"])
    started = time.perf_counter()

    def keep(case: Case, build: Callable[[], dict[str, Any]]) -> None:
        begun = time.perf_counter()
        try:
            record["cases"][case.name] = figure = build()
            record["kernels"] |= {name: code[name] for name in figure["kernels"]}
        except Exception as error:  # the other cases' figures must not be lost
            record["failed"][case.name] = told(error)
        torch.cuda.empty_cache()
        now = time.perf_counter()
        print(f"{now - started:6.1f} s (+{now - begun:4.1f})  {case.name}", flush=True)
        save_record(args.save, KIND, record)

    with gpu.device.current(), Telemetry(gpu.device) as telemetry:
        watch = Stopwatch(gpu)
        for case in (x for x in chosen if x.kind == "gemm"):
            keep(case, partial(product, gpu, watch, case))
        prefills = (x for x in chosen if x.kind == "prefill")
        for name, group in groupby(prefills, key=lambda x: str(x.about["name"])):
            some = list(group)
            with ExitStack() as stack:
                try:
                    path = stack.enter_context(model_file(some[0], args.model))
                    field = Field(gpu, watch, some, path, args.transformers)
                    stack.callback(field.close)
                except Exception as error:
                    record["failed"] |= {case.name: told(error) for case in some}
                    continue
                for case in some:
                    keep(case, partial(field.prefill, case))
                if args.llama_bench and name == MODEL:
                    tokens = [case.tokens for case in some]
                    record["llama_bench"] = llama_bench(args.llama_bench, path, tokens)
                    save_record(args.save, KIND, record)
        watch.close()
    record["seconds"] = time.perf_counter() - started
    record["clocks"] = telemetry.record()
    save_record(args.save, KIND, record)
    return record


@contextmanager
def model_file(case: Case, given: Path | None) -> Iterator[Path]:
    """The file of a case's model: the given one if it is of MODEL, or a new one for a while."""
    from pyruntime.tools.synth import MODELS, write

    name = case.about["name"]
    if given and name == MODEL:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.gguf")
        write(path, name, MODELS[name], case.about["mix"])
        yield path


def versions(*packages: str) -> dict[str, str | None]:
    """Of torch, its libraries and `packages`; None: not installed."""
    import torch

    found: dict[str, str | None] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def llama_bench(
    program: Path, model: Path, tokens: list[int], generated: int = 0
) -> dict[str, Any]:
    """llama-bench's own report for the same file and prompt lengths, or why it "failed".

    By length the nanoseconds of each run; "generation": those of generating so many tokens.
    """
    options = {"-m": model, "-p": ",".join(map(str, tokens)), "-n": generated, "-fa": 1}
    command = [program, *(str(x) for option in options.items() for x in option), "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            return {"failed": f"{program}: exit code {done.returncode}; {last}"}
        rows = json.loads(done.stdout)
        found = {str(row["n_prompt"] or "generation"): row["samples_ns"] for row in rows}
        return found | {"report": rows}
    except (OSError, ValueError, LookupError, TypeError) as error:  # none, or another report
        return {"failed": f"{program}: {told(error)}"}


def report(record: Mapping[str, Any]) -> None:
    """The tables, and what llama-bench has found."""
    print("\n".join(table(record)))
    for key, found in record["llama_bench"].items():
        if key == "failed":
            print(f"llama-bench: {found}")
        elif key != "report":
            rate = 1e9 * int(key) / statistics.median(found)
            print(f"llama-bench {key:>7} tokens: {rate:,.0f} tok/s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--cases", metavar="REGEX", default="", help="those whose name it finds")
    parser.add_argument("--list", action="store_true", help="only names the cases")
    parser.add_argument("--from", dest="source", type=Path, help="show a record; measure nothing")
    parser.add_argument("--model", type=Path, help=f"a {MODEL} shaped file, instead of a new one")
    parser.add_argument("--transformers", action="store_true", help="Hugging Face's prefill, too")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's llama-bench")
    parser.add_argument("--save", type=Path, default=Path("bench/results/peers.json"))
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args(argv)
    try:
        chosen = choose(args.cases, args.quick)
    except re.error as error:
        parser.error(f"--cases {args.cases}: {error}")
    if not chosen:
        parser.error(f"--cases {args.cases}: no such case; --list names all")
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    try:
        if args.source:
            record = load_record(args.source, KIND)
        else:
            require_gpu("peers")
            print(f"{len(chosen)} cases, about {expected_seconds(chosen):.0f} s", flush=True)
            record = measure(args, chosen)
    except (DriverNotFoundError, InputError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"peers: the libraries are missing: {error}", file=sys.stderr)
        return 2
    report(record)
    return 1 if findings(record) else 0


if __name__ == "__main__":
    sys.exit(main())
