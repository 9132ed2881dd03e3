"""`toolkit chat`: chat with a model in the terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from jsonargparse.typing import PositiveInt

from toolkit.commands.generate import describe_speed, print_stream
from toolkit.commands.inference_options import InferenceOptions
from toolkit.errors import UserError, notice, require_option

END = "/quit"


def setup(
    checkpoint_dir: str,
    prompt: str | None = None,
    system: str | None = None,
    prompt_style: str | None = None,
    chat_template: str | None = None,
    max_new_tokens: PositiveInt = 512,
    seed: int = 1234,
    shared: InferenceOptions = InferenceOptions(),
) -> None:
    """Chat with a model. Answers are streamed to stdout, everything else goes to stderr.

    Each line of input is a question, from the terminal or a pipe. /quit or Ctrl-D ends the chat. Ctrl-C interrupts an
    answer; between answers it ends the chat.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        prompt: Answer this one question and exit; "-" reads it from stdin.
        system: System message. Default: the chat template's.
        prompt_style: Chat template: alpaca, chatml, llama2, llama3, ... Default: the checkpoint's.
        chat_template: Jinja file with a chat template.
        max_new_tokens: Maximum number of tokens per answer.
        seed: Random seed; answer i uses seed + i - 1.
        shared: See :class:`InferenceOptions`.
    """
    from toolkit.inference.chat import Conversation, find_template
    from toolkit.inference.load import load_checkpoint

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": shared.sampling, "seed": seed}
    hint = f"is not supported with --prompt_style {prompt_style}; remove one of them"
    require_option(chat_template is None or prompt_style is None, "chat_template", chat_template, hint)
    loaded = load_checkpoint(checkpoint_dir, **shared.loading)
    template = find_template(loaded.tokenizer, prompt_style, chat_template)
    notes: list[str] = []
    options |= {"system": system, "notice": notes.append}
    conversation = Conversation(loaded.model, loaded.tokenizer, template, **options)
    is_interactive = prompt is None and sys.stdin.isatty()
    if is_interactive:
        heading = f"{loaded.folder} on {loaded.device}; template: {template.name}"
        for line in (heading, *template.notes, f"{END} or Ctrl-D ends, Ctrl-C interrupts an answer"):
            notice(line)
    if prompt is None:
        questions = read_questions(is_interactive)
    else:
        questions = iter([require_text(read_stdin() if prompt == "-" else prompt)])
    for question in questions:
        try:
            answer(conversation, question, notes)
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print(flush=True)
            notice("(interrupted)")
        except UserError as error:  # such as a full context
            if not is_interactive:
                raise
            notice(error)


def answer(conversation: Any, question: str, notes: list[str]) -> None:
    """Stream an answer, then print notes and speed."""
    start = time.perf_counter()
    with closing(conversation.ask(question)) as pieces:
        print_stream(pieces, notes)
    notice(describe_speed(conversation.new_tokens, start))


def read_questions(is_interactive: bool) -> Iterator[str]:
    """Yield the non-empty lines of stdin until EOF or /quit."""
    on_terminal = is_interactive and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):  # enables line editing in input(); not in every Python
            import readline  # noqa: F401
    while True:
        if on_terminal:
            try:
                line = input(">>> ")
            except EOFError:
                notice("")
                return
        else:
            if is_interactive:
                print(">>> ", end="", file=sys.stderr, flush=True)
            if not (line := read_stdin(one_line=True)):
                return
        if line.strip() == END:
            return
        if line.strip():
            yield require_text(line.strip())


def read_stdin(one_line: bool = False) -> str:
    try:
        return sys.stdin.readline() if one_line else sys.stdin.read()
    except UnicodeError as error:
        raise UserError("stdin: is not valid UTF-8") from error


def require_text(text: str) -> str:
    """Return a question; raise UserError if it is empty or not valid UTF-8."""
    try:
        text.encode()
    except UnicodeError as error:
        raise UserError("the question is not valid UTF-8") from error
    if not text.strip():
        raise UserError("--prompt: is empty; give a question")
    return text
