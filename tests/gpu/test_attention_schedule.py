"""Scheduled attention on a GPU: the list, what changes between launches, split keys, races."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from attention_launch import (
    HEAD_DIMS,
    PART,
    SEQUENCE,
    Inputs,
    Prompt,
    Recorded,
    check,
    classes,
    draw,
    draw_uneven,
    label,
    rows_for,
    same_bits,
)

from pyruntime.driver.program import Program
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice, choose
from pyruntime.ops.attention_schedule import Schedule, Workspace

pytestmark = pytest.mark.gpu

Lengths = list[tuple[int, int]]  # rows, and keys before them, of each sequence
HEADS = (4, 2)
L2_BYTES = 60e6


def choices_for(gpu: Any, head_dim: int, *heads: int, **masking: Any) -> list[Choice]:
    """All scheduled ones."""
    able = chain(*classes(gpu.library, *(heads or HEADS), head_dim, **masking).values())
    found = [choice for choice in able if choice.scheduled]
    if not found:
        pytest.skip(f"no scheduled kernel on {gpu.device.name}")
    return found


def listed(
    gpu: Any, choice: Choice, lengths: Lengths, heads: int, kv_heads: int, window: int | None
) -> np.ndarray:
    """The parts up to the end of the list; `maps` is the number of the sequence."""
    table = np.zeros(max(len(lengths), 1), SEQUENCE)
    row0 = 3
    for i, (rows, start) in enumerate(lengths):
        table[i] = (row0, rows, start, start + rows, 0, 0, i)
        row0 += rows
    head_dim = int(choice.kernel.spec.tile["hd"])
    sizes = {"heads": heads, "max_sequences": len(table)}
    workspace = Workspace(gpu.library, head_dim=head_dim, max_rows=row0 - 2, **sizes)
    workspace.arrays["parts"].fill(0xFF)
    schedule = Schedule(
        gpu.library,
        choice,
        live=gpu.upload(np.array([row0, len(lengths), 0, 0], np.int32)),
        sequences=gpu.upload(table.view(np.uint8)),
        kv_heads=kv_heads,
        max_rows=max((rows for rows, _ in lengths), default=0) + 1,
        window=window,
        workspace=workspace,
        **sizes,
    )
    program = Program()
    schedule.record(program)
    gpu.run(program)
    parts = gpu.download(workspace.arrays["parts"])[0].reshape(-1).view(PART)
    count = int(np.argmin(parts["last"] > 0))
    end = parts["last"][count : count + schedule.workers]
    assert len(end) == schedule.workers and not end.any(), "a block would not find the end"
    slots = gpu.download(workspace.arrays["partial_rows"]).shape[0] // choice.warpgroups
    first = parts[:count][(parts[:count]["parts"] > 1) & (parts[:count]["index"] == 0)]
    first = np.sort(first, order="slot")
    assert (first["slot"][1:] >= (first["slot"] + first["parts"])[:-1]).all(), "slots overlap"
    assert len(np.unique(first["group"])) == len(first)
    if len(first):
        assert max(first["group"].max() + 1, (first["slot"] + first["parts"]).max()) <= slots
    return parts[:count]


MIXED = [(64, 0), (0, 9), (1, 2000), (129, 0), (0, 0), (300, 77)]
LISTS: dict[str, Lengths] = {
    "nothing": [],
    "no rows": [(0, 5), (0, 0)],
    "one row": [(1, 0)],
    "mixed": MIXED,
    "mixed, the other way round": MIXED[::-1],
    "many": [(1 + 37 * i % 90, 41 * i % 500) for i in range(200)],
    "as many as there can be": [(i % 3, 7 * i % 100) for i in range(4096)],
    "one row after many": [(1, 32000)],
    "some rows after many": [(200, 32000)],
    "a million": [(3, (1 << 20) - 3), (700, 0)],
}


@pytest.mark.parametrize("lengths", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, (9, 3)), (128, (28, 4)), (256, (4, 4))])
def test_the_list_has_every_key_tile_once(
    gpu: Any, head_dim: int, heads: tuple[int, int], window: int | None, lengths: Lengths
) -> None:
    """Tiles count from a sequence's end, columns are all there, and the longest come first."""
    rows, starts = np.array(lengths, np.int64).reshape(-1, 2).T
    row0 = 3 + np.cumsum(rows) - rows
    for choice in choices_for(gpu, head_dim, *heads):
        found = listed(gpu, choice, lengths, *heads, window)
        keys, tokens = int(choice.kernel.spec.tile["tkv"]), choice.tokens
        columns = heads[0] // choice.pack
        part = {name: found[name].astype(np.int64) for name in PART.names[:-1]}
        of = part["maps"]
        assert (part["row"] - part["token"] == row0[of]).all()
        assert (part["position"] - part["token"] == starts[of]).all()
        assert (part["end"] == (starts + rows)[of]).all()
        assert (part["kv_head"] == part["column"] // (columns // heads[1])).all()
        tile, odd = np.divmod(rows[of] - part["token"], tokens)
        assert not odd.any()

        order = np.lexsort((part["index"], part["column"], tile, of))
        part = {name: values[order] for name, values in part.items()}
        begins, ends = part["index"] == 0, part["index"] == part["parts"] - 1
        expected = [
            (i, t + 1, c)
            for i in range(len(lengths))
            for t in range(-(-rows[i] // tokens))
            for c in range(columns)
        ]
        which = np.stack([part["maps"], tile[order], part["column"]], 1)[begins]
        assert np.array_equal(which, np.array(expected, np.int64).reshape(-1, 3))
        last = (part["position"] + tokens - 1) // keys + 1
        oldest = starts[part["maps"]] + np.maximum(part["token"], 0) - (window or 1 << 40) + 1
        first = np.maximum(oldest, 0) // keys
        assert (part["first"] == first)[begins].all() and (part["last"] == last)[ends].all()
        later = np.flatnonzero(~begins)
        assert begins.sum() == ends.sum() and (part["last"] > part["first"]).all()
        for name, step in (("index", 1), ("parts", 0), ("slot", 0), ("group", 0)):
            assert (part[name][later] == part[name][later - 1] + step).all(), name
        assert (part["first"][later] == part["last"][later - 1]).all()

        assert choice.splits or (part["parts"] == 1).all()
        length = (found["last"] - found["first"]).astype(np.int64)
        apart = int((last - first).max(initial=0)) // 1024 + 1  # lengths so close count as equal
        for own in sections(found):
            assert (np.diff(length[own] // apart) <= 0).all()


def sections(parts: np.ndarray) -> list[np.ndarray]:
    """Numbers of the parts of the K/V heads that are worked on at the same time."""
    places = [np.flatnonzero(parts["kv_head"] == head) for head in np.unique(parts["kv_head"])]
    found: list[np.ndarray] = []
    for own in sorted(places, key=lambda own: int(own[0])):
        if found and own[0] < found[-1][-1]:
            found[-1] = np.union1d(found[-1], own)
        else:
            found.append(own)
    return found


def test_heads_take_turns_where_l2_cannot_hold_them_all(gpu: Any) -> None:
    lengths = [(4096, 28672), (1000, 0)]
    for choice in choices_for(gpu, 128, 32, 8, splits=False):
        found = listed(gpu, choice, lengths, 32, 8, None)
        turns = [len(np.unique(found["kv_head"][own])) for own in sections(found)]
        assert len(turns) > 1 and sum(turns) == 8
        assert max(turns) == 1 or max(turns) * 32768 * 2 * 2 * 128 <= L2_BYTES


def test_keys_are_split_only_where_blocks_would_be_idle(gpu: Any) -> None:
    cases: list[tuple[Lengths, bool]] = [
        ([(1, 20000)], True), ([(64, 20000), (1, 0)], True), ([(100, 0)], False),
        ([(20000, 0)], False), ([(1, 60)] * 300, False),
    ]  # fmt: skip
    for choice in choices_for(gpu, 128, 28, 4):
        for lengths, split in cases:
            found = listed(gpu, choice, lengths, 28, 4, None)
            assert (found["parts"] > 1).any() == (split and choice.splits), (label(choice), lengths)


def check_split(gpu: Any, rng: Any, head_dim: int, lengths: Lengths, **masking: Any) -> None:
    """Accuracy, and the same bits every time, whoever comes last."""
    prompts = [draw_uneven(rng, rows, start, *HEADS, head_dim) for rows, start in lengths]
    loaded: dict[int, Inputs] = {}
    for choice in choices_for(gpu, head_dim, **masking):
        if not choice.splits:
            continue
        keys = int(choice.kernel.spec.tile["tkv"])
        if keys not in loaded:
            inputs = Inputs(gpu, HEADS[0], head_dim, rows_for(prompts), len(prompts))
            loaded[keys] = inputs.load(prompts, window=masking["window"], grain=keys)
        most = max(len(p.q) for p in prompts)
        recorded = Recorded(gpu, loaded[keys], choice, kv_heads=HEADS[1], max_rows=most, **masking)
        outs = recorded()
        assert recorded.split(), str(recorded)
        for prompt, out, again in zip(prompts, outs, recorded(), strict=True):
            assert same_bits({"": again}, {"": out}), str(recorded)
            if len(out):
                check({str(recorded): out}, prompt, **masking)


@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("lengths", [[(1, 3000)], [(40, 2000)], [(130, 1000), (3, 4000)]], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "softcap"), [*((n, None) for n in HEAD_DIMS), (128, 50.0), (256, 50.0)]
)
def test_split_keys(
    gpu: Any, rng: Any, head_dim: int, lengths: Lengths, window: int | None, softcap: float | None
) -> None:
    check_split(gpu, rng, head_dim, lengths, window=window, softcap=softcap)


@pytest.mark.smoke
def test_split_keys_of_packed_sequences_with_a_window(gpu: Any, rng: Any) -> None:
    check_split(gpu, rng, 128, [(65, 1000), (0, 7), (3, 1300), (1, 0)], window=900)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_program_serves_whatever_is_live(gpu: Any, rng: Any, head_dim: int) -> None:
    """Lengths, starts, caches and their maps change between launches, the launches do not."""
    most = 200
    passes: list[Lengths] = [
        [(100, 0), (30, 50)], [(5, 0)], [(0, 4), (1, 0), (most, 900), (64, 64)], [],
        [(1, 3000)], [(most, 0), (most, 1), (most, 2), (most, 70)],
    ]  # fmt: skip
    loads = [
        [draw_uneven(rng, *shape, *HEADS, head_dim) for shape in lengths] for lengths in passes
    ]
    inputs = Inputs(gpu, HEADS[0], head_dim, max(map(rows_for, loads)), 4)
    able = list(chain(*classes(gpu.library, *HEADS, head_dim).values()))
    recorded = [Recorded(gpu, inputs, c, kv_heads=HEADS[1], max_rows=most) for c in able]
    for prompts in loads:
        inputs.load(prompts, slack=len(prompts))
        for run in recorded:
            outs = run()
            assert len(outs) == len(prompts)
            own = max((len(p.q) for p in prompts), default=1) or 1
            fresh = Recorded(gpu, inputs, run.choice, kv_heads=HEADS[1], max_rows=own)()
            for prompt, out, expected in zip(prompts, outs, fresh, strict=True):
                if len(out):
                    check({str(run): out}, prompt)
                assert same_bits({"": out}, {"": expected}), str(run)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_two_windows_share_a_workspace(gpu: Any, rng: Any, head_dim: int) -> None:
    """As in a model of which some layers have a window: both lists first, then layers in turn."""
    prompts = [draw_uneven(rng, *shape, *HEADS, head_dim) for shape in ((150, 0), (70, 1600))]
    inputs = Inputs(gpu, HEADS[0], head_dim, rows_for(prompts), 3).load(prompts)
    workspace = Workspace(
        gpu.library, head_dim=head_dim, heads=HEADS[0], max_rows=inputs.rows, max_sequences=3,
        schedules=2,
    )  # fmt: skip
    for choice in choices_for(gpu, head_dim):
        alone = {
            window: Recorded(gpu, inputs, choice, kv_heads=HEADS[1], max_rows=150, window=window)
            for window in (40, None)
        }
        program = Program()
        schedules = {
            window: Schedule(
                gpu.library, choice, live=inputs.live, sequences=inputs.sequences, heads=HEADS[0],
                kv_heads=HEADS[1], max_rows=150, max_sequences=3, window=window,
                workspace=workspace, place=place,
            )
            for place, window in enumerate(alone)
        }  # fmt: skip
        for schedule in schedules.values():
            schedule.record(program)
        outs = []
        for window in (40, None, None, 40):
            outs.append((window, gpu.empty(inputs.q.shape, np.float16)))
            attention(
                program, schedules[window], q=inputs.q, out=outs[-1][1], layer=0,
                scale=head_dim**-0.5,
            )  # fmt: skip
        gpu.run(program)
        for window, run in alone.items():
            for prompt, out in zip(prompts, run(), strict=True):
                check({str(run): out}, prompt, window=window)
        for window, out in outs:
            expected = gpu.download(alone[window].out)
            assert same_bits({"": gpu.download(out)}, {"": expected}), (label(choice), window)


@pytest.mark.parametrize(
    "lengths", [[(70, 3), (1, 0), (33, 130)], [(20, 3000), (0, 5)]], ids=["small", "split"]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_between_others_give_the_same_bits(
    gpu: Any, rng: Any, head_dim: int, lengths: Lengths
) -> None:
    """What a launch of NaN leaves in shared memory, in sums and in the list is never seen."""
    prompts = [draw_uneven(rng, *shape, *HEADS, head_dim) for shape in lengths]
    rows = 8192  # fill every multiprocessor
    nan = np.full((rows, HEADS[0], head_dim), np.nan, np.float16)
    nans = Prompt(nan, nan[:, :2].swapaxes(0, 1), nan[:, 2:].swapaxes(0, 1))
    others = Inputs(gpu, HEADS[0], head_dim, rows_for([nans]), 3).load([nans])
    inputs = Inputs(gpu, HEADS[0], head_dim, rows_for(prompts), 3).load(prompts, slack=1)
    shared: dict[str, Any] = {"kv_heads": HEADS[1], "workspace": others.workspace}
    for choice in choices_for(gpu, head_dim):
        other = Recorded(gpu, others, choice, max_rows=rows, **shared)
        own = Recorded(gpu, inputs, choice, max_rows=70, **shared)
        outs = own()
        assert own.split() == (choice.splits and lengths[0][1] > 1000)
        for prompt, out in zip(prompts, outs, strict=True):
            if len(out):
                check({str(own): out}, prompt)
        expected, wrong = gpu.download(own.out), []
        for repeat in range(200):
            own.out.fill(0xFF)
            with gpu.device.current():
                other.program.run(gpu.stream)
                own.program.run(gpu.stream)
                gpu.stream.synchronize()
            if not same_bits({"": gpu.download(own.out)}, {"": expected}):
                wrong.append(repeat)
        assert not wrong, f"{own}: {wrong}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_launches_that_overlap_give_the_same_bits(gpu: Any, rng: Any, head_dim: int) -> None:
    """Layer after layer of one pass, each beginning under the tail of the one before."""
    prompts = [draw_uneven(rng, *shape, *HEADS, head_dim) for shape in ((5, 2500), (100, 0))]
    inputs = Inputs(gpu, HEADS[0], head_dim, rows_for(prompts), 2).load(prompts)
    for choice in choices_for(gpu, head_dim):
        own = Recorded(gpu, inputs, choice, kv_heads=HEADS[1], max_rows=100)
        own()
        expected = gpu.download(own.out)
        schedule, layer = own.program.launches
        many = Program([schedule, *[layer] * 27])
        for run in range(40):
            own.out.fill(0xFF)
            gpu.run(many)
            own.results()
            assert same_bits({"": gpu.download(own.out)}, {"": expected}), f"{own}, run {run}"


@pytest.mark.parametrize("variant", ["auto", "invariant"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_choice_is_right_for_its_prompts(
    gpu: Any, rng: Any, head_dim: int, variant: str
) -> None:
    for rows, start in ((1, 0), (130, 0), (1000, 0), (1, 3000), (70, 3000)):
        prompt = draw(rng, rows, start, 8, 2, head_dim)
        choice = choose(
            gpu.library, head_dim=head_dim, heads=8, kv_heads=2, max_rows=rows,
            max_keys=rows + start, variant=variant,
        )  # fmt: skip
        assert variant == "auto" or not choice.splits
        inputs = Inputs(gpu, 8, head_dim, rows_for([prompt]), 1).load([prompt])
        (out,) = Recorded(gpu, inputs, choice, kv_heads=2, max_rows=rows)()
        check({label(choice): out}, prompt)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_invariant_choice_changes_no_bit(gpu: Any, rng: Any, head_dim: int) -> None:
    """However a prompt is cut, and whoever comes with it: each piece with what is chosen for it."""
    heads, kv_heads = 8, 2
    whole = draw_uneven(rng, 1100, 5, heads, kv_heads, head_dim)
    beside = [draw(rng, *shape, heads, kv_heads, head_dim) for shape in ((3, 500), (190, 0))]

    def run(prompts: list[Prompt], which: int) -> np.ndarray:
        most = max(len(p.q) for p in prompts)
        choice = choose(
            gpu.library, head_dim=head_dim, heads=heads, kv_heads=kv_heads, max_rows=most,
            max_sequences=len(prompts), variant="invariant",
        )  # fmt: skip
        inputs = Inputs(gpu, heads, head_dim, rows_for(prompts), len(prompts)).load(prompts)
        return Recorded(gpu, inputs, choice, kv_heads=kv_heads, max_rows=most)()[which]

    expected = run([whole], 0)
    check({"invariant": expected}, whole)
    for step in (1, 64, 129, 700):
        for begin in range(0, 1100, step if step > 1 else 157):
            end = min(begin + step, 1100)
            part = whole.part(begin, end)
            for prompts, which in (([part], 0), ([beside[0], part, beside[1]], 1)):
                out = run(prompts, which)
                assert same_bits({"": out}, {"": expected[begin:end]}), (begin, end, which)
