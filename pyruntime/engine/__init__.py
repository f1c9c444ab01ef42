"""The engine: one object that takes token ids to logits and K/V, on a GPU or in NumPy.

`prefills` runs prompts, `texts` makes scores, vectors and tokens of that, `load` makes an engine of
a file.
"""

from pyruntime.engine.interface import Result
from pyruntime.engine.load import Engine
from pyruntime.engine.texts import LOGITS_BYTES

__all__ = ["LOGITS_BYTES", "Engine", "Result"]
