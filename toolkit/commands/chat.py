"""`toolkit chat`: a conversation with a model in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

END = "/quit"


def setup(
    checkpoint_dir: str,
    prompt: str | None = None,
    system: str | None = None,
    prompt_style: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 1234,
    base_checkpoint_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Talk with a model: answers on stdout as they come, everything else on stderr.

    A line is a question, from the terminal or from a pipe. /quit or Ctrl-D ends the chat; Ctrl-C interrupts an answer,
    and between answers the chat.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are taken as they are, unmerged.
        prompt: Ask this one question and end; "-" reads all of stdin as one.
        system: The system message; what the template has for one when not given.
        prompt_style: The chat template: alpaca, chatml, llama2, llama3, ...; the checkpoint's own when not given.
        max_new_tokens: Stop an answer after so many tokens, if the model does not end it before.
        temperature: Flattens (above 1) or sharpens (below 1) the distribution; 0 always takes the likeliest token.
        top_k: Draw among so many of the likeliest tokens; 0 for all.
        top_p: Draw among the fewest likeliest tokens whose probabilities reach this sum; 1 for all.
        seed: Chooses the draws; answer i has the seed seed + i - 1.
        base_checkpoint_dir: The base of adapters; the folder that it had in training when not given.
        accelerator: Where to compute.
        precision: Type of weights and computation; that of the checkpoint when not given.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
    """
    import sys

    from toolkit.errors import UserError
    from toolkit.inference.chat import Conversation, find_template
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.sampling import check_sampling

    check_sampling(temperature, top_k, top_p)
    if max_new_tokens <= 0:
        raise UserError(f"--max_new_tokens {max_new_tokens}: must be greater than zero")
    loaded = load_checkpoint(
        checkpoint_dir, base_checkpoint_dir=base_checkpoint_dir, accelerator=accelerator, precision=precision,
        verify=verify_checkpoint,
    )  # fmt: skip
    template = find_template(loaded.tokenizer, prompt_style)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    notes: list[str] = []
    conversation = Conversation(
        loaded.model, loaded.tokenizer, template,
        system=system, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, notice=notes.append,
    )  # fmt: skip
    if prompt is not None:
        answer(conversation, require_text(read_stdin() if prompt == "-" else prompt), notes)
        return
    person = sys.stdin.isatty()
    if person:
        print(
            f"{loaded.folder} on {loaded.device}; template: {template.name}", *template.notes, sep="\n", file=sys.stderr
        )
        print(f"{END} or Ctrl-D ends, Ctrl-C interrupts an answer", file=sys.stderr)
    for question in questions(person):
        try:
            answer(conversation, question, notes)
        except KeyboardInterrupt:
            if not person:
                raise
            print(flush=True)
            print("(interrupted)", file=sys.stderr)
        except UserError as error:  # such as a full context
            if not person:
                raise
            print(error, file=sys.stderr)


def answer(conversation: Any, question: str, notes: list[str]) -> None:
    """Print an answer while it comes; below it the notes that were made meanwhile, and how fast it came."""
    import sys
    import time
    from contextlib import closing

    start = time.perf_counter()
    with closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print(flush=True)
    while notes:
        print(notes.pop(0), file=sys.stderr)
    seconds, count = time.perf_counter() - start, conversation.new_tokens
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)


def questions(person: bool) -> Iterator[str]:
    """Lines of stdin, without those that are empty, up to its end or /quit."""
    import sys
    from contextlib import suppress

    on_terminal = person and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):  # Windows; elsewhere input() then knows the arrow keys
            import readline  # noqa: F401
    while True:
        if on_terminal:
            try:
                line = input(">>> ")
            except EOFError:
                print(file=sys.stderr)
                return
        else:
            if person:
                print(">>> ", end="", file=sys.stderr, flush=True)
            if not (line := read_stdin(one_line=True)):
                return
        if line.strip() == END:
            return
        if line.strip():
            yield require_text(line.strip())


def read_stdin(one_line: bool = False) -> str:
    import sys

    from toolkit.errors import UserError

    try:
        return sys.stdin.readline() if one_line else sys.stdin.read()
    except UnicodeError as error:
        raise UserError("stdin: is not valid UTF-8") from error


def require_text(text: str) -> str:
    """Return a question that can be encoded.

    Raises:
        UserError: it is empty or not valid UTF-8.
    """
    from toolkit.errors import UserError

    try:
        text.encode()
    except UnicodeError as error:
        raise UserError("the question: is not valid UTF-8") from error
    if not text.strip():
        raise UserError("--prompt: is empty; ask something")
    return text
