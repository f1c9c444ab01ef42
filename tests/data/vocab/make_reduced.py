"""Cut a byte-level vocabulary down to what some texts can make use of, in GGUF form.

    python make_reduced.py FULL.gguf TEXTS.inp|VALUES.npz REDUCED.gguf

Kept are every plain piece that occurs somewhere in the texts (written in GPT-2's characters for
bytes), every merge whose result does, and every token that is no plain piece. A token of a text
is always a part of it, so these texts encode as with the full vocabulary, however they are cut
into words and whatever is merged. `reduced.ids` holds the id that each token has in the full one.

ggml-vocab-llama-bpe.reduced.gguf: from llama.cpp's models/ggml-vocab-llama-bpe.gguf and the .inp
beside it. smollm2.reduced.gguf: from SmolLM2-135M-Instruct and golden/smollm2-135m-f32.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from pyruntime.gguf.reader import GGUFFile

NORMAL = 1
SEPARATOR = "\n__ggml_vocab_test__\n"


def read_texts(path: Path) -> list[str]:
    """The texts of a .inp file, or those stored as `*/text` in a .npz file."""
    if path.suffix == ".npz":
        values = np.load(path)
        return [str(values[key]) for key in values.files if key.endswith("/text")]
    return path.read_bytes().decode().split(SEPARATOR)


def reduce(full: Path, texts: list[str], target: Path) -> None:
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    words = [word for text in texts for word, _ in to_bytes.pre_tokenize_str(text)]
    corpus = " ".join(words)  # a space is none of GPT-2's characters for bytes
    metadata: dict[str, Any] = dict(GGUFFile.open(full).metadata)
    types = metadata["tokenizer.ggml.token_type"]
    pieces = list(metadata["tokenizer.ggml.tokens"])
    ids = [id for id, piece in enumerate(pieces) if types[id] != NORMAL or piece in corpus]
    merges = [
        merge for merge in metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in corpus
    ]

    writer = GGUFWriter(target, metadata["general.architecture"])
    writer.add_token_list([pieces[id] for id in ids])
    writer.add_token_types([int(types[id]) for id in ids])
    writer.add_token_merges(merges)
    writer.add_array("reduced.ids", ids)
    for key, value in metadata.items():
        if key.endswith("_token_id"):
            writer.add_uint32(key, ids.index(value))
        elif key.startswith("tokenizer.") and isinstance(value, bool):
            writer.add_bool(key, value)
        elif key.startswith("tokenizer.") and isinstance(value, str):
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    reduce(Path(sys.argv[1]), read_texts(Path(sys.argv[2])), Path(sys.argv[3]))
