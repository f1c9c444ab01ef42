"""Attention of made-up prompts on a GPU, through every kernel and packing, and its float64 oracle.

For tests/gpu/test_attention.py and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice, packings, serves
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, Schedule, Workspace, key_maps

Array = np.ndarray[Any, Any]
Results = dict[str, Array]  # of a prompt, by the names of `classes`: [rows, heads, head dim]

HEAD_DIMS = (64, 96, 128, 256)
POISON = (0x7E00, 0xFE19, 0xFFFF)  # NaN
# Sequence of cuda/core/live.cuh: row0, rows, start, capacity, k, v, maps.
SEQUENCE = np.dtype("<i4, <i4, <i4, <i4, <u8, <u8, <u8")
NOWHERE = (0, 1000, 0, 1000, 0, 0, 0)  # an entry that is not in use
# A part of a schedule, as the kernels' header declares it.
_HEADER = Path(__file__).parents[1] / "cuda/kernels/sm_90a/attention_parts.cuh"
_FIELDS = re.findall(r"^  (const .*\*|int32_t) (.*?);", _HEADER.read_text(), re.MULTILINE)
PART = np.dtype(
    [(name, "<u8" if "*" in of else "<i4") for of, names in _FIELDS for name in names.split(", ")]
    + [("padding", "V8")]
)
GAP = 3  # activation rows before, between and after the prompts
# P and O are rounded to fp16 (2^-11 each at most, in a norm less than half of that).
TOLERANCE = 1e-3


@dataclass
class Prompt:
    """q [rows, heads, head dim]; k, v [kv heads, start + rows, head dim], all float16."""

    q: Array
    k: Array
    v: Array

    @property
    def start(self) -> int:
        return self.k.shape[1] - len(self.q)

    def part(self, begin: int, end: int) -> Prompt:
        """Rows [begin, end), continuing a cache that holds what came before them."""
        keys = self.start + end
        return Prompt(self.q[begin:end], self.k[:, :keys], self.v[:, :keys])


def draw(rng: Any, rows: int, start: int, heads: int, kv_heads: int, head_dim: int) -> Prompt:
    """Random-normal."""

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(np.float16)

    cache = (kv_heads, start + rows, head_dim)
    return Prompt(normal(rows, heads, head_dim), normal(*cache), normal(*cache))


def draw_uneven(rng: Any, *shape: int) -> Prompt:
    """Some rows are loud: their maxima grow by orders from tile to tile, those beside them do not.

    What a row's result owes to its neighbours shows in such data only.
    """
    prompt = draw(rng, *shape)
    prompt.q *= rng.choice(np.float16([1, 4, 16]), (*prompt.q.shape[:2], 1))
    return prompt


def oracle(
    prompt: Prompt, scale: float, window: int | None = None, softcap: float | None = None
) -> Array:
    """softmax(scale q k^T) v in float64, [rows, heads, head dim]."""
    q, k, v = (x.astype(np.float64) for x in (prompt.q, prompt.k, prompt.v))
    rows, heads, head_dim = q.shape
    kv_heads, keys, _ = k.shape
    grouped = q.transpose(1, 0, 2).reshape(kv_heads, -1, head_dim)
    scores = scale * (grouped @ k.transpose(0, 2, 1)).reshape(-1, rows, keys)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    behind = prompt.start + np.arange(rows)[:, None] - np.arange(keys)
    scores[:, (behind < 0) | (behind >= (window or np.inf))] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p.reshape(kv_heads, -1, keys) @ v).reshape(heads, rows, head_dim).transpose(1, 0, 2)


def poisoned(shape: tuple[int, ...], pattern: int) -> Array:
    return np.full(shape, pattern, np.uint16).view(np.float16)


def label(choice: Choice) -> str:
    return f"{choice.kernel.name} pack {choice.pack}" + " split" * choice.splits


def classes(
    library: Library,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    splits: bool = True,
) -> dict[str, list[Choice]]:
    """Every way to do it. Those that must give the same bits share a name.

    The name is the variant, with the key tile where kernels of several are scheduled; one that may
    split keys has a name of its own.
    """
    found: dict[str, list[Choice]] = {}
    for kernel in library.family("attention"):
        tile = kernel.spec.tile
        able = serves(kernel.spec, windowed=window is not None, capped=softcap is not None)
        if tile["hd"] != head_dim or not able:
            continue
        for choice in packings(kernel, heads, kv_heads, splits=False):
            name = f"{tile['variant']}" + f" {tile['tkv']}" * choice.scheduled
            found.setdefault(name, []).append(choice)
        for choice in packings(kernel, heads, kv_heads) if splits else ():
            if choice.splits:
                found[label(choice)] = [choice]
    return found


class Inputs:
    """Device memory for launches over up to `rows` activation rows and `sequences` sequences.

    Args:
        max_rows: of the workspace; `rows` by default.

    Attributes:
        q, live, sequences, workspace: what operations take.
        places: the activation rows of each prompt.
    """

    def __init__(
        self,
        gpu: Any,
        heads: int,
        head_dim: int,
        rows: int,
        sequences: int,
        max_rows: int | None = None,
    ) -> None:
        self._gpu, self.heads, self.head_dim = gpu, heads, head_dim
        self.rows, self.max_sequences = rows, sequences
        self.q = gpu.empty((rows, heads * head_dim), np.float16)
        self.live = gpu.empty((4,), np.int32)
        self.sequences = gpu.empty((sequences * SEQUENCE.itemsize,), np.uint8)
        self.workspace = Workspace(
            gpu.library, head_dim=head_dim, heads=heads, max_rows=max_rows or rows,
            max_sequences=sequences,
        )  # fmt: skip
        for name in ("parts", "partial", "partial_rows"):
            self.workspace.arrays[name].fill(0xFF)
        self.places: list[slice] = []
        self._held: list[DeviceArray] = []

    def load(
        self,
        prompts: Sequence[Prompt],
        *,
        layer: int = 0,
        window: int | None = None,
        grain: int = 1,
        slack: int = 40,
        poison: int = POISON[0],
    ) -> Inputs:
        """Puts prompts in, each with a cache of its own, and makes them the live ones.

        Every slot that no row may look at holds `poison`: other layers, `slack` positions per head,
        positions before a window, activation rows that are no prompt's. Without slack the last key
        is the end of the allocation. A kernel may weigh keys by zero that share a key tile of
        `grain` with a window's first: those hold large numbers.
        """
        self._held, self.places = [], []
        q = poisoned(self.q.shape, poison)
        table = np.full(self.max_sequences, np.array(NOWHERE, SEQUENCE))
        row0 = GAP
        for i, p in enumerate(prompts):
            kv_heads, keys, _ = p.k.shape
            self.places.append(slice(row0, row0 + len(p.q)))
            q[self.places[-1]] = p.q.reshape(len(p.q), self.heads * self.head_dim)
            first = max(p.start - window + 1, 0) if window else 0
            shape = (layer + 1 + bool(slack), kv_heads, keys + slack, self.head_dim)
            arrays = []
            for values in (p.k, p.v):
                cache = poisoned(shape, poison)
                cache[layer, :, first // grain * grain : first] = 60000
                cache[layer, :, first:keys] = values[:, first:]
                arrays.append(self._gpu.upload(cache))
            maps = key_maps(self._gpu.library, *arrays)
            arrays.append(DeviceArray(self._gpu.device, *MAPS_LAYOUT).upload(maps))
            table[i] = (row0, len(p.q), p.start, keys + slack, *(a.ptr for a in arrays))
            self._held += arrays
            row0 += len(p.q) + GAP
        self.q.upload(q)
        self.live.upload(np.array([self.rows, len(prompts), 0, 0], np.int32))
        self.sequences.upload(table.view(np.uint8))
        return self


def rows_for(prompts: Iterable[Prompt]) -> int:
    """Activation rows that `Inputs.load` needs."""
    return GAP + sum(len(p.q) + GAP for p in prompts)


class Recorded:
    """A choice's launches over `inputs`, recorded once: `program`, which leaves O in `out`.

    Args:
        workspace: that of `inputs` by default.
    """

    def __init__(
        self,
        gpu: Any,
        inputs: Inputs,
        choice: Choice,
        *,
        kv_heads: int,
        max_rows: int,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        layer: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        self._gpu, self._inputs, self.choice = gpu, inputs, choice
        self._workspace = workspace or inputs.workspace
        self.out = gpu.empty(inputs.q.shape, np.float16)
        self.program = Program()
        schedule = Schedule(
            gpu.library, choice, live=inputs.live, sequences=inputs.sequences, heads=inputs.heads,
            kv_heads=kv_heads, max_rows=max_rows, max_sequences=inputs.max_sequences,
            window=window, workspace=self._workspace,
        )  # fmt: skip
        schedule.record(self.program)
        attention(
            self.program, schedule, q=inputs.q, out=self.out, layer=layer,
            scale=scale or inputs.head_dim**-0.5, softcap=softcap,
        )  # fmt: skip

    def __call__(self) -> list[Array]:
        """Runs, demands untouched memory elsewhere, and returns O of each prompt."""
        self.out.fill(0xFF)
        self._gpu.run(self.program)
        return self.results()

    def results(self) -> list[Array]:
        """What the last run left."""
        result, inputs = self._gpu.download(self.out), self._inputs
        elsewhere = np.ones(len(result), bool)
        for place in inputs.places:
            elsewhere[place] = False
        assert (result.view(np.uint16)[elsewhere] == 0xFFFF).all(), f"{self}: stray store"
        for name in ("counters", "arrived"):
            left = self._gpu.download(self._workspace.arrays[name])
            assert not left.any(), f"{self}: {name} not zero between launches"
        by_head = result.reshape(len(result), inputs.heads, inputs.head_dim)
        return [by_head[place] for place in inputs.places]

    def split(self) -> bool:
        """Whether keys of any row were split into parts in the last run."""
        parts = self._gpu.download(self._workspace.arrays["parts"])[0].reshape(-1).view(PART)
        return bool((parts[: np.argmin(parts["last"] > 0)]["parts"] > 1).any())

    def __str__(self) -> str:
        return label(self.choice)


def launch(
    gpu: Any,
    prompts: list[Prompt],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    layer: int = 0,
    slack: int = 40,
    poison: int = POISON[0],
    unused: int = 0,
    splits: bool = True,
) -> list[Results]:
    """Runs every choice that there is on `prompts`, a sequence each; what it finds for each prompt.

    Demands equal bits within a class, and of a second launch where keys may be split. `unused`
    sequences past the live ones have null caches. See `classes` and `Inputs.load`.
    """
    _, heads, head_dim = prompts[0].q.shape
    kv_heads = prompts[0].k.shape[0]
    longest = max([len(p.q) for p in prompts] + [1000] * bool(unused))
    max_rows = longest + 130  # a row tile more than any sequence has
    loaded: dict[int, Inputs] = {}
    found: list[Results] = [{} for _ in prompts]
    able = classes(
        gpu.library, heads, kv_heads, head_dim, window=window, softcap=softcap, splits=splits
    )
    for name, choices in able.items():
        for choice in choices:
            grain = int(choice.kernel.spec.tile["tkv"]) if window and choice.scheduled else 1
            if grain not in loaded:
                rows, sequences = rows_for(prompts), len(prompts) + unused
                inputs = Inputs(gpu, heads, head_dim, rows, sequences, max_rows)
                loaded[grain] = inputs.load(
                    prompts, layer=layer, window=window, grain=grain, slack=slack, poison=poison
                )
            recorded = Recorded(
                gpu, loaded[grain], choice, kv_heads=kv_heads, layer=layer, scale=scale,
                window=window, softcap=softcap, max_rows=max_rows,
            )  # fmt: skip
            for _ in range(1 + choice.splits):
                for results, out in zip(found, recorded(), strict=True):
                    same = same_bits({name: out}, {name: results.setdefault(name, out)})
                    assert same, f"{recorded} differs from another of {name}, or from itself"
    return found


def same_bits(a: Results, b: Results) -> bool:
    """In all classes of `a`."""
    return bool(a) and all(
        np.array_equal(a[name].view(np.uint16), b[name].view(np.uint16)) for name in a
    )


def check(results: Results, prompt: Prompt, scale: float | None = None, **masking: Any) -> None:
    """Every row of every head within the tolerance of the oracle, in the norm.

    `masking`: window, softcap.
    """
    expected = oracle(prompt, scale or prompt.q.shape[-1] ** -0.5, **masking)
    assert results
    for name, out in results.items():
        error = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
        error = np.nan_to_num(error / np.linalg.norm(expected, axis=-1), nan=np.inf)
        row, head = map(int, np.unravel_index(np.argmax(error), error.shape))
        assert error[row, head] <= TOLERANCE, (
            f"{name}: row {row}, head {head}: relative error {error[row, head]}"
        )
