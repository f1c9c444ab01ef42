"""What `Engine.load` was asked for: options, sizes and device."""

from __future__ import annotations

import logging
from contextlib import closing

from pyruntime.errors import DriverNotFoundError
from pyruntime.model.config import KV_DTYPES, ModelConfig
from pyruntime.model.tokens import check_count
from pyruntime.ops.attention_choice import check_variant

log = logging.getLogger("pyruntime")

CHOICES = ("weights", "attention", "kv_dtype", "graphs", "overlap", "exact")  # by name
MAX_TOKENS = 4096  # default rows of one pass, if the model's context is that long


def check_options(
    weights: str, attention: str, kv_dtype: str, graphs: str, overlap: str, exact: str
) -> None:
    """Refuses, by name, what does not exist. Raises ValueError; CubinError: see `check_variant`."""
    for name, value, known in (
        ("weights", weights, ("auto", "fp16", "per-layer", "int8")),
        ("kv_dtype", kv_dtype, KV_DTYPES),
        ("graphs", graphs, ("auto", "off")),
        ("overlap", overlap, ("auto", "off")),
        ("exact", exact, ("fast", "invariant")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not supported; known: {', '.join(known)}")
    check_variant(attention)
    if exact == "invariant" and weights == "int8":
        raise ValueError(
            "exact='invariant' goes with no weights 'int8': its products of few rows add up in "
            "another order than those of many"
        )
    if exact == "invariant" and attention not in ("auto", "invariant"):
        raise ValueError(f"exact='invariant' goes with no attention by name, as {attention!r}")


def sizes(config: ModelConfig, max_tokens: int | None, kv_tokens: int | None) -> tuple[int, int]:
    """Rows of one pass, and positions of the internal cache. Raises ValueError."""
    usual = min(MAX_TOKENS, config.context_length)
    rows = usual if max_tokens is None else check_count("max_tokens", max_tokens)
    return rows, max(rows, usual) if kv_tokens is None else check_count("kv_tokens", kv_tokens)


def choose_device(device: str) -> int | None:
    """The ordinal of the GPU to use, or None for NumPy, with a warning unless it was asked for.

    Raises ValueError for a device of another form; whether there is one shows when it is opened.
    """
    ordinal, reason = _find_device(device)
    if reason:
        log.warning("running on the CPU with NumPy: %s", reason)
    return ordinal


def free_memory(device: str) -> tuple[int, tuple[int, int]] | tuple[None, None]:
    """Free bytes and compute capability of the GPU that `choose_device` would take, if it does.

    Raises DriverNotFoundError for one that is not there, ValueError as `choose_device`.
    """
    from pyruntime.driver.device import Device

    ordinal, _ = _find_device(device)
    if ordinal is None:
        return None, None
    with closing(Device(ordinal)) as opened:
        return opened.memory()[0], opened.compute_capability


def _find_device(device: str) -> tuple[int | None, str]:
    """The ordinal, or None and, if a GPU would have been taken, why there is none."""
    if not isinstance(device, str):
        raise ValueError(f"device={device!r}: 'auto', 'cpu' or 'cuda:N'")
    if device == "cpu":
        return None, ""
    if device == "auto":
        from pyruntime.driver.device import device_count

        try:
            return (0, "") if device_count() else (None, "the driver shows no device")
        except DriverNotFoundError as error:
            return None, str(error)
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not (ordinal.isdecimal() or device == "cuda"):
        raise ValueError(f"device={device!r}: 'auto', 'cpu' or 'cuda:N'")
    return int(ordinal or 0), ""
