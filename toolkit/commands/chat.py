"""`toolkit chat`: chat with a model in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from toolkit.errors import UserError, for_terminal, require_option

END = "/quit"


def setup(
    checkpoint_dir: str,
    prompt: str | None = None,
    system: str | None = None,
    prompt_style: str | None = None,
    chat_template: str | None = None,
    max_new_tokens: PositiveInt = 512,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 1234,
    base_checkpoint_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Chat with a model. Answers are streamed to stdout, everything else goes to stderr.

    Each line of input is a question, from the terminal or a pipe. /quit or Ctrl-D ends the chat. Ctrl-C interrupts an
    answer; between answers it ends the chat.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        prompt: Answer this one question and exit; "-" reads it from stdin.
        system: System message. Default: the chat template's.
        prompt_style: Chat template: alpaca, chatml, llama2, llama3, ... Default: the checkpoint's.
        chat_template: Jinja file with a chat template to use instead.
        max_new_tokens: Maximum number of tokens per answer.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 disables.
        top_p: Nucleus sampling: sample from the most likely tokens with this total probability; 1 disables.
        seed: Random seed; answer i uses seed + i - 1.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: bf16-true on CUDA, else that of the checkpoint.
        quantize: Linear layers of the blocks in 4 bits (bitsandbytes): bnb.nf4, or bnb.nf4-dq with quantized scales.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    from toolkit.inference.chat import Conversation, find_template
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.sampling import check_sampling

    check_sampling(temperature, top_k, top_p)
    hint = f"give either this or --prompt_style {prompt_style}, not both"
    require_option(chat_template is None or prompt_style is None, "chat_template", chat_template, hint)
    loaded = load_checkpoint(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        accelerator=accelerator,
        precision=precision,
        quantize=quantize,
        verify_checkpoint=verify_checkpoint,
    )
    template = find_template(loaded.tokenizer, prompt_style, chat_template)
    notes: list[str] = []
    conversation = Conversation(
        loaded.model,
        loaded.tokenizer,
        template,
        system=system,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p},
        seed=seed,
        notice=notes.append,
    )
    if prompt is not None:
        answer(conversation, require_text(read_stdin() if prompt == "-" else prompt), notes)
        return
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(
            f"{loaded.folder} on {loaded.device}; template: {template.name}", *template.notes, sep="\n", file=sys.stderr
        )
        print(f"{END} or Ctrl-D ends, Ctrl-C interrupts an answer", file=sys.stderr)
    for question in read_questions(is_interactive):
        try:
            answer(conversation, question, notes)
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print(flush=True)
            print("(interrupted)", file=sys.stderr)
        except UserError as error:  # such as a full context
            if not is_interactive:
                raise
            print(error, file=sys.stderr)


def answer(conversation: Any, question: str, notes: list[str]) -> None:
    """Stream an answer, then print notes and speed."""
    start = time.perf_counter()
    with closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            print(for_terminal(piece), end="", flush=True)
    print(flush=True)
    while notes:
        print(notes.pop(0), file=sys.stderr)
    seconds, count = time.perf_counter() - start, conversation.new_tokens
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)


def read_questions(is_interactive: bool) -> Iterator[str]:
    """Yield the non-empty lines of stdin until EOF or /quit."""
    on_terminal = is_interactive and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):  # enables line editing in input(); not available on Windows
            import readline  # noqa: F401
    while True:
        if on_terminal:
            try:
                line = input(">>> ")
            except EOFError:
                print(file=sys.stderr)
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
    """Return the question if it is valid."""
    try:
        text.encode()
    except UnicodeError as error:
        raise UserError("the question: is not valid UTF-8") from error
    if not text.strip():
        raise UserError("--prompt: is empty; ask something")
    return text
