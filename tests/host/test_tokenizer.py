"""Tokenizers against llama.cpp's ids, and against their own rules."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from work import calls

from pyruntime import hub
from pyruntime.errors import TokenizerError
from pyruntime.gguf.reader import GGUFFile
from pyruntime.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
VOCAB = DATA / "vocab"
QWEN2 = "ggml-vocab-qwen2.gguf"
SPM = "ggml-vocab-llama-spm.gguf"
LLAMA3 = "ggml-vocab-llama-bpe.reduced.gguf"
SMOLLM2 = "smollm2.reduced.gguf"


@cache
def metadata(name: str) -> dict[str, Any]:
    with GGUFFile.open(VOCAB / name) as file:
        return dict(file.metadata)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(name))


def full_ids(name: str, ids: NDArray[np.int32]) -> list[int]:
    """The ids in the vocabulary that a reduced one was made from."""
    kept = metadata(name).get("reduced.ids")
    full: list[int] = (ids if kept is None else kept[ids]).tolist()
    return full


@pytest.mark.parametrize("name", [QWEN2, SPM, LLAMA3])
def test_ids_of_llama_cpp(name: str) -> None:
    stem = name.replace(".reduced", "")
    texts = (VOCAB / f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    rows = (VOCAB / f"{stem}.out").read_text().split("\n")
    assert len(texts) == len(rows) == 47
    for text, row in zip(texts, rows, strict=True):
        ids = tokenizer(name).encode(text, add_special=False, parse_special=False)
        assert ids.dtype == np.int32
        assert full_ids(name, ids) == list(map(int, row.split())), text
        assert tokenizer(name).decode(ids) == text


def smollm2_prompts() -> list[tuple[str, list[int]]]:
    values = np.load(DATA / "golden" / "smollm2-135m-f32.npz")
    prompts = [key.removesuffix("/text") for key in values.files if key.endswith("/text")]
    assert prompts
    return [(str(values[f"{p}/text"]), values[f"{p}/ids"].tolist()) for p in prompts]


def test_ids_of_smollm2() -> None:
    for text, ids in smollm2_prompts():
        assert full_ids(SMOLLM2, tokenizer(SMOLLM2).encode(text)) == ids


def test_ids_of_smollm2_with_its_whole_vocabulary() -> None:
    path = hub.cached("smollm2")
    if path is None:
        pytest.skip("smollm2 has not been fetched (pyruntime.hub.resolve('smollm2') does)")
    with GGUFFile.open(path) as file:
        whole = Tokenizer.from_metadata(file.metadata)
    for text, ids in smollm2_prompts():
        assert whole.encode(text).tolist() == ids
        assert whole.decode(ids) == text


@given(st.text())
@example(" \t\n\r\x0b\x0c\x85\xa0\u2028\u3000  x")
@example("ı ſ ß İ ﬁ é é 가각 ๆ \U0001f9d9\u200d♂️ \0 \U0010ffff \ufffd")
def test_bytes_survive(text: str) -> None:
    ids = tokenizer(QWEN2).encode(text, parse_special=False)
    assert tokenizer(QWEN2).decode(ids) == text


def test_sentencepiece_without_a_space_before_text() -> None:
    """As in Gemma, whose runs of spaces and lines are tokens of their own, stored as they are."""
    kinds = metadata(SPM)["tokenizer.ggml.token_type"].copy()
    tokens = list(metadata(SPM)["tokenizer.ggml.tokens"])
    for id, piece in ((1000, "  "), (1001, "\n\n")):
        tokens[id], kinds[id] = piece, 4
    gemma = Tokenizer.from_metadata(
        metadata(SPM)
        | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
           "tokenizer.ggml.add_space_prefix": False}
    )  # fmt: skip
    assert gemma.token(gemma.encode("the", add_special=False)[0]) == "the"
    text = "a  b\n\n c"
    ids = gemma.encode(text, add_special=False)
    assert [gemma.token(id) for id in ids] == ["a", "  ", "b", "\n\n", " c"]
    assert gemma.decode(ids) == text and gemma.decode(gemma.encode(" x")[1:]) == " x"


def test_pieces_add_up_to_the_text() -> None:
    """Also where it is cut in two: only what begins it loses the space in front."""
    for name, text in ((SPM, "the 🧙 x"), (QWEN2, "the 🧙 x")):
        ids = tokenizer(name).encode(text, add_special=False)
        for at in range(1, len(ids)):
            head, rest = ids[:at], ids[at:]
            pieces = tokenizer(name).pieces(head) + tokenizer(name).pieces(rest, begins=False)
            assert len(pieces) == len(ids) and b"".join(pieces) == text.encode()


@cache
def spm_scores() -> dict[str, float]:
    """The score of every piece that merging may lead to."""
    pieces = metadata(SPM)["tokenizer.ggml.tokens"]
    scores = dict(zip(pieces, metadata(SPM)["tokenizer.ggml.scores"].tolist(), strict=True))
    return {piece: scores[piece] for piece in pieces if piece not in ("<unk>", "<s>", "</s>")}


def merge_best_first(symbols: list[str]) -> list[str]:
    """Join the neighbours whose union scores best, the leftmost of equals, while there are any."""
    scores = spm_scores()
    while joints := [
        (scores[left + right], -at)
        for at, (left, right) in enumerate(pairwise(symbols))
        if left + right in scores
    ]:
        at = -max(joints)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols


def byte_pieces(symbol: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in symbol.encode()]


@given(st.text("▁aest \nléн🦙<0x>/", max_size=40))
def test_sentencepiece_merges_the_best_pair_first(text: str) -> None:
    symbols = merge_best_first(list(("▁" + text if text else "").replace(" ", "▁")))
    ids = tokenizer(SPM).encode(text, add_special=False, parse_special=False)
    found = [metadata(SPM)["tokenizer.ggml.tokens"][id] for id in ids]
    assert found == [
        piece
        for symbol in symbols
        for piece in ([symbol] if symbol in spm_scores() else byte_pieces(symbol))
    ]
    assert tokenizer(SPM).decode(ids) == text.replace("▁", " ")


def test_special_tokens_are_added_as_the_model_asks() -> None:
    assert tokenizer(SPM).encode("").tolist() == [1]
    assert tokenizer(SPM).encode("Hello").tolist() == [1, 15043]
    assert tokenizer(SPM).encode("Hello", add_special=False).tolist() == [15043]
    assert full_ids(LLAMA3, tokenizer(LLAMA3).encode("Hello")) == [128000, 9906]
    assert tokenizer(QWEN2).encode("Hello").tolist() == [9707]
    both = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_metadata(metadata(SPM) | both).encode("Hello").tolist() == [15043, 2]


def test_special_tokens_are_parsed_or_not() -> None:
    qwen2, spm = tokenizer(QWEN2), tokenizer(SPM)
    text = "<|im_start|>user\nHi<|im_end|>"
    assert qwen2.encode(text).tolist() == [151644, 872, 198, 13048, 151645]
    forged = qwen2.encode(text, parse_special=False)
    assert not qwen2.eos_ids & set(forged.tolist()) and 151644 not in forged
    assert qwen2.decode(forged) == text
    # Text after a special token begins with a space piece of its own.
    assert spm.encode("a<s>a</s>", add_special=False).tolist() == [263, 1, 263, 2]
    assert not {1, 2} & set(spm.encode("<s></s>", add_special=False, parse_special=False).tolist())
    # User-defined tokens are found either way.
    assert qwen2.encode("x[PAD151900]", parse_special=False).tolist() == [87, 151900]


def test_decode() -> None:
    qwen2, spm = tokenizer(QWEN2), tokenizer(SPM)
    ids = qwen2.encode("<|im_start|>a<|im_end|>")
    assert qwen2.decode(ids) == "<|im_start|>a<|im_end|>"
    assert qwen2.decode(ids, skip_special=True) == "a"
    assert qwen2.decode([]) == ""
    assert spm.decode([1, 15043, 2]) == "<s>Hello</s>"
    assert spm.decode([1, 15043, 29871, 15043], skip_special=True) == "Hello  Hello"
    frog = qwen2.encode("𓆏").tolist()
    assert len(frog) > 1 and qwen2.decode(frog[:-1]) == "\ufffd"


def test_token_shows_one_piece() -> None:
    qwen2, spm = tokenizer(QWEN2), tokenizer(SPM)
    assert qwen2.token(9707) == "Hello" and spm.token(15043) == " Hello"
    assert qwen2.token(151645) == "<|im_end|>"
    assert "".join(map(qwen2.token, qwen2.encode("𓆏"))) == r"\xf0\x93\x86\x8f"
    assert spm.token(3 + 0xE2) == r"\xe2"


def test_the_tokens_that_end_a_generation() -> None:
    # "</s>" is a plain piece of Qwen2's vocabulary.
    assert tokenizer(QWEN2).eos_ids == {151643, 151645}
    assert tokenizer(SPM).eos_ids == {2}
    assert full_ids(LLAMA3, np.array(sorted(tokenizer(LLAMA3).eos_ids))) == [128001, 128009]
    assert {tokenizer(SMOLLM2).token(id) for id in tokenizer(SMOLLM2).eos_ids} == {
        "<|endoftext|>",
        "<|im_end|>",
        "<reponame>",
    }
    named = Tokenizer.from_metadata(metadata(SPM) | {"tokenizer.ggml.eot_token_id": 5})
    assert named.eos_ids == {2, 5}


def test_what_is_known_of_a_vocabulary() -> None:
    spm, qwen2 = tokenizer(SPM), tokenizer(QWEN2)
    assert (spm.vocab_size, spm.bos_id, spm.eos_id, spm.unk_id) == (32000, 1, 2, 0)
    assert (qwen2.vocab_size, qwen2.eos_id, qwen2.unk_id) == (151936, 151643, None)
    assert spm.chat_template is None
    assert qwen2.chat_template is not None and "<|im_start|>" in qwen2.chat_template


@pytest.mark.parametrize("ids", [[151936], [-1], [0, 1 << 40]])
def test_ids_out_of_range(ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match=rf"token id {ids[-1]} is outside 0\.\.151935"):
        tokenizer(QWEN2).decode(ids)


def test_ids_that_are_no_row_of_integers() -> None:
    for ids in ([0.5], [[1]]):
        with pytest.raises(TokenizerError, match="not a row of integers"):
            tokenizer(QWEN2).decode(ids)  # type: ignore[arg-type]


def test_text_that_utf8_cannot_express() -> None:
    with pytest.raises(TokenizerError, match="character 1 is a lone surrogate"):
        tokenizer(QWEN2).encode("a\udc80")


@cache
def small() -> dict[str, Any]:
    """A byte-level vocabulary of 256 bytes and two merges."""
    alphabet = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    assert len(alphabet) == 256
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-v3",
        "tokenizer.ggml.tokens": [*alphabet, "ab", "abc", "xyz", "</s>"],
        "tokenizer.ggml.token_type": np.array([1] * 259 + [3], np.int32),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 259,
    }


def test_a_word_that_is_a_token_needs_no_merges() -> None:
    llama3 = Tokenizer.from_metadata(small())
    assert llama3.encode("abc").tolist() == [259, 257]
    assert llama3.encode("xyz", add_special=False).tolist() == [258]
    qwen2 = Tokenizer.from_metadata(small() | {"tokenizer.ggml.pre": "qwen2"})
    assert [qwen2.token(id) for id in qwen2.encode("xyz")] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model: missing"),
        ({"model": 3}, "model: a value of type int, not str"),
        ({"model": "bert"}, "model: 'bert' is not supported; supported: gpt2, llama"),
        ({"model": "no_vocab"}, "model: 'no_vocab': the file has token ids only"),
        ({"pre": None}, "pre: missing"),
        ({"pre": "tekken"}, "pre: .*'tekken' is not supported; supported: smollm, qwen2,.*llama-"),
        ({"pre": "x" * 9999}, "pre: .*xxx' is not supported"),
        ({"tokens": None}, "tokens: missing"),
        ({"tokens": np.arange(3)}, "tokens: not an array of strings"),
        ({"tokens": "abc"}, "tokens: not an array of strings"),
        ({"tokens": [], "token_type": None}, "tokens: no tokens"),
        ({"tokens": ["a", "b", "a"]}, "tokens: 'a' is both 0 and 2"),
        ({"token_type": np.ones(3, np.int32)}, "token_type: 3 entries for 260 tokens"),
        ({"token_type": np.ones(260, np.float32)}, "token_type: not an array of numbers"),
        ({"token_type": ["1"] * 260}, "token_type: not an array of numbers"),
        ({"merges": None}, "merges: missing"),
        ({"merges": ["a b", "a z"]}, "merges: entry 1, 'a z', does not join two tokens"),
        ({"merges": ["a b c"]}, "merges: entry 0, 'a b c'"),
        ({"merges": ["ab"]}, "merges: .*Token `` out of vocabulary"),
        ({"merges": [" ab"]}, "merges: .*Token `` out of vocabulary"),
        ({"merges": ["x yz"]}, "merges: .*Token `yz` out of vocabulary"),
        ({"bos_token_id": None}, "bos_token_id: missing, but prompts are to begin with it"),
        ({"add_eos_token": True}, "eos_token_id: missing, but prompts are to end with it"),
        ({"bos_token_id": 260}, "bos_token_id: 260 is not among the 260 tokens"),
        ({"eos_token_id": -1}, "eos_token_id: -1 is not among"),
        ({"eot_token_id": True}, "eot_token_id: a value of type bool, not int"),
        ({"add_bos_token": 1}, "add_bos_token: a value of type int, not bool"),
        ({"model": "llama"}, "scores: missing"),
        ({"model": "llama", "scores": np.zeros(9, np.float32)}, "scores: 9 entries for 260"),
        ({"model": "llama", "scores": np.full(260, np.nan)}, "scores: a score that is not finite"),
    ],
)  # fmt: skip
def test_malformed_vocabularies(changes: dict[str, Any], message: str) -> None:
    damaged = small() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    damaged = {key: value for key, value in damaged.items() if value is not None}
    with pytest.raises(TokenizerError, match=rf"^tokenizer\.ggml\.{message}") as failure:
        Tokenizer.from_metadata(damaged)
    assert len(str(failure.value)) < 500


def test_a_template_that_is_no_string() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template: not a string"):
        Tokenizer.from_metadata(small() | {"tokenizer.chat_template": 1})


def test_empty_pieces_get_a_name() -> None:
    tokens = ["", *small()["tokenizer.ggml.tokens"][1:]]
    assert (
        Tokenizer.from_metadata(small() | {"tokenizer.ggml.tokens": tokens}).token(0) == "[EMPTY_0]"
    )


def test_152k_tokens_load_with_little_python() -> None:
    """Three calls for each of 303,000 strings, 0.4 s on a usual machine."""
    found = metadata(QWEN2)
    strings = sum(len(found[f"tokenizer.ggml.{name}"]) for name in ("tokens", "merges"))
    assert strings > 300_000
    assert calls(lambda: Tokenizer.from_metadata(found)) < 3.5 * strings


def test_imports_are_late() -> None:
    code = (
        "import sys, pyruntime.hub, pyruntime.text.chat, pyruntime.text.tokenizer;"
        "print({'tokenizers', 'jinja2', 'tqdm', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
