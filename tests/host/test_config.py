"""What a model file may say, and what is refused by the name of the key or tensor that says it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from goldens import GOLDEN
from models import FFN, HEADS, HIDDEN, LAYERS, VOCAB, tensors, write_model

from pyruntime.errors import UnsupportedModelError
from pyruntime.gguf.reader import GGUFFile
from pyruntime.model.architectures import ARCHITECTURES
from pyruntime.model.config import ModelConfig
from pyruntime.model.rope import RopeConfig
from pyruntime.model.tensors import tensor_shapes


def config_of(path: Path) -> ModelConfig:
    with GGUFFile.open(path) as file:
        return ModelConfig.from_gguf(file)


def refused(path: Path, *parts: str) -> None:
    """Loading is refused with a text that names the file and holds all of `parts`."""
    with pytest.raises(UnsupportedModelError, match=re.escape(path.name)) as caught:
        config_of(path)
    message = str(caught.value)
    assert len(message) < 4000 and message.isprintable()
    for part in parts:
        assert part in message


# What a file of these architectures need not say.
GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "activation": "gelu", "embedding_scale": 8.0, "post_norms": True, "score_cap": 50.0,
        "logit_cap": 30.0, "window": 4096, "window_period": 2,
    },
    "gemma3": {"activation": "gelu", "embedding_scale": 8.0, "post_norms": True},
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_of_each_architecture_is_read(tmp_path: Path, arch: str) -> None:
    config = config_of(write_model(tmp_path / "m.gguf", arch))
    assert config == ModelConfig(
        arch=arch,
        name="m",
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=2,
        head_dim=16,
        ffn=FFN,
        vocab=VOCAB,
        context_length=128,
        eps=float(np.float32(1e-5)),
        tied=False,
        qkv_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        rope=RopeConfig(
            style="interleaved" if arch in ("llama", "mistral3") else "neox",
            dim=16,
            base=10000.0,
            original_context=128,
        ),
        attention_scale=0.25,
        **GEMMA.get(arch, {}),
    )
    assert dict(tensor_shapes(config)) == {k: v.shape for k, v in tensors(arch).items()}


def test_what_a_real_file_says() -> None:
    config = config_of(GOLDEN / "tiny-qwen3-q4_k_m.gguf")
    assert (config.name, config.head_dim, config.heads, config.hidden) == (
        "tiny qwen3",
        128,
        4,
        256,
    )
    assert config.tied and config.rope.base == 1e6
    yarn = config_of(GOLDEN / "tiny-rope-yarn4-q8_0.gguf").rope
    assert (yarn.scaling, yarn.factor, yarn.original_context) == ("yarn", 4.0, 64)
    factors = config_of(GOLDEN / "tiny-rope-freqs-q8_0.gguf").rope.factors
    assert len(factors) == 32 and max(factors) > 1


@pytest.mark.parametrize("arch", ["llama", "mistral3"])
def test_a_window_in_every_layer(tmp_path: Path, arch: str) -> None:
    path = write_model(tmp_path / "m.gguf", arch, set_keys={"*.attention.sliding_window": 9})
    config = config_of(path)
    assert [config.window_of(layer) for layer in range(3)] == [9, 9, 9]
    assert config.ropes == (config.rope,) and config.score_cap is config.logit_cap is None


def test_windows_of_gemma(tmp_path: Path) -> None:
    """Two layers in two, or six, are counted from the first; the last of each has no window."""
    window = {"*.attention.sliding_window": 512}
    two = config_of(write_model(tmp_path / "m.gguf", "gemma2", set_keys=window))
    assert [two.window_of(layer) for layer in range(4)] == [512, None, 512, None]
    six = config_of(write_model(tmp_path / "m.gguf", "gemma3", set_keys=window))
    assert [bool(six.window_of(layer)) for layer in range(8)] == [True] * 5 + [False] + [True] * 2
    four = window | {"*.attention.sliding_window_pattern": 4}
    config = config_of(write_model(tmp_path / "m.gguf", "gemma3", set_keys=four))
    assert [layer for layer in range(9) if not config.is_local(layer)] == [3, 7]
    array = window | {"*.attention.sliding_window_pattern": [True, False]}
    path = write_model(tmp_path / "m.gguf", "gemma2", set_keys=array)
    refused(path, "sliding_window_pattern': is an array, not an integer")


def test_rope_of_gemma(tmp_path: Path) -> None:
    """Scaling and a large base are for layers that see all keys; Gemma 2 has one form."""
    keys = {
        "*.attention.sliding_window": 512, "*.rope.freq_base": 1e6, "*.rope.scaling.factor": 8.0,
    }  # fmt: skip
    config = config_of(write_model(tmp_path / "m.gguf", "gemma3", set_keys=keys))
    local = RopeConfig("neox", 16, 10000.0, original_context=128)
    assert config.ropes == (config.rope, local) and config.rope.factor == 8
    assert [config.rope_of(layer) is config.rope for layer in range(7)] == [False] * 5 + [
        True,
        False,
    ]
    path = write_model(
        tmp_path / "m.gguf", "gemma3", set_keys=keys | {"*.rope.freq_base_swa": 5000.0}
    )
    assert config_of(path).ropes[1] == RopeConfig("neox", 16, 5000.0, original_context=128)
    config = config_of(write_model(tmp_path / "m.gguf", "gemma2", set_keys=keys))
    assert config.ropes == (config.rope,) and config.rope_of(0).factor == 8


def test_caps_of_gemma(tmp_path: Path) -> None:
    caps = {"*.attn_logit_softcapping": 20.0, "*.final_logit_softcapping": 10.0}
    config = config_of(write_model(tmp_path / "m.gguf", "gemma2", set_keys=caps))
    assert (config.score_cap, config.logit_cap) == (20.0, 10.0)
    del caps["*.attn_logit_softcapping"]
    config = config_of(write_model(tmp_path / "m.gguf", "gemma3", set_keys=caps))
    assert (config.score_cap, config.logit_cap) == (None, 10.0)
    path = write_model(tmp_path / "m.gguf", "gemma3", set_keys={"*.attn_logit_softcapping": 20.0})
    refused(path, "attn_logit_softcapping", "not supported")
    path = write_model(tmp_path / "m.gguf", "gemma2", set_keys={"*.attn_logit_softcapping": 0.0})
    refused(path, "attn_logit_softcapping': is 0.0, not a finite positive number")


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_scale_attention_by_another_rule(
    tmp_path: Path, arch: str, layers: int
) -> None:
    """By the width of the model per head, 16 here, whatever the head dimension."""
    for count, width in ((layers, 16), (layers - 1, 32)):
        path = write_model(
            tmp_path / "m.gguf",
            arch,
            head_dim=32,
            set_keys={"*.block_count": count, "*.attention.key_length": 32,
                      "*.attention.value_length": 32},
            set_tensors=tensors(arch, head_dim=32, layers=count),
        )  # fmt: skip
        assert config_of(path).attention_scale == width**-0.5


def test_scaled_rope_of_mistral3_is_refused(tmp_path: Path) -> None:
    keys = {"*.rope.scaling.type": "yarn", "*.rope.scaling.factor": 4.0}
    path = write_model(tmp_path / "m.gguf", "mistral3", set_keys=keys)
    refused(path, "rope.scaling.type': is 'yarn'; mistral3 is supported without scaling")
    path = write_model(
        tmp_path / "m.gguf", "mistral3", set_keys={"*.attention.temperature_scale": 0.1}
    )
    refused(path, "attention.temperature_scale", "not supported")


@pytest.mark.parametrize(
    "extra",
    [
        {"*.attention.head_count_kv": None},  # no GQA
        {"*.embedding_length": np.uint64(HIDDEN), "*.block_count": np.int8(LAYERS)},
        {"*.attention.layer_norm_rms_epsilon": np.float64(1e-6)},
        {"*.rope.freq_base": 500000},
        {"*.vocab_size": VOCAB, "*.rope.dimension_count": 16, "*.attention.value_length": 16},
        {"*.tensor_data_layout": "Meta AI original pth", "*.rope.scaling.finetuned": True},
        {"*.expert_count": 0, "*.attention.causal": True, "*.use_parallel_residual": False},
        {"*.logit_scale": 1.0, "*.attention.sliding_window": 0, "*.attention.clamp_kqv": 0.0},
        {"*.rope.scaling.type": "none", "general.type": "model", "llamas.context": 3},
        {
            "general.quantization_version": 2,
            "general.name": 3,
            "quantize.imatrix.file": "x",
            "other": [1, 2],
        },
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_accepted_keys(tmp_path: Path, extra: dict[str, Any]) -> None:
    changes: dict[str, Any] = {}
    if "*.attention.head_count_kv" in extra:
        rows = {"attn_k.weight", "attn_v.weight"}
        square = np.zeros((HIDDEN, HIDDEN), np.float32)
        changes = {f"blk.{i}.{name}": square for i in range(LAYERS) for name in rows}
    path = write_model(tmp_path / "m.gguf", set_keys=extra, set_tensors=changes)
    assert config_of(path).layers == LAYERS


@pytest.mark.parametrize(
    "key", ["context_length", "embedding_length", "block_count", "feed_forward_length",
            "attention.head_count", "attention.layer_norm_rms_epsilon"]
)  # fmt: skip
def test_missing_keys(tmp_path: Path, key: str) -> None:
    path = write_model(tmp_path / "m.gguf", "qwen2", set_keys={f"*.{key}": None})
    refused(path, f"key 'qwen2.{key}': is missing")


@pytest.mark.parametrize(
    "arch", [None, 7, "gemma", "mistral", "Llama", "llama\n\x1b[31m", "x" * 5000]
)
def test_architectures_that_are_unknown(tmp_path: Path, arch: Any) -> None:
    path = write_model(tmp_path / "m.gguf", set_keys={"general.architecture": arch})
    refused(
        path, "general.architecture", *(["llama, mistral3, qwen2, qwen3, gemma2"] if arch else [])
    )


NOT_POSITIVE = [0, -1, True, 1.5, "8", [4, 4]]
NOT_A_POSITIVE_NUMBER = [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 0, True, "1", [1.0]]


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=repr)
@pytest.mark.parametrize(
    "key", ["context_length", "embedding_length", "block_count", "feed_forward_length",
            "attention.head_count", "attention.head_count_kv", "attention.key_length",
            "attention.value_length", "rope.dimension_count", "vocab_size",
            "rope.scaling.original_context_length", "attention.sliding_window"]
)  # fmt: skip
def test_integers_that_are_not_positive_integers(tmp_path: Path, key: str, value: Any) -> None:
    if key == "attention.sliding_window" and value is not True and value == 0:
        return  # none
    refused(
        write_model(tmp_path / "m.gguf", set_keys={f"*.{key}": value}),
        "byte ",
        f"key 'llama.{key}': is ",
    )


@pytest.mark.parametrize("value", NOT_A_POSITIVE_NUMBER, ids=repr)
@pytest.mark.parametrize(
    "key", ["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor",
            "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow"]
)  # fmt: skip
def test_numbers_that_are_not_finite_and_positive(tmp_path: Path, key: str, value: Any) -> None:
    refused(
        write_model(tmp_path / "m.gguf", set_keys={f"*.{key}": value}),
        "byte ",
        f"key 'llama.{key}': is ",
    )


@pytest.mark.parametrize("eps", [1e300, 1e-300, 1.0])
def test_an_epsilon_that_float32_or_sense_excludes(tmp_path: Path, eps: float) -> None:
    key = "attention.layer_norm_rms_epsilon"
    path = write_model(tmp_path / "m.gguf", set_keys={f"*.{key}": np.float64(eps)})
    refused(path, f"key 'llama.{key}': is {eps}")


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"*.attention.head_count": 3}, ["embedding_length", "64", "3 heads"]),
        ({"*.attention.head_count_kv": 3}, ["head_count_kv': is 3", "4 heads"]),
        ({"*.attention.head_count_kv": 8}, ["head_count_kv': is 8", "4 heads"]),
        ({"*.attention.key_length": 15}, ["key_length", "15", "even"]),
        ({"*.attention.value_length": 8}, ["value_length': is 8", "16"]),
        ({"*.rope.dimension_count": 8}, ["dimension_count': is 8", "partial rotary"]),
        ({"*.rope.dimension_count": 7}, ["dimension_count': is 7", "16"]),
        ({"*.rope.dimension_count": 32}, ["dimension_count': is 32", "16"]),
        (
            {"*.block_count": LAYERS + 1},
            ["'blk.2.attn_norm.weight': is missing", "block_count is 3"],
        ),
        ({"*.block_count": 1 << 31}, ["'blk.2.attn_norm.weight': is missing", "2147483648"]),
        ({"*.vocab_size": VOCAB + 1}, ["vocab_size': is 49", "'token_embd.weight' has 48 rows"]),
        ({"*.rope.freq_base": 1.0}, ["rope.freq_base': is 1.0", "greater than 1"]),
        (
            {"*.rope.scaling.type": "longrope"},
            ["rope.scaling.type': is 'longrope'", "linear, yarn"],
        ),
        ({"*.rope.scaling.type": 3}, ["rope.scaling.type': is 3", "string"]),
        (
            {"*.rope.scaling.type": "none", "*.rope.scaling.factor": 2.0},
            ["factor': is 2.0", "'none'"],
        ),
    ],
    ids=lambda case: "-".join(map(str, next(iter(case.items())))) if isinstance(case, dict) else "",
)
def test_values_that_contradict_each_other_or_are_unknown(
    tmp_path: Path, extra: dict[str, Any], parts: list[str]
) -> None:
    refused(write_model(tmp_path / "m.gguf", set_keys=extra), *parts)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention.sliding_window_pattern", [1, 0]),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("attention.max_alibi_bias", 8.0),
        ("use_parallel_residual", True),
        ("attention.scale", 0.015625),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("logit_scale", float("nan")),
        ("logit_scale", "1"),
        ("pooling_type", 3),
        ("attention.layer_norm_epsilon", 1e-5),
        ("rope.dimension_sections", [16, 24, 24]),
        ("rope.freq_base_swa", 10000.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("an.option\nof tomorrow", 1),
    ],
)
def test_options_that_would_be_ignored(tmp_path: Path, option: str, value: Any) -> None:
    path = write_model(tmp_path / "m.gguf", set_keys={f"*.{option}": value})
    refused(path, "llama." + option.replace("\n", "\\n"), "not supported")


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_a_window_of_a_model_without(tmp_path: Path, arch: str) -> None:
    path = write_model(tmp_path / "m.gguf", arch, set_keys={"*.attention.sliding_window": 4096})
    refused(path, f"{arch}.attention.sliding_window", "4096 is not supported")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_missing_tensor(tmp_path: Path, arch: str) -> None:
    for name in tensors(arch):
        if name != "output.weight":
            path = write_model(tmp_path / "m.gguf", arch, set_tensors={name: None})
            refused(path, f"tensor '{name}': is missing")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_of_a_wrong_shape(tmp_path: Path, arch: str) -> None:
    for name, value in tensors(arch).items():
        wrong = np.zeros((*value.shape[:-1], value.shape[-1] + 32), np.float32)
        path = write_model(tmp_path / "m.gguf", arch, set_tensors={name: wrong})
        refused(path, f"tensor '{name}'", str(list(wrong.shape)), str(list(value.shape)))


def test_a_transposed_matrix(tmp_path: Path) -> None:
    down = np.zeros((FFN, HIDDEN), np.float32)
    path = write_model(tmp_path / "m.gguf", set_tensors={"blk.1.ffn_down.weight": down})
    refused(path, "'blk.1.ffn_down.weight': has shape [96, 64], expected [64, 96]")


def test_tied_and_untied_output(tmp_path: Path) -> None:
    assert not config_of(write_model(tmp_path / "both.gguf")).tied
    path = write_model(tmp_path / "tied.gguf", set_tensors={"output.weight": None})
    assert config_of(path).tied
    assert "output.weight" not in dict(tensor_shapes(config_of(path)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("F64", np.zeros((HIDDEN, FFN), np.float64)),
        ("I8", np.zeros((HIDDEN, FFN), np.int8)),
        ("I32", np.zeros((HIDDEN, FFN), np.int32)),
        ("TQ2_0", (np.zeros((256, 66), np.uint8), gguf.GGMLQuantizationType.TQ2_0)),
    ],
)
def test_types_that_hold_no_supported_weights(tmp_path: Path, kind: str, value: Any) -> None:
    path = write_model(tmp_path / "m.gguf", set_tensors={"blk.0.ffn_down.weight": value})
    refused(path, "'blk.0.ffn_down.weight'", kind, "Q4_K")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",  # llama has none
        "blk.1.ffn_down.bias",
        "blk.0.attn_q.scale",
        "blk.0.attn_k_norm.weight",
        "output_norm.bias",
        "output.bias",
        "rope_factors_long.weight",
        "blk.0.attn_sinks.weight",
        "blk.1.ffn_gate_inp.weight",
    ],
)
def test_tensors_that_would_change_the_result(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", set_tensors={name: np.ones(4, np.float32)})
    refused(path, f"tensor '{name}'", "llama")


def test_unknown_tensors_are_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = ["vision.patch.weight", "blk.0.mystery.weight", f"blk.{LAYERS}.attn_q.weight"]
    path = write_model(
        tmp_path / "m.gguf", set_tensors={name: np.ones(4, np.float32) for name in extra}
    )
    with caplog.at_level(logging.WARNING, "pyruntime"):
        config_of(path)
    (record,) = caplog.records
    assert "3 unknown tensors" in record.getMessage()
    assert "'vision.patch.weight'" in record.getMessage()


def test_a_clean_file_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of(write_model(tmp_path / "m.gguf"))
    assert not caplog.records


def test_old_and_new_names_of_linear_scaling(tmp_path: Path) -> None:
    for extra in (
        {"*.rope.scale_linear": 4.0},
        {"*.rope.scaling.factor": 4.0},
        {"*.rope.scaling.type": "linear", "*.rope.scaling.factor": 4.0},
    ):
        rope = config_of(write_model(tmp_path / "m.gguf", set_keys=extra)).rope
        assert (rope.scaling, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(("key", "value"), [("beta_fast", 1e308), ("beta_slow", 5e-324)])
def test_yarn_of_no_usable_frequencies(tmp_path: Path, key: str, value: float) -> None:
    """Each number is finite and positive; what comes of them is not."""
    yarn = {"*.rope.scaling.type": "yarn", "*.rope.scaling.factor": 4.0}
    path = write_model(
        tmp_path / "m.gguf", set_keys={**yarn, f"*.rope.scaling.yarn_{key}": np.float64(value)}
    )
    refused(path, "rope.scaling.yarn_beta_fast", "no usable frequencies")


def test_llama3_frequency_factors(tmp_path: Path) -> None:
    name = "rope_freqs.weight"
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_model(tmp_path / "m.gguf", set_tensors={name: factors})
    assert config_of(path).rope.factors == tuple(factors.tolist())
    path = write_model(tmp_path / "m.gguf", set_tensors={name: factors[:4]})
    refused(path, f"'{name}': has shape [4], expected [8]")
    for bad in (0.0, -1.0, np.nan, np.inf):
        factors[3] = bad
        path = write_model(tmp_path / "m.gguf", set_tensors={name: factors})
        refused(path, f"'{name}'", "not finite and positive")
