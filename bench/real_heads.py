"""Our attention on a model's own heads and on hostile ones, against random-normal of their shape.

Kernels may put off the rescaling of their sums while a row's maximum grows little; what that is
worth depends on the data. Four sets of one shape, interleaved, burst clocks, GPU time:

normal          random-normal Q, K, V: a row's maximum settles after a few tiles of keys
real            Q, K, V of every layer of a model for the text of docs/, computed in NumPy
growing to 0    the nearer a key is to the first, the larger its score, by STEP nats in 64 keys:
                a kernel that walks from the diagonal down meets a new maximum in every tile
growing to end  the other way round, for kernels that walk up

Each result is compared with float32 before it is timed. A figure is the time of all layers, one
after the other, divided by their number.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attention_cases import Case
from numpy.typing import ArrayLike, NDArray
from peers import versions
from regimes import REST, ROUNDS, WORK_MS, interleaved

from pyruntime.errors import PyruntimeError
from pyruntime.gguf import GGUFFile
from pyruntime.hub import resolve
from pyruntime.measure.records import identity, save_record
from pyruntime.measure.telemetry import Telemetry
from pyruntime.model.config import ModelConfig
from pyruntime.reference.model import ReferenceModel
from pyruntime.text.tokenizer import Tokenizer
from pyruntime.tools.arms import require_gpu

ROOT = Path(__file__).parents[1]
NT = 2000
STEP = 10.0  # nats by which the maximum grows in TILE keys, far beyond any threshold in use
TILE = 64

Half = NDArray[np.float16]
Heads = tuple[Half, Half, Half]  # q [rows, heads, head dim]; k, v [K/V heads, keys, head dim]


def real(model: str, nt: int) -> list[Heads]:
    """`heads_of` the first `nt` tokens of docs/*.md."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    with GGUFFile.open(resolve(model)) as file:
        return heads_of(file, Tokenizer.from_metadata(file.metadata).encode(text)[:nt])


def heads_of(file: GGUFFile, ids: ArrayLike) -> list[Heads]:
    """What the attention of each layer is given for a prompt, rounded to fp16."""
    model = ReferenceModel(file, ModelConfig.from_gguf(file), precision="fp16")
    queries: list[Half] = []
    rounded = model._rounded

    def keep(x: Any, what: str) -> Any:
        x = rounded(x, what)
        if what.endswith(": Q"):
            queries.append(x.astype(np.float16))
        return x

    model._rounded = keep
    cache = model.new_cache(np.size(ids))
    model.forward(ids, cache)
    k, v = cache.k.astype(np.float16), cache.v.astype(np.float16)
    return list(zip(queries, k, v, strict=True))


def save_heads(path: Path, layers: list[Heads]) -> None:
    """Writes layers for `load_heads`."""
    stacked = zip(*layers, strict=True)
    np.savez_compressed(path, **{n: np.stack(x) for n, x in zip("qkv", stacked, strict=True)})


def load_heads(path: Path) -> list[Heads]:
    """Reads what `save_heads` wrote."""
    with np.load(path) as file:
        return list(zip(*(file[name] for name in "qkv"), strict=True))


def growing(rng: np.random.Generator, like: Heads, to_end: bool) -> Heads:
    """Heads of a shape whose scores q k / sqrt(head dim) grow by about STEP in TILE keys.

    Args:
        to_end: the largest is that of the last key, not of the first.
    """
    q, k, v = (rng.standard_normal(x.shape, np.float32) for x in like)
    keys, head_dim = k.shape[1:]
    place = np.arange(keys) if to_end else np.arange(keys)[::-1]
    # Along (1, …, 1) / sqrt(head dim): q holds 8 times it, and k what makes q k grow as wanted.
    q += 8 * head_dim**-0.5
    k += (place * (STEP / TILE / 8))[:, None].astype(np.float32)
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def sets(layers: list[Heads]) -> dict[str, Callable[[], list[Heads]]]:
    """Each set by name, made when it is asked for."""
    rng = np.random.default_rng(0)

    def normal(like: Heads) -> Heads:
        q, k, v = (rng.standard_normal(x.shape, np.float32).astype(np.float16) for x in like)
        return q, k, v

    return {
        "normal": lambda: [normal(like) for like in layers],
        "real": lambda: layers,
        "growing to 0": lambda: [growing(rng, like, to_end=False) for like in layers],
        "growing to end": lambda: [growing(rng, like, to_end=True) for like in layers],
    }


def measure(args: argparse.Namespace, layers: list[Heads]) -> dict[str, Any]:
    """Times every set; ours, and what else there is of ours.

    Raises:
        ArithmeticError: a result is not what float32 gives.
    """
    from attention_contestants import our_choices
    from stopwatch import Gpu, Graph, Stopwatch

    gpu = Gpu()
    (rows, heads, head_dim), kv_heads = layers[0][0].shape, len(layers[0][1])
    case = Case("real", heads, kv_heads, head_dim, ((rows, 0),))
    graphs, contestants, errors = {}, {}, {}  # a graph runs over its contestant's memory
    with gpu.device.current(), Telemetry(gpu.device) as telemetry:
        watch = Stopwatch(gpu)
        for name, make in sets(layers).items():
            works = _works(gpu, case, make())
            for name_of_ours, choice in our_choices(gpu, case, args.rows).items():
                contestant = _one_by_one(gpu, works, choice)
                graph = Graph(gpu, contestant, watch)
                key = f"{name}: {name_of_ours}"
                graphs[key], contestants[key] = graph, contestant
                errors[key] = _error(gpu, graph, works, key)
        readings = interleaved(
            graphs, partial(watch.reading, ms=WORK_MS), rounds=ROUNDS, rest=REST, warm_up=1
        )
        watch.close()
    launches = [launch for contestant in contestants.values() for launch in contestant.launches]
    return {
        **identity(gpu.device, launches, args.commit),
        "versions": versions(),
        "shape": {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rows": rows},
        "layers": len(layers),
        "relative_error": errors,
        "ms": {key: [ms / len(layers) for ms, _ in raw] for key, raw in readings.items()},
        "mhz": {key: [mhz for _, mhz in raw] for key, raw in readings.items()},
        "clocks": telemetry.record(),
    }


def _works(gpu: Any, case: Case, layers: list[Heads]) -> list[Any]:
    from attention_contestants import Work

    works = [Work(gpu, case) for _ in layers]
    for work, heads in zip(works, layers, strict=True):
        work.load(*heads)
    return works


def _one_by_one(gpu: Any, works: list[Any], choice: Any) -> Any:
    """A contestant of which one call is that of every layer; a layer's calls follow each other."""
    from attention_contestants import ours
    from stopwatch import Contestant

    parts = [ours(gpu, work, choice) for work in works]

    def enqueue(calls: int) -> Any:
        for part in parts:
            result = part.enqueue(calls)
        return result

    return Contestant(enqueue, parts[0].note, [x for part in parts for x in part.launches])


def _error(gpu: Any, graph: Any, works: list[Any], name: str) -> float:
    """The largest relative error of a layer against float32.

    Raises:
        ArithmeticError: it is too large.
    """
    from attention_contest import TOLERANCE, apart
    from torch.nn.functional import scaled_dot_product_attention

    gpu.stream.synchronize()
    for work in works:
        work.out.fill(0xFF)  # a NaN that nothing may leave there
    graph.replay()
    worst = 0.0
    for work in works:
        heads = (work.torch_q.transpose(0, 1), work.torch_k[0], work.torch_v[0])
        q, k, v = (x.float()[None] for x in heads)
        exact = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        error = apart(work.torch_out, exact[0].transpose(0, 1))
        if not error < TOLERANCE:
            raise ArithmeticError(f"{name}: {error:.4g} from float32 in relative norm")
        worst = max(worst, error)
    return worst


def report(record: dict[str, Any]) -> list[str]:
    """Lines: the median of each set and kernel, and how it stands to random-normal data."""
    medians = {key: statistics.median(ms) for key, ms in record["ms"].items()}
    lines = []
    for key, ms in medians.items():
        name, choice = key.split(": ")
        lines.append(
            f"{name:<16}{choice:<36}{1e3 * ms:9.2f} us a layer"
            f"{ms / medians[f'normal: {choice}']:8.3f}x normal"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("real_heads", description=__doc__, formatter_class=verbatim)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a GGUF file or smollm2")
    source.add_argument("--heads", type=Path, metavar="NPZ", help="what --keep wrote")
    parser.add_argument("--keep", type=Path, metavar="NPZ", help="write the heads, measure nothing")
    parser.add_argument("--nt", type=int, default=NT)
    parser.add_argument("--layers", type=int, help="so many, evenly spaced, instead of all")
    parser.add_argument("--rows", action="store_true", help="every row of our kernel table, too")
    parser.add_argument("--save", type=Path, default=Path("bench/results/real-heads.json"))
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args(argv)
    try:
        if not args.keep:
            require_gpu("real_heads")
        layers = load_heads(args.heads) if args.heads else real(args.model, args.nt)
        if args.layers:
            wanted = np.linspace(0, len(layers) - 1, args.layers).round().astype(int)
            layers = [layers[i] for i in wanted]
        if args.keep:
            save_heads(args.keep, layers)
            return 0
        record = measure(args, layers)
    except (PyruntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except ModuleNotFoundError as error:
        print(f"real_heads: the libraries are missing: {error}", file=sys.stderr)
        return 2
    save_record(args.save, "real-heads", record)
    print("\n".join(report(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
