"""How commands come to a prompt: from an option, a file or standard input, to token ids."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.llm import LLM

PromptOption = Annotated[
    str | None, typer.Option("--prompt", help="The text; without it or a file, standard input is read.")
]
PromptFileOption = Annotated[Path | None, typer.Option("--prompt-file", help="Read the text from this file.")]
ChatOption = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default if there is one.")
]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text from the option, the file or standard input; exactly one of them.

    Raises:
        InputError: there is none, or two, or it is not UTF-8 text.
    """
    if prompt is not None and prompt_file is not None:
        raise InputError("both --prompt and --prompt-file are given; use one of them")
    if prompt is not None:
        return prompt
    try:
        if prompt_file is not None:
            return prompt_file.read_text(encoding="utf-8")
        if sys.stdin.isatty():
            raise InputError("there is no prompt; use --prompt, --prompt-file or standard input")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{prompt_file or 'standard input'} is not UTF-8 text ({error}); convert it first") from None


def tokenize(llm: "LLM", model: str, text: str, chat: bool | None) -> list[int]:
    """Token ids of the text, as a user's turn where a chat template is there or asked for.

    Raises:
        InputError: the text is empty, or the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise InputError(f"{model} comes without a tokenizer; put its tokenizer.json beside the weights")
    if not text:
        raise InputError("the prompt is empty; give at least one character")
    if chat or (chat is None and llm.tokenizer.has_chat_template):
        return llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return llm.tokenizer.encode(text)
