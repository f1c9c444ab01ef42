"""A Triton kernel, compiled without a GPU: `python triton_kernel.py OUT.cubin`."""

import os
import sys
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # line tables would hold this machine's paths

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def row_sum(x, y, columns, block: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, block)
    values = tl.load(x + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.store(y + row, tl.sum(values))


signature = {"x": "*fp32", "y": "*fp32", "columns": "i32", "block": "constexpr"}
source = ASTSource(fn=row_sum, signature=signature, constexprs={"block": 1024})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
Path(sys.argv[1]).write_bytes(kernel.asm["cubin"])
