"""Our kernels and prefill against libraries in one process, interleaved in random order.

torch gives cuBLAS (fp16 products) and scaled_dot_product_attention (cuDNN, FlashAttention-2), and
transformers a whole prefill. Products and attention are GPU time, for both sides: events on one
stream, with the GPU kept busy while the host enqueues. Prefills are wall time. Random-normal data;
weights rotate over more memory than L2 holds. Our products also do what follows them (cases.toml
says what), the libraries' do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from pyruntime.tools.arms import require_gpu
from regimes import interleaved

from pyruntime.driver.device import driver_version
from pyruntime.errors import DriverNotFoundError
from pyruntime.measure.records import head_commit, save_record
from pyruntime.measure.series import REGIMES
from pyruntime.measure.telemetry import Telemetry

CASES = Path(__file__).with_name("cases.toml")
HOST_MS = 0.15  # that torch may take to enqueue one call

Time = Callable[[Callable[[], object]], float]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every case that was asked for; the record grows on disk as it goes."""
    import torch
    from contestants import LAUNCHES, Gpu, Prefills, attentions, products

    from pyruntime.measure.inplace import Hold, spans

    cases = tomllib.loads(CASES.read_text())
    gpu, rest = Gpu(), REGIMES[args.regime].rest
    record: dict[str, Any] = {
        "commit": args.commit or head_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": gpu.device.name,
        "cuda": driver_version(),
        "versions": versions("transformers"),
        "regime": args.regime,
        "gemm": {},
        "attention": {},
        "prefill": {},
        "failed": {},
        "llama_bench": {},
        "quoted": cases["quoted"],
    }

    def keep(kind: str, name: str, build: Callable[[], Mapping[str, Any]], timed: Time) -> None:
        try:
            record[kind][name] = interleaved(build(), timed, rounds=args.rounds, rest=rest)
        except Exception as error:  # one library's refusal must not lose the others' figures
            record["failed"][f"{kind} {name}"] = f"{type(error).__name__}: {error}"
        save_record(args.save, "peers", record)

    with gpu.device.current(), Telemetry(gpu.device) as telemetry:
        hold = Hold(gpu.stream)

        def on_gpu(run: Callable[[], object]) -> float:
            gpu.stream.synchronize()
            hold(LAUNCHES * HOST_MS + 0.5)
            (ms,) = spans(gpu.stream, [run])
            return ms / LAUNCHES

        for case in cases["gemm"]:
            for nt in cases["tokens"]:
                keep("gemm", f"{case['name']} {nt}", partial(products, gpu, case, nt), on_gpu)
        for case in cases["attention"]:
            for nt in cases["tokens"]:
                build = partial(attentions, gpu, case, nt)
                keep("attention", f"{case['name']} {nt}", build, on_gpu)
        hold.close()
        torch.cuda.empty_cache()
        for case in cases["prefill"] if args.model else ():
            both = Prefills(case, args.model, max(cases["tokens"]))
            for nt in cases["tokens"]:
                build = partial(both.contestants, nt)
                keep("prefill", f"{case['name']} {nt}", build, on_wall)
    if args.llama_bench:
        record["llama_bench"] = llama_bench(args.llama_bench, args.model, cases["tokens"])
    record["clocks"] = telemetry.record()
    save_record(args.save, "peers", record)
    return record


def on_wall(run: Callable[[], object]) -> float:
    """Milliseconds until a call has returned with its result."""
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


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


def llama_bench(program: Path, model: Path, tokens: list[int]) -> dict[str, Any]:
    """llama-bench's own report for the same file and prompt lengths."""
    prompts = ",".join(map(str, tokens))
    command = [program, "-m", model, "-p", prompts, "-n", "0", "-fa", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    return {str(row["n_prompt"]): row["samples_ns"] for row in rows} | {"report": rows}


def report(record: Mapping[str, Any]) -> None:
    """Medians, and each peer's time over ours."""
    for kind in ("gemm", "attention", "prefill"):
        for name, raw in record[kind].items():
            medians = {who: statistics.median(ms) for who, ms in raw.items()}
            told = "  ".join(
                f"{who} {ms:.4f} ms" + ("" if who == "ours" else f" ({ms / medians['ours']:.2f}x)")
                for who, ms in medians.items()
            )
            print(f"{kind:<10} {name:<20} {told}")
    for nt, nanoseconds in record["llama_bench"].items():
        if nt != "report":
            rate = 1e9 * int(nt) / statistics.median(nanoseconds)
            print(f"llama-bench {nt:>7} tokens: {rate:,.0f} tok/s")
    for name, text in record["failed"].items():
        print(f"FAILED {name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Qwen2.5-7B shaped file, for whole prefills")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's llama-bench")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--regime", choices=tuple(REGIMES), default="burst")
    parser.add_argument("--save", type=Path, default=Path("bench/results/peers.json"))
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    if args.llama_bench and not args.model:
        parser.error("--llama-bench needs --model")
    try:
        require_gpu("peers")
        record = measure(args)
    except DriverNotFoundError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"peers: the libraries are missing: {error}", file=sys.stderr)
        return 2
    report(record)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
