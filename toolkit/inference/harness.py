"""A model as lm-eval asks for one: likelihoods of texts and greedy continuations, in batches.

Imports lm-eval, which is an extra. What is computed is what lm-eval's own wrapper of a transformers model computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn
from tqdm import tqdm

from toolkit.data.chat_template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.generate import PREFILL, prefill
from toolkit.inference.kv_cache import KVCache
from toolkit.inference.sampling import sample
from toolkit.inference.text import require_embedded, stop_tokens

T = TypeVar("T")
DEFAULT_NEW_TOKENS = 256  # lm-eval's, where a task does not say
_KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "max_new_tokens", "max_tokens"}


class HarnessLM(TemplateLM):
    """A GPT for :func:`lm_eval.simple_evaluate`.

    Args:
        model: In evaluation mode; Fabric's wrapper of it, too.
        tokenizer: Its own.
        batch_size: Sequences per forward pass; one where the model rotates long ones otherwise, as padding would make
            others long.
        template: For tasks that are asked as a chat.
        notice: Takes one line for people.

    Raises:
        UserError: the tokenizer has neither bos nor eos, or the model does not know the one that begins a text.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        template: ChatTemplate | None = None,
        notice: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        if tokenizer.bos_id is None and tokenizer.eos_id is None:
            raise UserError(f"{tokenizer.name}: has neither bos nor eos, one of which must begin a text")
        self._model, self._tokens = model, tokenizer
        self._batch_size = batch_size if model.config.original_max_position is None else 1
        self._template, self._notice, self._noted = template, notice, False
        weight = model.transformer.wte.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._eos_ids = {*stop_tokens(tokenizer), self.eot_token_id}
        require_embedded([self.prefix_token_id], model.config, tokenizer.name)

    # ---- text and tokens

    @property
    def eot_token_id(self) -> int:
        return self._tokens.bos_id if self._tokens.eos_id is None else self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    @property
    def max_length(self) -> int:
        return self._model.config.block_size

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; one that begins with bos, as a chat template's does, gets no second one.

        Raises:
            UserError: the model does not know a token.
        """
        ids = self._tokens.encode(string, bos=False)
        require_embedded(ids, self._model.config, self._tokens.name)
        adds = self._tokens.adds_bos if add_special_tokens is None else add_special_tokens
        if not adds or self._tokens.bos_id is None or ids[:1] == [self._tokens.bos_id]:
            return ids
        return [self._tokens.bos_id, *ids]

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if self._template is not None and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a generation prompt it ends within the last message.

        A system message, as which lm-eval gives a task's description, is left out where the template has none.
        """
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt)
        except UserError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            if not self._noted:
                self._notice(f"the tasks' descriptions are left out: {error}")
            self._noted = True
            return self.apply_chat_template(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    # ---- likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(anything, tokens of the context, tokens of the continuation) -> log-likelihood, whether it is greedy.

        Requests with the same input, such as the letters of a multiple choice, share a forward pass.
        """
        asked: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: a continuation of {len(continuation)} tokens; the model takes 1 to {self.max_length}"
                )
            window = [*context, *continuation][-self.max_length - 1 :]
            asked.setdefault(tuple(window[:-1]), []).append(i)
        found: list[Any] = [None] * len(requests)
        progress = tqdm(total=len(requests), desc="likelihoods", disable=disable_tqdm or None)
        for inputs in _batches(sorted(asked, key=len, reverse=True), self._batch_size):
            wanted = [(row, i) for row, ids in enumerate(inputs) for i in asked[ids]]
            scores = self._score(inputs, [(row, requests[i][2]) for row, i in wanted])
            for (_, i), score in zip(wanted, scores, strict=True):
                found[i] = score
            progress.update(len(wanted))
        progress.close()
        return found

    @torch.no_grad()
    def _score(
        self, inputs: Sequence[Sequence[int]], wanted: list[tuple[int, list[int]]]
    ) -> Iterator[tuple[float, bool]]:
        """Log-likelihoods of (row, continuation), each of which is predicted by the last tokens of its row.

        A piece of the sequences at a time: the logits of all of them would be large.
        """
        width = len(inputs[0])
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in inputs], device=self._device)
        cache = KVCache(self._model.config, len(inputs), width, self._device, self._dtype) if width > PREFILL else None
        totals, greedy = [0.0] * len(wanted), [True] * len(wanted)
        for start in range(0, width, PREFILL):
            logits = self._model(ids[:, start : start + PREFILL], kv_cache=cache, sequence_length=width)
            for k, (row, continuation) in enumerate(wanted):
                first = len(inputs[row]) - len(continuation)  # the position that predicts its first token
                begin, end = max(first, start), min(len(inputs[row]), start + logits.size(1))
                if begin < end:
                    targets = torch.tensor(continuation[begin - first : end - first], device=self._device)
                    here = logits[row, begin - start : end - start].float()
                    totals[k] += float(torch.log_softmax(here, -1).gather(-1, targets[:, None]).sum())
                    greedy[k] &= bool((here.argmax(-1) == targets).all())
        return zip(totals, greedy, strict=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in pieces of the model's context."""
        windows = []
        for i, request in enumerate(requests):
            pieces = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            windows += [(i, *make_disjoint_window(piece)) for piece in pieces]
        totals = [0.0] * len(requests)
        for (i, *_), (score, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += score
        return totals

    # ---- continuations

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until one of their own stop texts, or the end of a text, or their limit.

        Raises:
            UserError: a task asks for what is not there, or its limit leaves no room for a prompt.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        found = [""] * len(requests)
        progress = tqdm(total=len(requests), desc="continuations", disable=disable_tqdm or None)
        for settings, members in groups.items():
            stops, limit, sampling = _read_settings(json.loads(settings))
            if limit >= self.max_length:
                raise UserError(
                    f"--tasks: asks for up to {limit} new tokens; the model's context of {self.max_length} "
                    "leaves no room for a prompt"
                )
            prompts = {i: self.tok_encode(requests[i].args[0])[limit - self.max_length :] for i in members}
            for batch in _batches(sorted(members, key=lambda i: -len(prompts[i])), self._batch_size):
                answers = self._continue([prompts[i] for i in batch], stops, limit, sampling)
                for i, answer in zip(batch, answers, strict=True):
                    found[i] = answer
                progress.update(len(batch))
        progress.close()
        return found

    @torch.no_grad()
    def _continue(self, prompts: list[list[int]], stops: list[str], limit: int, sampling: dict[str, Any]) -> list[str]:
        """Texts that follow prompts of unequal length: as long as a row has a prompt, its tokens are fed, then those
        that were drawn; so no row is padded on the left."""
        rows = [list(prompt or [self.prefix_token_id]) for prompt in prompts]
        begins, ended = [len(row) for row in rows], [False] * len(rows)
        config = self._model.config
        cache = KVCache(config, len(rows), max(begins) + limit, self._device, self._dtype)
        tail = 4 * max(map(len, stops), default=0) + 8  # tokens in which a stop text shows, however it is spelled
        ids = torch.tensor([row[: min(begins)] for row in rows], device=self._device)
        while not all(ended):
            logits = self._model(prefill(self._model, ids, cache), kv_cache=cache)[:, -1]
            drawn = sample(logits, vocab_size=config.vocab_size, **sampling).tolist()
            for i, row in enumerate(rows):
                if ended[i] or len(row) > cache.length:
                    continue
                if drawn[i] not in self._eos_ids:
                    row.append(drawn[i])
                said = self._tokens.decode(row[begins[i] :][-tail:])
                full = len(row) - begins[i] >= limit
                ended[i] = drawn[i] in self._eos_ids or full or any(stop in said for stop in stops)
            newest = [row[cache.length] if cache.length < len(row) else 0 for row in rows]
            ids = torch.cat([ids, torch.tensor(newest, device=self._device)[:, None]], dim=1)
        return [_cut(self._tokens.decode(row[begin:]), stops) for row, begin in zip(rows, begins, strict=True)]


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _read_settings(given: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Stop texts, the most new tokens, and how to draw, from what a task says."""
    if unknown := sorted(given.keys() - _KNOWN):
        raise UserError(f"--tasks: asks for a generation with {', '.join(unknown)}, which this command does not have")
    until = given.get("until") or []
    limits = (given.get(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))
    limit = next((limit for limit in limits if limit is not None), DEFAULT_NEW_TOKENS)
    sampling: dict[str, Any] = {"temperature": 0.0}
    if given.get("do_sample"):
        sampling = {"temperature": given.get("temperature", 1.0)}
        sampling |= {name: given[name] for name in ("top_k", "top_p") if given.get(name) is not None}
    return [until] if isinstance(until, str) else [stop for stop in until if stop], int(limit), sampling


def _cut(text: str, stops: list[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text
