"""Scores of texts from a model with a head, for ``toolkit classify`` and the metric ``reward:FOLDER``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.data.batch import batch_texts
from toolkit.data.chat.sources import tokenizer_template
from toolkit.data.chat.template import Encoding
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.schemas import Record
from toolkit.data.sft.tokenize import Counts, cut_end, cut_prompts, mark_scored, tokenize_record
from toolkit.errors import UserError
from toolkit.inference.chat import find_template
from toolkit.inference.load import load_checkpoint
from toolkit_align.labels import MULTI, SINGLE
from toolkit_align.scores import read_scores


class TextScorer:
    """A model with a head and its tokenizer.

    Args:
        folder: The checkpoint.
        options: Further arguments of :func:`toolkit.inference.load.load_checkpoint`.

    Raises:
        UserError: The model has no head.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        loaded = load_checkpoint(folder, takes_head=True, **options)
        self.model, self.config, tokenizer = loaded.model, loaded.model.config, loaded.tokenizer
        if self.config.head is None:
            raise UserError(f"checkpoint_dir {loaded.folder}: has no head; train one with toolkit finetune_full --head")
        self.n_cut = 0  # texts longer than the context
        self._options: Any = SimpleNamespace(
            tokenizer=tokenizer,
            template=find_template(tokenizer) if tokenizer_template(tokenizer) is not None else None,
            no_template=UserError(f"checkpoint_dir {loaded.folder}: has no chat template for messages; give texts"),
            train_on="last_answer" if self.is_reward else "all",
        )

    @property
    def is_reward(self) -> bool:
        return self.config.head != "classification"

    def encode(self, record: Record) -> Encoding:
        """Tokenize a text or conversation as in training: a reward cuts the prompt from the left, others the end."""
        return self._fit(tokenize_record(record, self._options))

    def encode_answer(self, prompt: Record, answer: str) -> Encoding:
        """Tokenize a conversation with its answer. An empty answer is only the token that ends it."""
        try:
            return self.encode(_answered(prompt, answer))
        except EmptyAnswerError:
            ids, mask = tokenize_record(_answered(prompt, "answer"), self._options)
            start = mask.index(True)
            end = next((i for i in range(start, len(ids)) if ids[i] in self._options.template.stop_ids), len(ids))
            return self._fit(Encoding(ids[:start] + ids[end:], mask[:start] + mask[end:]))

    def _fit(self, encoding: Encoding) -> Encoding:
        limit, options = self.config.block_size, self._options
        if len(encoding.ids) > limit:
            self.n_cut += 1
            if self.is_reward:
                (encoding,) = cut_prompts([encoding], limit, options.tokenizer.bos_id, Counts())
            encoding = cut_end(encoding, limit, options.tokenizer)
        has_answer = any(encoding.loss_mask)
        return mark_scored(encoding, options.tokenizer.pad_id, self.config.head == "token_reward" and has_answer)

    def predict(self, encodings: Sequence[Encoding], batch_size: int = 8) -> Iterator[list[Any]]:
        """Yield the prediction for each text, then the probability of each label, or the rewards of its tokens."""
        for part in (encodings[i : i + batch_size] for i in range(0, len(encodings), batch_size)):
            yield from self._predict(part)

    @torch.no_grad()
    def _predict(self, encodings: Sequence[Encoding]) -> list[list[Any]]:
        model, labels, kind = self.model, self.config.labels or [], self.config.problem_type
        scores, row_of_score, _ = read_scores(model, batch_texts(encodings), next(model.parameters()).device)
        if self.config.head == "token_reward":
            by_row = scores[:, 0].split(row_of_score.bincount(minlength=len(encodings)).tolist())
            return [[rewards.mean().item(), rewards.tolist()] for rewards in by_row]
        if kind == SINGLE:
            return [[labels[shares.index(max(shares))], *shares] for shares in scores.softmax(1).tolist()]
        if kind == MULTI:
            of_texts = scores.sigmoid().tolist()
            return [[[labels[i] for i, share in enumerate(shares) if share > 0.5], *shares] for shares in of_texts]
        return [[values if len(values) > 1 else values[0]] for values in scores.tolist()]


def _answered(prompt: Record, answer: str) -> Record:
    return replace(prompt, messages=(*(prompt.messages or ()), {"role": "assistant", "content": answer}))
