"""Ours, FlashAttention-3 and cuDNN's attention on the same data, as functions that enqueue calls.

Needs torch, and the wheel fa3-fwd for FlashAttention-3. Ours and cuDNN compute in fp16;
that wheel takes bf16 alone, so it is given the same numbers rounded to bf16. Each gets Q as
[rows, heads, head dim] and K, V as its own callers lay them out: ours and cuDNN [K/V head]
[position][head dim], FlashAttention-3 [position][K/V head][head dim].
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from attention_cases import Case
from numpy.typing import NDArray
from stopwatch import Contestant, Gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice, choose, packings
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, Schedule, Workspace, key_maps

SEQUENCE = np.dtype("<4i4, <3u8")  # `Sequence` of cuda/core/live.cuh


LAYERS = 28  # calls for which one schedule serves, as in a model


class UnfitError(Exception):
    """A library cannot take a case; the text says why."""


class Work:
    """Q, K, V and our result of a case, in fp16, shared with torch; random-normal until `load`.

    Attributes:
        q, out: [rows, heads * head dim], with the views torch_q, torch_out [rows, heads, head dim].
        k, v: [K/V heads][keys][head dim] of every sequence, one after the other, with the lists of
            views torch_k, torch_v [K/V heads, keys, head dim].
    """

    def __init__(self, gpu: Gpu, case: Case, seed: int = 0) -> None:
        self.case = case
        self._maps: list[DeviceArray] = []
        torch.manual_seed(seed)
        by_head = (case.rows, case.heads, case.head_dim)
        self.q, q = gpu.normal(case.rows, case.heads * case.head_dim)
        self.out, out = gpu.normal(case.rows, case.heads * case.head_dim)
        self.torch_q, self.torch_out = q.view(by_head), out.view(by_head)
        self.k, k = gpu.normal(case.kv_heads * sum(case.keys), case.head_dim)
        self.v, v = gpu.normal(case.kv_heads * sum(case.keys), case.head_dim)
        self.torch_k, self.torch_v = (
            [part.view(case.kv_heads, -1, case.head_dim) for part in cache.split(self._cache_rows)]
            for cache in (k, v)
        )

    @property
    def _cache_rows(self) -> list[int]:
        return [self.case.kv_heads * keys for keys in self.case.keys]

    def load(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Takes other values of one sequence: q [rows, heads, head dim], k, v like torch_k[0]."""
        for view, values in ((self.torch_q, q), (self.torch_k[0], k), (self.torch_v[0], v)):
            view.copy_(torch.as_tensor(values))

    def sequences(self, library: Library) -> NDArray[Any]:
        """`Sequence` of cuda/core/live.cuh of each, as bytes."""
        found = np.zeros(len(self.case.sequences), SEQUENCE)
        row = cache = 0
        for i, ((rows, before), more) in enumerate(
            zip(self.case.sequences, self._cache_rows, strict=True)
        ):
            shape = (self.case.kv_heads, rows + before, self.case.head_dim)
            offset = 2 * cache * self.case.head_dim
            k, v = (x.view(offset, shape, np.float16) for x in (self.k, self.v))
            maps = DeviceArray(library.device, *MAPS_LAYOUT).upload(key_maps(library, k, v))
            self._maps.append(maps)
            found[i] = ((row, rows, before, rows + before), (k.ptr, v.ptr, maps.ptr))
            row, cache = row + rows, cache + more
        return found.view(np.uint8)


def ours(gpu: Gpu, work: Work, choice: Choice) -> Contestant:
    """Our operation. All that this file knows of how it is called is here."""
    case = work.case
    table = work.sequences(gpu.library)
    sequences = DeviceArray(gpu.device, table.shape, np.uint8).upload(table)
    header = np.array([case.rows, len(case.sequences), 0, NO_OVERFLOW], np.int32)
    live = DeviceArray(gpu.device, header.shape, np.int32).upload(header)
    workspace = Workspace(
        gpu.library, head_dim=case.head_dim, heads=case.heads,
        max_rows=case.rows, max_sequences=len(case.sequences),
    )  # fmt: skip

    def record(calls: int) -> Program:
        program = Program()
        schedule = Schedule(
            gpu.library, choice, live=live, sequences=sequences, heads=case.heads,
            kv_heads=case.kv_heads, max_rows=max(rows for rows, _ in case.sequences),
            max_sequences=len(case.sequences), workspace=workspace,
        )  # fmt: skip
        for call in range(calls):
            if call % LAYERS == 0:
                schedule.record(program)
            attention(program, schedule, q=work.q, out=work.out, layer=0, scale=case.head_dim**-0.5)
        return program

    programs = {1: record(1)}

    def enqueue(calls: int) -> torch.Tensor:
        if calls not in programs:
            programs[calls] = record(calls)
        programs[calls].run(gpu.stream)
        return work.torch_out

    launches = programs[1].launches
    return Contestant(enqueue, ", ".join(x.kernel.name for x in launches), launches)


