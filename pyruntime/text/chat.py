"""Chat messages to a prompt, by the template that a GGUF file carries (`tokenizer.chat_template`).

Templates are Jinja, with what Hugging Face's `apply_chat_template` adds to it; see
https://huggingface.co/docs/transformers/chat_templating. They come with the file, so they are
rendered in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyruntime.errors import TokenizerError

if TYPE_CHECKING:
    from pyruntime.text.tokenizer import Tokenizer

_MAX_TEMPLATE = 1 << 18
_MESSAGE_SHOWN = 500


def conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """`render` with the template and the special tokens of a model.

    Raises TokenizerError, also where the model has no template.
    """
    if tokenizer.chat_template is None:
        raise TokenizerError("this model has no chat template")
    bos, eos = (
        "" if i is None else tokenizer.token(i) for i in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return render(
        tokenizer.chat_template, messages, bos=bos, eos=eos,
        add_generation_prompt=add_generation_prompt,
    )  # fmt: skip


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt for `messages`, each with `role` and `content`.

    `bos` and `eos` are the texts of those tokens; a template writes them itself, so the prompt is
    encoded with `add_special=False`. `add_generation_prompt` opens the assistant's turn. Raises
    TokenizerError for a template that is malformed, refuses the messages, or goes beyond the
    bounds that `pyruntime.text.sandbox` lists.
    """
    from pyruntime.text.sandbox import Sandbox  # Jinja takes a while to import

    if len(template) > _MAX_TEMPLATE:
        raise TokenizerError(f"chat template: {len(template)} characters, at most {_MAX_TEMPLATE}")
    try:
        return Sandbox().prompt(
            template,
            messages=messages,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
    except Exception as error:  # anything at all may come out of a template
        line = getattr(error, "lineno", None)
        place = f"line {line}: " if line else ""
        problem = str(error) or type(error).__name__
        # Escaped: the text may be the template's own, and may be meant for a terminal.
        shown = repr(problem[:_MESSAGE_SHOWN])[1:-1]
        raise TokenizerError(f"chat template: {place}{shown}") from error
