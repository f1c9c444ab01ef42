"""Which attention kernel, and how its rows are laid out, for prompts of a given length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyruntime.cubin.installed import installed_specs
from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel, Library
from pyruntime.errors import UnsupportedModelError

WARPGROUP_ROWS = 64
_RULES = ("auto", "invariant")
# "auto" is the fastest of these; "invariant" the first that there is, without what makes a row's
# result depend on more than its own keys.
_BEST = ("wgmma", "fast")
# mma.sync: a wide row tile reads K and V less often, a narrow one gives more blocks: wide only
# where the blocks still go this many times round the device, so that short causal tiles can fill
# the gaps.
_BLOCKS_PER_SM = 3
# Microseconds, fitted to timings on an H200 at full clock. mma.sync: of a launch, of a key tile.
_MMA_LAUNCH, _MMA_TILE = 0.8, 1.9
# wgmma: of a launch; of a part beside its key tiles; of adding up one piece of a split tile.
_LAUNCH, _PART, _PIECE = 4.5, 0.5, 1.5
# Of a key tile on a busy SM: per thousand scores (the softmax) and per million multiplications of
# one product; more where few warpgroups, or blocks of one, share the SM and wait together.
_SCORES, _PRODUCTS = 0.027, 0.48
_WAITING = {(1, 1): 1.65, (1, 2): 1.21, (2, 1): 1.1, (3, 1): 1.0}  # (warpgroups, blocks)
# One after the other, by its keys: what a key tile takes at least.
_CHAIN, _CHAIN_KEY = 0.6, 0.0075
_LONG = 1 << 15  # keys that an unknown number of earlier ones stands for


@dataclass(frozen=True)
class Choice:
    """A kernel, how many heads it packs into a tile, and whether keys may be split into parts."""

    kernel: Kernel
    pack: int = 1
    splits: bool = False

    @property
    def scheduled(self) -> bool:
        """The kernel works through a list that a schedule makes."""
        return "warpgroups" in self.kernel.spec.tile

    @property
    def warpgroups(self) -> int:
        """That work on a row tile of a scheduled kernel."""
        return int(self.kernel.spec.tile["warpgroups"])

    @property
    def tokens(self) -> int:
        """Of a row tile."""
        if not self.scheduled:
            return int(self.kernel.spec.tile["tq"])
        return self.warpgroups * (WARPGROUP_ROWS // self.pack)

    def workers(self, sm_count: int) -> int:
        """Blocks of a scheduled kernel that the device holds."""
        return sm_count * int(self.kernel.spec.tile["blocks"])


def variants(library: Library) -> dict[str, list[int]]:
    """The attention variants that run on this device, and their head dims in ascending order."""
    return _variants(kernel.spec for kernel in library.family("attention"))


def installed_variants() -> dict[str, list[int]]:
    """`variants` of the installed cubins for any device. Raises CubinError."""
    return _variants(spec for spec in installed_specs() if spec.family == "attention")


def check_variant(variant: str) -> None:
    """Refuses a name that `choose` takes on no device.

    Raises:
        ValueError: no installed kernel is of that variant; the text lists those that there are.
        CubinError: there are no cubins to tell.
    """
    if variant in _RULES:
        return
    known = installed_variants()
    if str(variant).replace("-", "_") not in known:
        raise ValueError(f"attention {variant!r} is not known; {_listed(known)}")


def _variants(specs: Iterable[KernelSpec]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for tile in sorted((spec.tile for spec in specs), key=lambda t: t["hd"]):
        dims = found.setdefault(str(tile["variant"]), [])
        if tile["hd"] not in dims:
            dims.append(int(tile["hd"]))
    return dict(sorted(found.items()))


def serves(spec: KernelSpec, *, windowed: bool, capped: bool) -> bool:
    """Rows with `cap` in their tile cap the scores and no others do; a window is a parameter."""
    takes_window = any(p.name == "window" for p in spec.params)
    return bool(spec.tile.get("cap", 0)) == capped and (takes_window or not windowed)


def choose(
    library: Library,
    *,
    head_dim: int,
    heads: int,
    kv_heads: int,
    max_rows: int,
    max_keys: int | None = None,
    max_sequences: int = 1,
    window: int | None = None,
    capped: bool = False,
    variant: str = "auto",
) -> Choice:
    """The variant's kernel that should be done soonest with `max_rows` rows.

    Args:
        max_keys: that the last row sees; many if it is not known.
        window: keys that a row sees, if not all. capped: whether there will be a soft-cap.
        variant: "auto" (the fastest), "invariant" (the fastest of those that give a row the same
            bits whatever its neighbours are and however its prompt was cut), or a key of
            `variants`; "-" is as good as "_" in it.

    Raises:
        ValueError: no such variant. UnsupportedModelError: it has no kernel for this head dim,
            window or cap. The text lists all that there are, and those that this device has no room
            for.
    """
    invariant = variant == "invariant"
    names = _BEST if variant in _RULES else (variant.replace("-", "_"),)
    found: dict[str, list[Kernel]] = {}
    for kernel in library.family("attention"):
        tile = kernel.spec.tile
        if tile["hd"] == head_dim and serves(
            kernel.spec, windowed=window is not None, capped=capped
        ):
            found.setdefault(str(tile["variant"]), []).append(kernel)
    named = [found[name] for name in names if name in found]
    if not named:
        needs = " with a sliding window" * (window is not None) + " with capped scores" * capped
        raise _missing(library, head_dim, variant, names, needs)
    if invariant:
        named = named[:1]
    keys = max_rows + _LONG if max_keys is None else max_keys
    choices = []
    for kernels in named:
        if not Choice(kernels[0]).scheduled:
            choices.append(_widest(library, kernels, max_rows, heads * max_sequences))
            continue
        if invariant:
            widest = max(kernels, key=lambda k: int(k.spec.tile["warpgroups"]))
            kernels = [k for k in kernels if k.spec.tile["tkv"] == widest.spec.tile["tkv"]]
        choices += [c for k in kernels for c in packings(k, heads, kv_heads, not invariant)]
    sm_count = library.device.sm_count
    return min(
        choices,
        key=lambda c: _microseconds(c, heads, max_rows, keys, window, max_sequences, sm_count),
    )


def packings(kernel: Kernel, heads: int, kv_heads: int, splits: bool = True) -> list[Choice]:
    """The ways to use a kernel; only one where it is not scheduled."""
    if not Choice(kernel).scheduled:
        return [Choice(kernel)]
    group = heads // kv_heads
    may_split = splits and bool(kernel.spec.tile["splits"])
    packs = {1, group} if group <= WARPGROUP_ROWS else {1}
    return [Choice(kernel, pack, may_split) for pack in sorted(packs)]


def _widest(library: Library, kernels: list[Kernel], max_rows: int, columns: int) -> Choice:
    """The widest row tile that keeps the device busy, else the narrowest."""
    choices = [Choice(k) for k in sorted(kernels, key=lambda k: int(k.spec.tile["tq"]))]
    wanted = _BLOCKS_PER_SM * library.device.sm_count
    busy = [c for c in choices[1:] if -(-max_rows // c.tokens) * columns >= wanted]
    return (choices[:1] + busy)[-1]


def _microseconds(
    choice: Choice,
    heads: int,
    rows: int,
    keys: int,
    window: int | None,
    sequences: int,
    sm_count: int,
) -> float:
    """Of one launch for `sequences` prompts of this size."""
    tile = choice.kernel.spec.tile
    tiles, step = -(-rows // choice.tokens), int(tile["tkv"])
    seen = keys if window is None else window + choice.tokens + step
    lengths = [-(-min(keys - i * choice.tokens, seen) // step) for i in range(tiles)]
    columns = sequences * heads // choice.pack
    level = columns * sum(lengths) / sm_count  # key tiles of an SM
    if not choice.scheduled:
        return _MMA_LAUNCH + _MMA_TILE * max(lengths[0], level)
    scores = WARPGROUP_ROWS * choice.warpgroups * step
    busy = _SCORES * scores / 1e3 + _PRODUCTS * scores * int(tile["hd"]) / 1e6
    busy *= _WAITING[choice.warpgroups, int(tile["blocks"])]
    chain = max(1.06 * busy, _CHAIN + _CHAIN_KEY * step)
    even = level * busy + columns * tiles / choice.workers(sm_count) * _PART
    whole = max(even, lengths[0] * chain + _PART)
    if choice.splits:
        pieces = max(lengths[0] * sm_count * int(tile["blocks"]) / (columns * sum(lengths)), 1)
        # Heads that share K and V but no tile read them at different times, from further away.
        apart = 1.2 if choice.pack == 1 else 1.0
        split = even * apart + chain + _PIECE * (1 + min(pieces, lengths[0] ** 0.5))
        whole = min(whole, split)
    return _LAUNCH + whole


def _missing(
    library: Library, head_dim: int, variant: str, names: tuple[str, ...], needs: str
) -> Exception:
    known = variants(library)
    refused = [text for kernel, text in library.refused.items() if kernel.startswith("attention_")]
    listed = "; ".join([_listed(known), *refused])
    if any(name in known for name in names):
        return UnsupportedModelError(
            f"attention {variant!r} is not supported at head dim {head_dim}{needs}; {listed}"
        )
    return ValueError(f"attention {variant!r} is not known; {listed}")


def _listed(known: dict[str, list[int]]) -> str:
    named = (f"{name} (head dims {', '.join(map(str, dims))})" for name, dims in known.items())
    return f"there are {', '.join([*_RULES, *named])}"
