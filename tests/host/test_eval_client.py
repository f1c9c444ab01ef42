"""The lm-evaluation-harness on our engine, in NumPy."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluations import FOLDER, PAGE, ROOT, RUNS, answers, check, command, reference, transcripts
from goldens import GOLDEN
from models import write_talking_model

from pyruntime import Engine
from pyruntime.cli import main
from pyruntime.errors import TokenizerError
from pyruntime.hub import cached

pytest.importorskip("lm_eval", reason="needs pip install 'pyruntime-cuda[eval]'")

from lm_eval.api.model import CachingLM

from pyruntime.clients.lm_eval import PyruntimeLM

GREEDY = {"until": [], "max_gen_toks": 6}


def needs_smollm2() -> None:
    if cached("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `pyruntime info smollm2` fetches it")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Engine]:
    needs_smollm2()
    with Engine.load("smollm2", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("models") / "talking.gguf")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.load(path, device="cpu", max_tokens=32, kv_tokens=64) as engine:
        yield engine


@pytest.fixture
def lm(engine: Engine) -> PyruntimeLM:
    return PyruntimeLM(engine, max_length=40)


def requests(*arguments: Any) -> list[Any]:
    """As the harness makes them."""
    return [SimpleNamespace(args=args) for args in arguments]


# Answers of the harness's own hf


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
@pytest.mark.parametrize("run", RUNS)
def test_answers_are_those_of_transformers(run: str, smollm2: Engine) -> None:
    found = answers(run, PyruntimeLM(smollm2, max_length=RUNS[run].max_length))
    check(found, reference(run))


# What is asked of the engine


def test_a_likelihood_is_the_sum_of_the_engines_scores(lm: PyruntimeLM, engine: Engine) -> None:
    pairs = [("the cat", " sat"), ("a", "b"), ("abc", "d"), ("the dog is ", "old"), ("th", "e")]
    found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), answer in zip(pairs, found, strict=True):
        (score,) = engine.score(
            [context.rstrip()], [context[len(context.rstrip()) :] + continuation]
        )
        assert answer == (pytest.approx(score.total, abs=1e-4), score.is_greedy)


def test_nothing_before_a_text_is_bos(engine: Engine) -> None:
    for options, prefix in (({}, 0), ({"prefix_token_id": 7}, 7)):
        lm = PyruntimeLM(engine, **options)
        ((empty, greedy),) = lm.loglikelihood(requests(("", "abc")), disable_tqdm=True)
        (rolling,) = lm.loglikelihood_rolling(requests(("abc",)), disable_tqdm=True)
        (score,) = engine.score([[prefix]], [engine.tokenizer.encode("abc")])
        assert empty == rolling == pytest.approx(score.total, abs=1e-5)
        assert greedy == score.is_greedy
    assert lm.loglikelihood_rolling(requests(("",)), disable_tqdm=True) == [0]


def test_what_is_too_long_is_cut_off_on_the_left(lm: PyruntimeLM, engine: Engine) -> None:
    """The last token is not run: 40 tokens and one are."""
    long = "abcdefghij" * 6
    ((found, _),) = lm.loglikelihood(requests((long, "xyz")), disable_tqdm=True)
    (score,) = engine.score([long[-38:]], [engine.tokenizer.encode("xyz")])
    assert found == pytest.approx(score.total, abs=1e-4)


def test_a_text_longer_than_a_window_is_read_in_several(lm: PyruntimeLM, engine: Engine) -> None:
    text = "0123456789" * 9
    (found,) = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    ids = engine.tokenizer.encode(text).tolist()
    parts = [([0], ids[:40]), ([ids[39]], ids[40:80]), (ids[49:80], ids[80:])]
    scores = engine.score([p[0] for p in parts], [p[1] for p in parts])
    assert found == pytest.approx(sum(score.total for score in scores), abs=1e-3)


@pytest.mark.parametrize(
    ("continuation", "text"),
    [("a" * 41, "the continuation 'aaa.*of 41 tokens.* max_length=40"), ("ä", "of 0 tokens")],
)
def test_continuations_that_have_no_likelihood(
    lm: PyruntimeLM, continuation: str, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        lm.loglikelihood(requests(("a", continuation)), disable_tqdm=True)


def test_answers_side_by_side_are_those_alone(lm: PyruntimeLM, engine: Engine) -> None:
    """In two chunks: 64 positions hold four of them."""
    prompts = ["the cat", "abc", "", "0123456789", "x, y", "z" * 50]
    found = lm.generate_until(requests(*((p, GREEDY) for p in prompts)), disable_tqdm=True)
    for prompt, text in zip(prompts, found, strict=True):
        ids = engine.tokenizer.encode(prompt[-34:]).tolist() or [0]
        whole = engine.tokenizer.decode(engine.generate(ids, 6), skip_special=True)
        assert text == whole
    assert len({*found}) > 1


def test_an_answer_ends_before_what_it_is_to_stop_at(lm: PyruntimeLM) -> None:
    (whole,) = lm.generate_until(requests(("the cat", GREEDY)), disable_tqdm=True)
    assert len(whole) >= 3
    for stop in (whole[2], whole[1:3]):
        asked = {"until": [stop, "never"], "max_gen_toks": 6}
        (found,) = lm.generate_until(requests(("the cat", asked)), disable_tqdm=True)
        assert found == whole.split(stop)[0]
        assert asked == {"until": [stop, "never"], "max_gen_toks": 6}, "the harness's own"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"do_sample": True, "temperature": 0.7}, "do_sample=True, temperature=0.7: only greedy"),
        ({"temperature": 0.7}, "temperature=0.7: only greedy"),
        ({"num_beams": 4}, "num_beams=4: not supported"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: not supported"),
        ({"max_gen_toks": 40}, "max_gen_toks=40 leaves no token"),
    ],
)
def test_what_would_not_be_greedy_is_refused(
    lm: PyruntimeLM, kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        lm.generate_until(requests(("a", kwargs)), disable_tqdm=True)


def test_sampling_parameters_say_nothing_where_nothing_is_sampled(lm: PyruntimeLM) -> None:
    asked = [GREEDY, {**GREEDY, "do_sample": False, "temperature": 0.7, "top_p": 0.9}]
    first, second = lm.generate_until(requests(*(("ab", a) for a in asked)), disable_tqdm=True)
    assert first == second


# What the harness keeps


def test_its_cache_answers_without_the_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        "loglikelihood": requests(("a", "b"), ("a", "c")),
        "loglikelihood_rolling": requests(("abc",)),
        "generate_until": requests(("abc", GREEDY)),
    }
    database = str(tmp_path / "cache.db")
    lm = PyruntimeLM(engine)
    CachingLM(lm, database)  # gives the hook that each answer goes to
    first = {name: getattr(lm, name)(made, disable_tqdm=True) for name, made in asked.items()}
    monkeypatch.setattr(Engine, "score", None)
    monkeypatch.setattr(Engine, "prefill", None)
    cached = CachingLM(PyruntimeLM(engine), database)
    assert {name: getattr(cached, name)(made) for name, made in asked.items()} == first


# Chat


def test_chat_templates(lm: PyruntimeLM) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the answer"}]
    assert lm.apply_chat_template(said[:1]) == "<|begin|>user:hi<|end|><|begin|>assistant:"
    goes_on = "<|begin|>user:hi<|end|><|begin|>assistant:the answer"
    assert lm.apply_chat_template(said, add_generation_prompt=False) == goes_on
    system = {"role": "system", "content": "be brief"}
    assert lm.apply_chat_template([system, *said[:1]]) == lm.apply_chat_template(said[:1])
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    # The template writes BOS itself.
    assert lm.tok_encode("<|begin|>a") == [0, 2]


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = write_talking_model(tmp_path / "no.gguf", chat_template=None)
    with Engine.load(model, device="cpu") as engine:
        lm = PyruntimeLM(engine)
        with pytest.raises(TokenizerError, match="no chat template"):
            lm.apply_chat_template([{"role": "user", "content": "hi"}])


def test_bos_is_put_once(tmp_path: Path) -> None:
    model = write_talking_model(
        tmp_path / "bos.gguf", **{"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    )
    with Engine.load(model, device="cpu") as engine:
        lm = PyruntimeLM(engine)
        assert lm.tok_encode("a") == lm.tok_encode("<|begin|>a") == [0, 2]
        assert lm.tok_encode("a", add_special_tokens=False) == [2]


# Arguments


def test_model_args_go_before_what_the_command_line_says(path: Path) -> None:
    harness = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    text = f"pretrained={path},device=cpu,max_tokens=16,max_length=20"
    lm = PyruntimeLM.create_from_arg_string(text, harness)
    assert lm.engine.path == "cpu (NumPy)" and lm.engine.max_tokens == 16 and lm.max_length == 20
    assert lm.get_model_info()["model_path"] == lm.engine.path
    assert lm.tokenizer_name == str(path).replace("/", "__")
    given = PyruntimeLM.create_from_arg_obj({"pretrained": path, "kv_tokens": 50, "device": "cpu"})
    assert given.max_length == 50


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pretrained": None}, "pretrained=FILE.gguf"),
        ({"dtype": "float16"}, "model_args dtype='float16': unknown; .* weights"),
        ({"max_length": 129}, "max_length=129: 1 to 128"),
        ({"max_length": 0}, "max_length=0: 1 to 128"),
        ({"max_tokens": "many"}, "max_tokens='many'"),
        ({"prefix_token_id": 48}, "token id 48"),
    ],
)
def test_arguments_that_are_refused(path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TokenizerError), match=text):
        PyruntimeLM(**{"pretrained": path, "device": "cpu", **arguments})


# The command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Where there is no GPU."""
    return command(
        *arguments, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    )


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_is_ours_and_the_harnesss(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0 and done.stderr == ""
    ours, harness = done.stdout.index("pretrained=MODEL"), done.stdout.index("--num_fewshot")
    assert ours < harness


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("pretrained=nosuch.gguf --tasks pyruntime_facts", "nosuch.gguf"),
        ("pretrained={tiny} --tasks pyruntime_facts", "token ids only, no vocabulary"),
        ("pretrained={talking} --tasks nosuchtask", "Tasks not found: nosuchtask"),
        ("pretrained={talking} --tasks pyruntime_facts --device cuda:0", "no CUDA driver"),
        ("pretrained={talking},max_length=2 --tasks pyruntime_facts", "must be of 1 to max_length"),
        (
            "pretrained={talking} --tasks pyruntime_answers --gen_kwargs do_sample=True",
            "do_sample=True: only greedy",
        ),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: str,
    text: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On whatever there is, which is no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny = GOLDEN / "tiny-llama-q8_0.gguf"
    filled = arguments.format(tiny=tiny, talking=path).split()
    assert main(["eval", "--include_path", str(FOLDER), "--model_args", *filled]) in (2, 3)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pyruntime eval: ") and text in last


@pytest.mark.filterwarnings("ignore")
def test_what_another_model_needs_is_not_our_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    asked = ["--model", "hf", "--model_args", "pretrained=x", "--tasks", "pyruntime_facts"]
    assert main(["eval", "--include_path", str(FOLDER), *asked]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "lm-evaluation-harness: " in last and "huggingface" in last and "lm-eval[hf]" in last
    assert "pip install ." not in last


# The page


def test_the_page_shows_what_the_command_prints() -> None:
    needs_smollm2()
    assert transcripts()
    for arguments, shown in transcripts():
        done = run(*shlex.split(arguments))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == shown.strip()


def test_the_pages_python() -> None:
    needs_smollm2()
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    code = found[1].replace('device="auto"', 'device="cpu"')
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]
