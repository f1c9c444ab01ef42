"""Chat templates: what real ones render to, and what hostile ones cannot do."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from pyruntime.errors import TokenizerError
from pyruntime.text import sandbox
from pyruntime.text.chat import render

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {#- The user speaks first. #}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST] " ~ message.content ~ "[/INST]" }}
    {%- else %}
        {%- generation %}
            {{- " " + message.content + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
# The constructs of Gemma's: names of its own for roles, and no system message.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('no system role') }}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
TALK = [
    {"role": "user", "content": " Hi <b> é "},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]


def run(template: str, **keywords: bool) -> str:
    return render(template, TALK, bos="<s>", eos="</s>", **keywords)


def test_chatml() -> None:
    assert run(CHATML) == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\n Hi <b> é <|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama3_without_generation_prompt() -> None:
    assert run(LLAMA3, add_generation_prompt=False) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi <b> é<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    )


def test_gemma() -> None:
    assert run(GEMMA) == (
        "<s><start_of_turn>user\nHi <b> é<end_of_turn>\n"
        "<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(TokenizerError, match="no system role"):
        render(GEMMA, [{"role": "system", "content": "x"}], bos="", eos="")


def test_generation_blocks_mean_nothing() -> None:
    assert run(MISTRAL) == "<s>[INST]  Hi <b> é [/INST] Yes?</s>[INST] Bye[/INST]"


def test_the_template_may_refuse() -> None:
    with pytest.raises(TokenizerError, match="chat template: Conversation roles must alternate"):
        render(MISTRAL, TALK[1:], bos="", eos="")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'é': '<'} | tojson }}", '{"é": "<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for m in messages %}{{ loop.length }}{{ loop.last }}{% endfor %}",
         "3False3False3True"),
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),
        ("{{ tools is none }}{{ tools is defined }}{{ nope is defined }}", "TrueTrueFalse"),
        ("{{ messages[::-1][0].content }}{{ messages | map(attribute='role') | join(',') }}",
         "Byeuser,assistant,user"),
        ("{{ 'a-b'.split('-') | join('+') }}{{ 'x'.join(['a', 'b']) }}", "a+baxb"),
        ("{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b') }}", "bbabbb"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{% set n = namespace(x=0) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}"
         "{{ n.x }}{{ 2 ** 8 }}{{ '=' * 3 }}{{ 7 % 4 }}", "3256===3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') | upper }}", "[A]"),
        ("{% set x | upper %}a{% endset %}{% filter lower %}B{% endfilter %}{{ x }}", "bA"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, text: str) -> None:
    assert run(template) == text


DOUBLE = "{% set n = namespace(s='ab') %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ range(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 1 | tojson(indent=10 ** 9) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        DOUBLE + "{% set n.s = n.s + n.s %}{% endfor %}",
        DOUBLE + "{% set n.s = n.s ~ n.s %}{% endfor %}",
        DOUBLE + "{% set n.s = n.s | replace('a', 'aaaa') %}{% endfor %}",
        DOUBLE + "{% set n.s = n.s.replace('a', 'aaaa') %}{% endfor %}",
        DOUBLE + "{% set n.s = n.s.join(['a'] * 999) %}{% endfor %}",
        DOUBLE + "{% set n.s = (['a'] * 999) | join(n.s) %}{% endfor %}",
        DOUBLE + "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% include '/etc/passwd' %}",
        " " * 300_000,
    ],
)  # fmt: skip
def test_hostile_templates_are_refused(template: str) -> None:
    """Before they have built what they ask for, and so before their time is over."""
    tracemalloc.start()
    with pytest.raises(TokenizerError, match=r"chat template: (?!rendering takes longer)"):
        run(template)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop('ab') if loop.depth < 40 }}{% endfor %}",
    ],
)
def test_endless_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match=r"longer than 0\.05 s"):
        run(template)


def test_waiting_is_not_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when other programs have the processor."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(sandbox, "_strftime_now", lambda format: time.sleep(1.1) or "now")
    assert run("{{ strftime_now('%Y') }}{{ 'x' | upper }}") == "nowX"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n{% if %}", "line 2: Expected an expression"),
        ("{{ nope.x }}", "'nope' is undefined"),
        ("{{ 'a' | nope }}", "line 1: No filter named 'nope'"),
        ("{{ raise_exception('\x1b[31mred\x07') }}", r"\\x1b\[31mred\\x07$"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_errors_say_what_the_template_did(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        run(template)


def test_a_refusal_is_short() -> None:
    with pytest.raises(TokenizerError) as refusal:
        run("{{ raise_exception('x' * 99999) }}")
    assert len(str(refusal.value)) < 600