def our_choices(gpu: Gpu, case: Case, rows: bool) -> dict[str, Choice]:
    """Name of a contestant -> how it works: ours, and the invariant variant if that differs.

    Args:
        rows: every row of the kernel table in each packing, too.
    """
    shape = {"head_dim": case.head_dim, "heads": case.heads, "kv_heads": case.kv_heads}
    size = {
        "max_rows": max(rows for rows, _ in case.sequences),
        "max_keys": max(case.keys),
        "max_sequences": len(case.sequences),
    }
    found = {"ours": choose(gpu.library, **shape, **size)}
    invariant = choose(gpu.library, **shape, **size, variant="invariant")
    if invariant != found["ours"]:
        found["invariant"] = invariant
    for kernel in gpu.library.family("attention") if rows else ():
        tile = kernel.spec.tile
        if tile["hd"] == case.head_dim and not tile.get("cap", 0):
            for choice in packings(kernel, case.heads, case.kv_heads):
                found[f"{kernel.name} pack {choice.pack}"] = choice
    return found


def fa3(gpu: Gpu, work: Work) -> Contestant:
    """FlashAttention-3, with the defaults of its function for each kind of case.

    Those split no keys for prompts, and as a heuristic says where a cache is continued.

    Raises:
        UnfitError: it is not installed, or not for this torch.
    """
    try:
        import fa3_fwd_interface as library
    except (ImportError, OSError) as error:
        raise UnfitError(f"fa3-fwd: {error}") from None
    case = work.case
    q = work.torch_q.bfloat16()
    k, v = (
        torch.cat([cache.transpose(0, 1) for cache in caches]).bfloat16()
        for caches in (work.torch_k, work.torch_v)
    )
    name = "flash_attn_func"
    arguments: tuple[Any, ...] = (q[None], k[None], v[None])
    if len(case.sequences) > 1:
        name = "flash_attn_varlen_func"
        lengths = ([rows for rows, _ in case.sequences], case.keys)
        ends = [torch.tensor([0, *accumulate(x)], dtype=torch.int32).cuda() for x in lengths]
        arguments = (q, k, v, *ends, *map(max, lengths))
    elif case.sequences[0][1]:
        name = "flash_attn_with_kvcache"
    call = partial(
        getattr(library, name), *arguments, softmax_scale=case.head_dim**-0.5, causal=True
    )

    def enqueue(calls: int) -> torch.Tensor:
        for _ in range(calls):
            result = call()
        return result.view(q.shape)

    return Contestant(enqueue, name)


def cudnn(gpu: Gpu, work: Work) -> Contestant:
    """torch's scaled_dot_product_attention on cuDNN.

    Its own causal mask begins at the first key, so where a cache is continued it gets a dense one.

    Raises:
        UnfitError: several sequences.
    """
    case = work.case
    if len(case.sequences) > 1:
        raise UnfitError("scaled_dot_product_attention takes no packed prompts")
    ((rows, before),) = case.sequences
    q, k, v = work.torch_q.transpose(0, 1)[None], work.torch_k[0][None], work.torch_v[0][None]
    mask, note = None, "causal"
    if before and rows == 1:
        note = "no mask"
    elif before:
        note = "a dense mask"
        seen = torch.ones(rows, before + rows, dtype=torch.bool, device="cuda").tril(before)
        mask = torch.zeros_like(seen, dtype=torch.float16).masked_fill(~seen, -math.inf)

    def enqueue(calls: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for _ in range(calls):
                result = scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=not before, scale=case.head_dim**-0.5,
                    enable_gqa=True,
                )  # fmt: skip
        return result[0].transpose(0, 1)

    return Contestant(enqueue, note)
