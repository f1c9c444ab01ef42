"""Rows picked by index: embeddings, rows whose logits are wanted. And the logits of one row."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError


def embed(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    max_rows: int,
    ids: DeviceArray,
    table: DeviceArray,
    type_name: str,
    x: DeviceArray,
    scale: float = 1.0,
) -> None:
    """Records x[r] = scale * table[ids[r]] for each of the first `rows` rows, in float32.

    Args:
        rows: int32, the count of live rows on the device; `max_rows` is the most it will be.
        ids: int32 [max rows or more], each below the vocabulary (checked by the caller).
        table: uint8 [vocabulary, packed bytes of a row], in the GGUF type `type_name`.
        x: float32 [max rows or more, columns], written.

    Raises:
        ValueError: arrays that do not belong together.
        CubinError: there is no kernel for the type.
    """
    kernel = _kernel(library, "embed", type_name.lower())
    columns = x.shape[1]
    block, size = int(kernel.spec.tile["block"]), int(kernel.spec.tile["bytes"])
    if columns % block or table.shape[1:] != (columns // block * size,):
        raise ValueError(f"embed: {type_name} table {table.shape}, x {x.shape}")
    dtypes = [array.dtype for array in (ids, table, x)]
    if dtypes != [np.int32, np.uint8, np.float32]:
        raise ValueError(f"embed: ids, table, x are {dtypes}")
    if max_rows > min(ids.shape[0], x.shape[0]):
        raise ValueError(f"embed: {max_rows} rows of ids {ids.shape}, x {x.shape}")
    program.add(
        kernel,
        grid=max_rows,
        rows=rows,
        ids=ids,
        table=table,
        x=x,
        columns=columns,
        scale=scale,
    )


def gather(
    program: Program,
    library: Library,
    *,
    wanted: DeviceArray,
    max_wanted: int,
    index: DeviceArray,
    x: DeviceArray,
    x_out: DeviceArray,
    a: DeviceArray,
    a_out: DeviceArray,
) -> None:
    """Records x_out[i] = x[index[i]] and a_out[i] = a[index[i]] for each i below `wanted`.

    Args:
        wanted: int32, the count of wanted rows on the device; `max_wanted` is the most it will be.
        index: int32 [max wanted or more], rows of x and a (checked by the caller).
        x, x_out: float32 [..., columns]; x_out is written.
        a, a_out: float16 [..., width]; a_out is written.

    Raises:
        ValueError: arrays that do not belong together, or rows that are no multiple of 16 bytes.
    """
    (columns,), (width,) = x.shape[1:], a.shape[1:]
    if x_out.shape[1:] != (columns,) or a_out.shape[1:] != (width,) or columns % 4 or width % 8:
        raise ValueError(f"gather: x {x.shape} to {x_out.shape}, a {a.shape} to {a_out.shape}")
    dtypes = [array.dtype for array in (index, x, x_out, a, a_out)]
    if dtypes != [np.int32, np.float32, np.float32, np.float16, np.float16]:
        raise ValueError(f"gather: index, x, x_out, a, a_out are {dtypes}")
    if max_wanted > min(index.shape[0], x_out.shape[0], a_out.shape[0]):
        raise ValueError(
            f"gather: {max_wanted} rows of index {index.shape}, to {x_out.shape}, {a_out.shape}"
        )
    program.add(
        _kernel(library, "gather"),
        grid=max_wanted,
        wanted=wanted,
        index=index,
        x=x,
        x_out=x_out,
        a=a,
        a_out=a_out,
        columns=columns,
        width=width,
    )


def has_packed_logits(library: Library, type_name: str, columns: int) -> bool:
    """Whether `packed_logits` takes a table of this type, with rows of `columns` weights.

    It does not take F32, F16 and BF16: their packed rows are no shorter than those of fp16, which a
    matrix product reads, and but for F32 they lose nothing to it.
    """
    kernel = _find(library, "logits", type_name.lower())
    return kernel is not None and columns <= int(kernel.spec.tile["columns"])


def packed_logits(
    program: Program,
    library: Library,
    *,
    rows: DeviceArray,
    x: DeviceArray,
    weight: DeviceArray,
    eps: float,
    table: DeviceArray,
    type_name: str,
    c: DeviceArray,
) -> None:
    """Records c = norm(x, weight) · tableᵀ of one row, unpacked and summed in float32.

    Args:
        rows: int32, the count of live rows on the device, 0 or 1; where it is 0, c is left alone.
        x: float32 [1, columns], not normalised yet.
        weight: float32 [columns]; `eps`: see `ops.norm.norm`.
        table: uint8 [vocabulary, packed bytes of a row], in the GGUF type `type_name`.
        c: float32 [1, vocabulary], written.

    Raises:
        ValueError: arrays that do not belong together, or more columns than the kernel has room
            for.
        CubinError: there is no kernel for the type.
    """
    kernel = _kernel(library, "logits", type_name.lower())
    (vocab, row_bytes), columns = table.shape, x.shape[1]
    block, size, most = (int(kernel.spec.tile[name]) for name in ("block", "bytes", "columns"))
    shapes = (x.shape[0], weight.shape, c.shape)
    fits = shapes == (1, (columns,), (1, vocab)) and columns <= most
    if not fits or columns % block or row_bytes != columns // block * size:
        raise ValueError(
            f"packed_logits: {type_name} table {table.shape}, x {x.shape}, weight {weight.shape}, "
            f"c {c.shape}"
        )
    dtypes = [array.dtype for array in (rows, x, weight, table, c)]
    if dtypes != [np.int32, np.float32, np.float32, np.uint8, np.float32]:
        raise ValueError(f"packed_logits: rows, x, weight, table, c are {dtypes}")
    at_once = kernel.spec.min_blocks * library.device.sm_count
    program.add(
        kernel,
        grid=min(-(-vocab // int(kernel.spec.tile["rows"])), at_once),
        rows=rows,
        x=x,
        weight=weight,
        table=table,
        c=c,
        columns=columns,
        vocab=vocab,
        eps=eps,
    )


def _kernel(library: Library, op: str, type_name: str | None = None) -> Kernel:
    kernel = _find(library, op, type_name)
    if kernel is None:
        raise CubinError(f"no {op} kernel for type {type_name}")
    return kernel


def _find(library: Library, op: str, type_name: str | None) -> Kernel | None:
    for kernel in library.family("rows"):
        if (kernel.spec.tile["op"], kernel.spec.tile.get("type")) == (op, type_name):
            return kernel
    return None
