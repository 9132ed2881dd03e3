"""Adapter from a model to lm-eval (an optional dependency): batched log-likelihoods and continuations.

Results match ``lm_eval.models.huggingface.HFLM``. HFLM needs an exported model. It cannot evaluate 4-bit
weights, unmerged adapters or extension families, and it computes the logits of complete batches at once.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.decode import PREFILL
from toolkit.inference.generate import generate_batch
from toolkit.inference.text import require_embedded, stop_tokens
from toolkit.models.gpt import GPT

T = TypeVar("T")
DEFAULT_NEW_TOKENS = 256  # lm-eval's default
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # names of the maximum number of new tokens
_SUPPORTED_SETTINGS = {"until", "do_sample", "temperature", "top_k", "top_p", *_LIMITS}


class HarnessLM(TemplateLM):
    """A GPT for :func:`lm_eval.simple_evaluate`.

    Args:
        model: A model in evaluation mode; may be wrapped by Fabric.
        tokenizer: The model's tokenizer.
        batch_size: Sequences per forward pass. With longrope, likelihoods are computed one by one, because padding
            would change the RoPE factors of shorter sequences.
        template: Chat template for tasks in chat format.
        notice: Called with one line for the user.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        template: ChatTemplate | None = None,
        notice: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        ids = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
        if not ids:
            raise UserError(f"{tokenizer.name}: has neither bos nor eos; set one in tokenizer_config.json")
        self._model, self._tokens = model, tokenizer
        self._prefix, self._end = ids[0], ids[-1]
        self._batch_size = batch_size if model.config.original_max_position is None else 1
        self._rows_together = batch_size if model.is_row_independent else 1
        self._template, self._notice, self._has_warned = template, notice, False
        self._device = model.get_parameter("transformer.wte.weight").device
        self._eos_ids = {*stop_tokens(tokenizer), self.eot_token_id}
        require_embedded([self.prefix_token_id], model.config, tokenizer.name)

    # ---- text and tokens

    @property
    def eot_token_id(self) -> int:
        return self._end

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def max_length(self) -> int:
        return self._model.config.block_size

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text. Does not add a second bos if it starts with bos, as a rendered chat template may."""
        ids = self._tokens.encode(string, bos=False)
        require_embedded(ids, self._model.config, self._tokens.name)
        return self._tokens.missing_ends(ids, add_special_tokens and self._tokens.bos_id is not None)[0] + ids

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if self._template is not None and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation; without a generation prompt the text ends with the content of the last message.

        The system message (lm-eval's task description) is dropped if the template does not support one.
        """
        assert self._template is not None
        try:
            text = self._template.render(chat_history, add_generation_prompt)
        except UserError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            if not self._has_warned:
                self._notice(f"task descriptions are omitted: {error}")
            self._has_warned = True
            return self.apply_chat_template(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    # ---- likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each (_, context tokens, continuation tokens).

        Requests with the same input, such as multiple-choice letters, share a forward pass.
        """
        requests_by_input: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: a continuation has {len(continuation)} tokens; must have 1 to {self.max_length}"
                )
            window = [*context, *continuation][-self.max_length - 1 :]
            requests_by_input.setdefault(tuple(window[:-1]), []).append(i)
        results: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="likelihoods", disable=disable_tqdm or None) as progress:
            for inputs in _batches(sorted(requests_by_input, key=len, reverse=True), self._batch_size):
                targets = [(row, i) for row, ids in enumerate(inputs) for i in requests_by_input[ids]]
                scores = self._score(inputs, [(row, requests[i][2]) for row, i in targets])
                for (_, i), score in zip(targets, scores, strict=True):
                    results[i] = score
                progress.update(len(targets))
        return results

    @torch.no_grad()
    def _score(self, inputs: Sequence[Sequence[int]], targets: list[tuple[int, list[int]]]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each (row, continuation). The row's last tokens predict the tokens.

        Runs in chunks of tokens to bound the memory of the logits.
        """
        width = len(inputs[0])
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in inputs], device=self._device)
        cache = None
        if width > PREFILL:
            cache = self._model.make_cache(len(inputs), width)
            cache.sequence_length = width
        totals, greedy = [0.0] * len(targets), [True] * len(targets)
        for start in range(0, width, PREFILL):
            logits = self._model(ids[:, start : start + PREFILL], kv_cache=cache)
            for k, (row, continuation) in enumerate(targets):
                first = len(inputs[row]) - len(continuation)  # the position that predicts its first token
                begin, end = max(first, start), min(len(inputs[row]), start + logits.size(1))
                if begin < end:
                    labels = torch.tensor(continuation[begin - first : end - first], device=self._device)
                    chunk = logits[row, begin - start : end - start].float()
                    totals[k] += float(torch.log_softmax(chunk, -1).gather(-1, labels[:, None]).sum())
                    greedy[k] &= bool((chunk.argmax(-1) == labels).all())
        return list(zip(totals, greedy, strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of complete texts, computed in windows of the model's context length."""
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
        """Generate until a stop string, end of text, or the maximum number of tokens."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        results = [""] * len(requests)
        with tqdm(total=len(requests), desc="continuations", disable=disable_tqdm or None) as progress:
            for settings, members in groups.items():
                stops, limit, sampling = _read_settings(json.loads(settings))
                if limit >= self.max_length:
                    context = f"the model's context length is {self.max_length}; remove this task"
                    raise UserError(f"--tasks: a task requests {limit} new tokens, but {context}")
                prompts = {i: self.tok_encode(requests[i].args[0])[limit - self.max_length :] for i in members}
                for batch in _batches(sorted(members, key=lambda i: -len(prompts[i])), self._rows_together):
                    answers = self._continue([prompts[i] for i in batch], stops, limit, sampling)
                    for i, answer in zip(batch, answers, strict=True):
                        results[i] = answer
                    progress.update(len(batch))
        return results

    def _continue(self, prompts: list[list[int]], stops: list[str], limit: int, sampling: dict[str, Any]) -> list[str]:
        """Return one answer per prompt, truncated at the first stop string."""
        rows = [torch.tensor(prompt or [self.prefix_token_id]) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in rows]
        is_done = [False] * len(rows)
        tail = 4 * max(map(len, stops), default=0) + 8  # number of last tokens to search for a stop string
        steps = generate_batch(
            self._model, rows, max_new_tokens=limit, eos_ids=self._eos_ids, notice=self._notice, **sampling
        )
        with closing(steps):
            for tokens in steps:
                for i, token in enumerate(tokens):
                    if not is_done[i] and token is not None:
                        answers[i].append(token)
                        text = self._tokens.decode(answers[i][-tail:])
                        is_done[i] = any(stop in text for stop in stops)
                    is_done[i] |= token is None
                if all(is_done):
                    break
        return [_truncate_at_stop(self._tokens.decode(answer), stops) for answer in answers]


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _read_settings(settings: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Return stop strings, maximum new tokens and sampling settings from a task's generation settings."""
    if unknown := sorted(settings.keys() - _SUPPORTED_SETTINGS):
        names = ", ".join(unknown)
        raise UserError(f"--tasks: requests generation settings that are not supported: {names}; choose other tasks")
    until = settings.get("until") or []
    limit = next((settings[name] for name in _LIMITS if settings.get(name) is not None), DEFAULT_NEW_TOKENS)
    sampling: dict[str, Any] = {"temperature": 0.0}
    if settings.get("do_sample"):
        sampling = {"temperature": settings.get("temperature", 1.0)}
        sampling |= {name: settings[name] for name in ("top_k", "top_p") if settings.get(name) is not None}
    return [until] if isinstance(until, str) else [stop for stop in until if stop], int(limit), sampling


def _truncate_at_stop(text: str, stops: list[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text
