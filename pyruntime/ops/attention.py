"""Causal attention of activation rows over a K/V cache."""

from __future__ import annotations

import math

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.tensormap import tensor_map
from pyruntime.ops.attention_choice import WARPGROUP_ROWS
from pyruntime.ops.attention_schedule import Schedule


def attention(
    program: Program,
    schedule: Schedule,
    *,
    q: DeviceArray,
    out: DeviceArray,
    layer: int,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Records out = softmax(scale q K^T) V per head, a row at position p seeing keys 0..p.

    K and V are those of `layer` in the cache that each sequence names; the rows' own keys and
    values are there already. Query heads share a K/V head in groups of heads / kv_heads. With a
    window a row sees the last keys of these only. `schedule` has been recorded before.

    Args:
        q: float16 [rows, heads * head_dim].
        out: float16, shape of q, written where a sequence has rows.
        scale: positive; 1 / sqrt(head_dim) in most models.
        softcap: scores become softcap tanh(scale q k / softcap), if given (Gemma 2,
            arXiv:2408.00118, section 2).

    Raises:
        ValueError: shapes, dtypes or numbers that do not belong together.
    """
    kernel, heads = schedule.choice.kernel, schedule.heads
    head_dim = int(kernel.spec.tile["hd"])
    if q.dtype != "float16" or out.dtype != "float16" or q.shape != out.shape:
        raise ValueError(f"attention: q {q.dtype} {q.shape}, out {out.dtype} {out.shape}")
    if len(q.shape) != 2 or q.shape[1] != heads * head_dim:
        raise ValueError(f"attention: q {q.shape} for {heads} heads of {head_dim} dims")
    if not 0 < scale < math.inf:
        raise ValueError(f"attention: scale {scale} is not a positive number")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"attention: soft-cap {softcap} is not a positive number")
    if bool(kernel.spec.tile.get("cap", 0)) != (softcap is not None):
        raise ValueError(f"attention: soft-cap {softcap} with kernel {kernel.name}")
    if not schedule.choice.scheduled:
        masking = {"window": schedule.window, "softcap": softcap or 0.0}
        taken = {p.name for p in kernel.spec.params}
        program.add(
            kernel,
            grid=(heads, schedule.max_sequences, -(-schedule.max_rows // schedule.choice.tokens)),
            live=schedule.live,
            sequences=schedule.sequences,
            q=q,
            o=out,
            layer=layer,
            heads=heads,
            kv_heads=schedule.kv_heads,
            scale=scale,
            **{name: value for name, value in masking.items() if name in taken},
        )
        return
    pack = schedule.choice.pack
    shape, box = (q.shape[0], heads, head_dim), (WARPGROUP_ROWS // pack, pack, min(head_dim, 64))
    log2e = math.log2(math.e)
    program.add(
        kernel,
        grid=schedule.workers,
        q=tensor_map(q, box, shape),
        o_map=tensor_map(out, box, shape),
        o=out,
        layer=layer,
        # Capped: cap log2(e) tanh(x) from e^2x = 2^(2 log2(e) x), x = scale s / cap.
        scale=2 * log2e * scale / softcap if softcap else log2e * scale,
        cap=log2e * softcap if softcap else 0.0,
        **schedule.parameters,
    )
