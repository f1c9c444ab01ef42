"""Synthetic models: real shapes, llama.cpp's choice of types, sane values, no half-written file."""

from __future__ import annotations

import json
import math
import resource
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyruntime.gguf import TYPES, GGUFFile, QuantType, StringArray
from pyruntime.tools import synth


def plan(model: str, mix: str = "Q4_K_M") -> dict[str, synth.Tensor]:
    return {tensor.name: tensor for tensor in synth.tensors(synth.MODELS[model], mix)}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_as_published(model: str, parameters: int) -> None:
    assert sum(math.prod(tensor.shape) for tensor in plan(model).values()) == parameters


def test_mix_of_7b() -> None:
    tensors = plan("qwen2.5-7b")
    assert Counter(t.type.name for t in tensors.values()) == {"Q4_K": 169, "Q6_K": 29, "F32": 141}
    better = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for layer in range(28):
        for part in ("attn_v", "ffn_down"):
            wanted = "Q6_K" if layer in better else "Q4_K"
            assert tensors[f"blk.{layer}.{part}.weight"].type.name == wanted
    assert tensors["output.weight"].type.name == "Q6_K"
    assert tensors["token_embd.weight"].type.name == "Q4_K"
    assert abs(sum(t.nbytes for t in tensors.values()) - 4.68e9) < 0.01e9


def test_types_where_rows_are_not_whole_blocks() -> None:
    tensors = plan("qwen2.5-0.5b")
    assert "output.weight" not in tensors
    names = ["token_embd", "blk.0.attn_q", "blk.0.attn_v", "blk.0.ffn_down", "blk.3.ffn_down"]
    types = [tensors[f"{name}.weight"].type.name for name in names]
    assert types == ["Q8_0", "Q5_0", "Q8_0", "Q6_K", "Q4_K"]
    assert {t.type.name for t in plan("qwen2.5-0.5b", "q8_0").values()} == {"Q8_0", "F32"}


@pytest.mark.parametrize("quant", TYPES.values(), ids=lambda quant: quant.name)
def test_random_blocks_have_the_wanted_spread(quant: QuantType) -> None:
    count = 2**20 // quant.block
    blocks = synth.random_blocks(quant, count, 0.02, np.random.default_rng(1))
    assert blocks.shape == (count, quant.bytes)
    kind = gguf.GGMLQuantizationType(quant.id)
    values = gguf.quants.dequantize(blocks, kind).astype(np.float64)
    assert values.shape == (count, quant.block)
    assert abs(values.mean()) < 0.01 * 0.02
    assert abs(values.std() / 0.02 - 1) < 0.05


def test_file_is_complete_for_both_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    assert synth.main(["tiny", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.pop("seconds") > 0
    size = path.stat().st_size
    assert record == {
        "schema": "pyruntime.synth/1",
        "path": str(path),
        "bytes": size,
        "tensors": len(plan("tiny")),
    }
    assert list(tmp_path.iterdir()) == [path]

    reader = gguf.GGUFReader(path)
    shape = synth.MODELS["tiny"]
    with GGUFFile.open(path) as file:
        assert {t.name: t.data_offset for t in reader.tensors} == {
            name: t.offset for name, t in file.tensors.items()
        }
        for name, tensor in plan("tiny").items():
            assert (file.tensors[name].shape, file.tensors[name].type) == (
                tensor.shape,
                tensor.type,
            )
            values = file.dequantize(name)
            if len(tensor.shape) == 2:
                assert abs(values.std() * math.sqrt(tensor.shape[1]) - 1) < 0.1
                assert len(np.unique(values, axis=0)) == len(values)
            elif name.endswith("norm.weight"):
                assert (values == 1).all()
            else:
                assert 0 < abs(values).max() < 1
        tokens, merges = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
        assert isinstance(tokens, StringArray)
        assert isinstance(merges, StringArray)
        assert len(set(tokens)) == len(tokens) == shape.vocab
        assert {merge.replace(" ", "") for merge in merges} < set(tokens)
        assert file.metadata["qwen2.attention.head_count_kv"] == shape.kv_heads


def test_seed_layers_and_type(tmp_path: Path) -> None:
    def written(*options: str) -> bytes:
        path = tmp_path / "m.gguf"
        assert synth.main(["tiny", str(path), "--layers", "1", *options]) == 0
        return path.read_bytes()

    first = written()
    assert written("--seed", "0") == first
    assert written("--seed", "1") != first
    written("--type", "bf16")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata["qwen2.block_count"] == 1
        assert "blk.1.attn_q.weight" not in file.tensors
        assert {t.type.name for t in file.tensors.values() if t.type} == {"BF16", "F32"}


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match=f"cannot write {folder}: exists and is no file"):
        synth.main(["tiny", str(folder)])
    with pytest.raises(OSError, match=r"nowhere/m\.gguf: No such file or directory"):
        synth.main(["tiny", str(tmp_path / "nowhere" / "m.gguf")])
    with pytest.raises(ValueError, match="unknown type 'q9'; supported: F32"):
        synth.main(["tiny", str(tmp_path / "m.gguf"), "--type", "q9"])
    for option in (["--layers", "0"], ["--seed", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            synth.main(["tiny", str(tmp_path / "m.gguf"), *option])
    assert list(tmp_path.iterdir()) == [folder]


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write {path}: File too large"):
            synth.main(["tiny", str(path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"needs 0.00 GB, the disk has 0.00 GB left"):
        synth.main(["tiny", str(path)])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
