"""What objectives over the model's own answers share: they generate, store, score and batch them before each step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config.checks import require_positive
from toolkit.data.base import PreparedData, Row
from toolkit.errors import UserError
from toolkit.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.data.batch import Batch
    from toolkit.training.launch import Launch
    from toolkit_on_policy.rollouts import Rollout

ANSWERS = "answers"
N_SAMPLES = 3
"""Answers of a validation that are shown."""
LOGGED = ("answer_tokens", "truncated")
"""Logged of each answer."""


@dataclass
class OnPolicy(Objective):
    """An objective over answers that the model samples before each step.

    Args:
        answers: Answers to each prompt in a step.
        max_new_tokens: Tokens of an answer; longer ones are cut off.
        temperature: Divides the logits, in sampling and in the loss.
        gather_weights: Under fsdp, gather the weights once per rollout, not for every token. It needs memory for all.

    Attributes:
        scores: A :class:`toolkit_metric.scores.AnswerScores` for rewards, on rank 0.
        samples: Some answers of the last validation.
        differences: How far the decoder's log-probabilities were from the trainer's in each forward pass, in nats.
    """

    answers: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    gather_weights: bool = field(default=True, compare=False)

    data_share: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require_positive("objective", self, "answers", "max_new_tokens", "temperature")

    def count(self, batch: Batch) -> dict[str, int]:
        return {ANSWERS: sum(row >= 0 for row in batch.ids)}

    def cached_rows(self, row_bytes: int) -> int:
        from toolkit_metric.answerer import sampled_rows

        return sampled_rows(row_bytes)

    def prepare(self, launch: Launch) -> PreparedData:
        from toolkit.checkpoints.fingerprint import base_fingerprint

        strategy = launch.config.strategy
        if not (self.gather_weights or strategy.kind == "fsdp"):
            raise UserError(f"--objective.gather_weights false: has no effect with {strategy.kind}; remove it")
        self._launch, self.samples = launch, list[Any]()
        self.differences: list[Tensor] = []
        self.scores: Any = None
        self.sampled_tokens, self.sampling_seconds = 0, 0.0  # of rollouts since the last row of metrics
        # What the weights of a step depend on, but for rounding: stored answers are of these weights only.
        args, schedule = launch.args, launch.schedule
        assert args.base_dir is not None, "it finetunes"
        self._origin = [
            asdict(launch.fingerprint), asdict(schedule), base_fingerprint(args.base_dir), args.from_peft,
            args.train.max_norm, args.train.skip_spikes, schedule.total_seconds and launch.launched_at,
        ]  # fmt: skip
        limit = launch.config.max_seq_length or 0
        datasets: Any = launch.data.train, launch.data.val
        for rows in datasets:
            for prompt in rows.prompts:
                answer = prompt.answer if self.data_share and rows is launch.data.train else ["any"]
                if not answer:
                    raise UserError(f"--objective.data_share {self.data_share}: {prompt.where}: has no answer; add one")
                if (n := len(prompt.ids) + max(self.max_new_tokens, len(answer))) > limit + 1:
                    hint = f"with its answer it has up to {n} tokens; a row has {limit} (--train.max_seq_length)"
                    raise UserError(f"--objective.max_new_tokens {self.max_new_tokens}: {prompt.where}: {hint}")
        return launch.data

    def begin_step(self, model: nn.Module, micro_batches: list[Batch]) -> list[Batch]:
        """Return micro-batches of answers to the prompts of ``micro_batches``."""
        from toolkit.distributed import ranks

        n = self.answers if model.training else 1
        own = [pair for batch in micro_batches for pair in zip(batch.ids, batch.sample_keys, strict=True)]
        prompts = sorted({pair for pairs in ranks.all_gather_object(own) for pair in pairs if pair[0] >= 0})
        rollouts = self._rollouts(model, prompts, n)
        advantages = self.advantages(rollouts, n)
        by_prompt: dict[tuple[int, int], list[Row]] = {pair: [] for pair in own}
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if (pair := (rollout.prompt, rollout.key)) in by_prompt:
                by_prompt[pair].append(self._row(rollout, advantage, model.training))
        return self._batches(own, by_prompt, n)

    def advantages(self, rollouts: list[Rollout], n: int) -> list[float | None]:
        """Return the advantage of each answer, ``n`` of each prompt one after the other; None: it is not trained on."""
        return [0.0] * len(rollouts)

    def _rollouts(self, model: nn.Module, prompts: list[tuple[int, int]], n: int) -> list[Rollout]:
        """Read or generate ``n`` answers to each prompt, an index and its key. The same on every rank. Collective."""
        from toolkit_metric.callback import answerer_of
        from toolkit_metric.prompts import decode_answer, end_tokens

        from toolkit.data.cache import hash_inputs
        from toolkit.distributed import ranks
        from toolkit.inference.sampling import Sampling
        from toolkit.training.callbacks.samples import generating
        from toolkit_on_policy.rollouts import Rollout, read_rollouts, seed_of, write_rollouts

        if not prompts:  # after a read error
            return []
        launch, step, is_training = self._launch, self._launch.progress.step, model.training
        report = launch.display.message
        rows: Any = launch.data.train if is_training else launch.data.val
        tokenizer: Any = launch.data.tokenizer
        seed = launch.args.seed
        origin = hash_inputs([self._origin, step, prompts])
        place = launch.out_dir, step, origin
        if is_training and (stored := ranks.result_of_rank0(lambda: read_rollouts(*place, report))):
            return stored
        items = [(prompt, key, number) for prompt, key in prompts for number in range(n)]
        limit = self.data_share * 2**56 if is_training else 0
        asked = [item for item in items if seed_of(seed + 1, item[1], step, item[2]) >= limit]  # others: from the data
        start = time.perf_counter()
        launch.display.phase("generating answers")
        timeout = ranks.extended_timeout(launch.timeouts.first, ranks.timeout())  # some ranks may have no answers
        with generating(model), launch.fabric.autocast(), timeout:
            sampled = answerer_of(launch, model, self.gather_weights).sample(
                [rows.prompts[prompt].ids for prompt, _, _ in asked],
                [seed_of(seed, key, step, number) for _, key, number in asked],
                end_tokens(tokenizer),
                sampling=Sampling(temperature=self.temperature if is_training else 0.0),
                max_new_tokens=self.max_new_tokens,
            )
        if is_training:
            self.sampled_tokens += sum(len(answer.tokens) for answer in sampled)
            self.sampling_seconds += time.perf_counter() - start
        answers = dict(zip(asked, sampled, strict=True))
        rollouts = []
        for item in items:
            prompt = rows.prompts[item[0]]
            tokens, log_probs, has_ended = answers.get(item) or (prompt.answer, [0.0] * len(prompt.answer), True)
            text = decode_answer(tokenizer, prompt.ids, tokens[: len(tokens) - has_ended])
            rollouts.append(Rollout(*item, tokens, log_probs, has_ended, text, {}))
        launch.display.phase("scoring answers")
        pairs = [rows.prompts[rollout.prompt] for rollout in rollouts], [rollout.text for rollout in rollouts]
        reporter = ranks.WaitReporter("score answers", report)
        score = lambda: self.scores.score(*pairs) if self.scores else [{}] * len(rollouts)  # noqa: E731
        rewards = ranks.result_of_rank0(score, reporter)
        rollouts = [rollout._replace(rewards=values) for rollout, values in zip(rollouts, rewards, strict=True)]
        if is_training:
            ranks.result_of_rank0(lambda: write_rollouts(*place, rollouts))
        else:
            self.samples = rollouts[:N_SAMPLES]
        return rollouts

    def _row(self, rollout: Rollout, advantage: float | None, is_training: bool) -> Row:
        import torch

        from toolkit.models.labels import IGNORE_INDEX

        rows: Any = self._launch.data.train if is_training else self._launch.data.val
        prompt, tokens = rows.prompts[rollout.prompt].ids, torch.tensor(rollout.tokens)
        labels = torch.cat([torch.full([len(prompt) - 1], IGNORE_INDEX), tokens])
        targets = torch.tensor([[value, advantage or 0.0] for value in rollout.log_probs], dtype=torch.float32)
        if advantage is None:
            labels, targets = labels.fill_(IGNORE_INDEX), targets[:0]
        values: dict[str, float] = {
            "answer_tokens": len(tokens),
            "truncated": not rollout.has_ended,
            "dropped": advantage is None,
            "reward": sum(rollout.rewards.values()),
            **{f"reward_{name}": value for name, value in rollout.rewards.items()},
        }
        return {
            "input_ids": torch.cat([torch.tensor(prompt), tokens])[:-1], "labels": labels, "targets": targets,
            "values": {name: float(value) for name, value in values.items()},
        }  # fmt: skip

    def _batches(self, own: list[tuple[int, int]], rows: Mapping[Any, Sequence[Row | None]], n: int) -> list[Batch]:
        """Return this rank's micro-batches: the rows of its prompts, in which -1 is a filler."""
        from toolkit.data.batch import choose_padding, collate

        config, device = self._launch.config, self._launch.fabric.device
        padding = choose_padding(device.type, True, config.max_seq_length)
        listed = [(pair, row) for pair in own for row in rows[pair] or [None] * n]
        size, batches = config.batch.micro_batch_size, []
        for part in (listed[i : i + size] for i in range(0, len(listed), size)):
            ids, keys = ([pair[i] for pair, _ in part] for i in range(2))
            batch = collate([row for _, row in part], ids, keys, 1, padding)
            batch.counts |= self.count(batch)
            batches.append(batch)
        return batches
