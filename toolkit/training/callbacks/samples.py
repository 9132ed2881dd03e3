"""Generate samples during training from a fixed prompt, for ``--eval.max_new_tokens``."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.config import AUTO, Auto
from toolkit.data.base import PreparedData, TokenDataset, rows_of
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.inference.generate import complete
from toolkit.inference.sampling import GREEDY
from toolkit.inference.text import stop_tokens
from toolkit.models.config import ModelConfig
from toolkit.training.run import Callback, Metrics, Run
from toolkit.ui.events import write_event

PLAIN_PROMPT = 32  # prompt tokens for plain text
_MAX_CHARS = 60  # prompt characters printed
_NEW_TOKENS = 64  # maximum for --eval.max_new_tokens auto


@dataclass(frozen=True)
class Sampler(Callback):
    """Generates a sample from a fixed prompt after each validation.

    Args:
        prompt: Token ids of the prompt.
        max_new_tokens: See :func:`toolkit.inference.generate.generate_batch`.
        tokenizer: Decodes the sample; if None, token ids are printed.
    """

    prompt: list[int]
    max_new_tokens: int
    tokenizer: Tokenizer | None

    def on_validation_end(self, trainer: Run, metrics: Metrics) -> None:
        with trainer.evaluation_weights():
            report_sample(trainer, self._text(self.prompt), self.generate(trainer.model, trainer.display))

    def generate(self, model: nn.Module, display: Any) -> str:
        """Return a greedy sample. Collective (S6).

        Draws no random numbers and does not change training.

        Args:
            model: The model as Fabric wraps it.
            display: The run's display, silent except on rank 0.
        """
        display.phase("sampling")
        with generating(model):
            [tokens] = complete(
                model,
                [torch.tensor(self.prompt)],
                max_new_tokens=self.max_new_tokens,
                sampling=GREEDY,
                cuda_graph=False,  # a CUDA graph would take memory from training
                eos_ids=() if self.tokenizer is None else stop_tokens(self.tokenizer),
                notice=lambda line: None,
            )
        display.phase("training")
        return self._text(tokens)

    def _text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids)


def report_sample(trainer: Run, prompt: str, text: str, note: str = "") -> None:
    """Print a sample, with a note on it, and add it to the report."""
    step, text = trainer.progress.step, text if text.strip() else "(no tokens before EOS)"
    shown = " | ".join(" ".join(line.split()) for line in prompt.splitlines() if line.strip())
    if len(shown) > _MAX_CHARS:
        shown = f"... {shown[-_MAX_CHARS:].partition(' ')[2]}"  # do not cut words
    answer = textwrap.indent(text.strip(), "    ")
    trainer.display.message(f'sample after step {step}{note}, to "{shown}":\n{answer}')
    if ranks.global_rank() == 0:
        write_event(trainer.out_dir, "sample", step=step, prompt=prompt, text=text, note=note)


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Context in which a model that is trained generates text: in evaluation mode, and not compiled."""
    was_training = model.training
    model.eval()
    # the cache length changes with every token, so compiled blocks would recompile
    with torch.compiler.set_stance("force_eager"):
        yield
    model.train(was_training)


def make_sampler(data: PreparedData, config: ModelConfig | None, max_new_tokens: int | Auto) -> Sampler | None:
    """Build a sampler. Its prompt is from the first validation row, or the first training row without validation data.

    ``config`` is None for a user-provided model. Returns None if ``max_new_tokens`` is 0, or for a score layer.
    """
    if not max_new_tokens or (config is not None and config.head is not None):
        return None
    if config is None:
        raise UserError(
            f"--eval.max_new_tokens {max_new_tokens}: is not supported with a user-provided model; remove it"
        )
    fitting = max(1, min(_NEW_TOKENS, config.block_size // 2))
    if max_new_tokens == AUTO:
        max_new_tokens = fitting
    if max_new_tokens >= config.block_size:
        raise UserError(
            f"--eval.max_new_tokens {max_new_tokens}: must be less than {config.block_size}, the model's context length"
        )
    rows = data.val if data.val is not None and len(data.val) else data.train
    prompt = ranks.broadcast_from_rank0(first_prompt(rows))
    return Sampler(prompt[max_new_tokens - config.block_size :], max_new_tokens, data.tokenizer)


def first_prompt(rows: TokenDataset) -> list[int]:
    """Return the first row's tokens through its first supervised token. For plain text, return its first tokens."""
    row = rows_of(rows[0])[0]
    ids, learned = row["input_ids"].tolist(), (row["labels"] >= 0).tolist()
    if not any(learned):  # a prompt
        return ids
    # in a packed row, use the first document
    size = int((row["documents"] == 0).sum()) if "documents" in row else len(ids)
    if not any(learned[:size]) or learned[0]:
        return ids[: max(1, min(PLAIN_PROMPT, size // 2))]
    return ids[: learned.index(True) + 1]
