"""Distillation: the divergence of a student's next-token distribution from its teacher's, chunk by chunk (M1).

p is the student's distribution and q the teacher's, both at temperature T. With the mixture m = beta q + (1 - beta) p:

    forward_kl: sum q log(q / p)
    reverse_kl: sum p log(p / q)
    jsd: beta sum q log(q / m) + (1 - beta) sum p log(p / m), generalized Jensen-Shannon (arXiv 2306.13649, eq. 1)

A row's loss is (1 - label_weight) T^2 divergence + label_weight cross-entropy. T^2 keeps the size of the gradient at
any T (arXiv 1503.02531, section 2). The cross-entropy is at T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from toolkit.models.cross_entropy import CrossEntropy, _loss_and_grad_, add_bias_and_cap_, cross_entropy_
from toolkit.models.loss import COMPARED_TENSORS, RowLoss, _chunks, _logits, _Product, chunk_rows

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


class DistillationOptions(NamedTuple):
    """See the module docstring. ``beta`` is used by jsd."""

    divergence: DivergenceName
    beta: float
    temperature: float
    label_weight: float


@dataclass
class DistillationLoss(RowLoss):
    """The loss of one micro-batch, to be used once.

    Args:
        options: The divergence and its weights.
        hidden: The input of the teacher's head, (..., n_embd).
        head: Returns the teacher's head when the loss needs it: weight, (vocabulary, n_embd), and bias or None.
        softcap: Soft cap of the teacher's logits, or None.
        vocab_size: Tokens of the common vocabulary. The teacher's further logits are ignored. Further logits of the
            student, which pad its vocabulary, are compared with the teacher's least likely token.

    Attributes:
        sums: Sums over the supervised rows, (2,) fp32 in nats: divergence and cross-entropy.
    """

    options: DistillationOptions
    hidden: Tensor
    head: Callable[[], tuple[Tensor, Tensor | None]]
    softcap: float | None
    vocab_size: int

    def __post_init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float32, device=self.hidden.device)
        self._start = 0

    def start(self, dtype: torch.dtype, supervised: Tensor | None, ignored: Tensor | None) -> CrossEntropy:
        weight, bias = self.head()
        self._bias = None if bias is None else bias.detach()[: self.vocab_size]
        weight = weight[: self.vocab_size]
        self._product = _Product(self.hidden, weight, False, False, dtype, supervised, ignored)
        return self._next_rows

    def _next_rows(
        self,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor | None,
        bias: Tensor | None,
        softcap: float | None,
        dtype: torch.dtype | None,
        padding: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute losses and gradients of the next rows, see :mod:`toolkit.models.cross_entropy`."""
        size = logits.size(1) - padding
        padded, logits, bias = logits, logits[:, :size], None if bias is None else bias[:size]
        weight, losses = self.options.label_weight, []
        for rows in _chunks(logits.size(0), chunk_rows(COMPARED_TENSORS * logits.size(1), logits.device)):
            z, masked = logits[rows], None if ignored is None else ignored[rows]
            wants_grad = torch.float32 if dtype is not None and weight else None
            label_losses, label_grad = cross_entropy_(
                z.clone(), targets[rows], masked, bias, softcap, wants_grad, kernel=_loss_and_grad_
            )
            slope = add_bias_and_cap_(z, bias, softcap, dtype is not None)
            divergences = self._diverge(z, self._teacher_logits(rows, size, padding), dtype is not None)
            if masked is not None:
                divergences.masked_fill_(masked, 0.0)
            self.sums += torch.stack([divergences.sum(), label_losses.sum()])
            scale = (1 - weight) * self.options.temperature**2
            losses.append(scale * divergences + weight * label_losses)
            if dtype is None:
                continue
            z.mul_((1 - weight) * self.options.temperature)  # T^2 times the derivative of z / T
            if slope is not None:
                z.mul_(slope)
            if masked is not None:
                z.masked_fill_(masked[:, None], 0.0)
            if label_grad is not None:
                z.add_(label_grad, alpha=weight)
        self._start += logits.size(0)
        # the padding is zero, a product with zero rows
        return torch.cat(losses), None if dtype is None else padded.to(dtype)

    def _teacher_logits(self, rows: slice, size: int, padding: int) -> Tensor:
        """Return the teacher's logits of some of the next rows, (rows, size) fp32."""
        rows = slice(self._start + rows.start, self._start + rows.stop)
        padded_size = self._product.matrix.size(0)
        width = max(size + padding, padded_size)
        logits = self.hidden.new_empty(rows.stop - rows.start, width, dtype=torch.float32)
        _logits([self._product], rows, logits[:, :padded_size])
        common, logits = logits[:, : self.vocab_size], logits[:, :size]
        add_bias_and_cap_(common, self._bias, self.softcap, needs_slope=False)
        logits[:, self.vocab_size :] = common.amin(1, keepdim=True)
        return logits

    def _diverge(self, student: Tensor, teacher: Tensor, needs_grad: bool) -> Tensor:
        """Return the divergence of each row, and write its gradient with respect to z / T into ``student``.

        Overwrites both logits, (rows, vocabulary).
        """
        name, beta, temperature, _ = self.options
        log_p = torch.log_softmax(student.div_(temperature), dim=1, out=student)
        log_q = torch.log_softmax(teacher.div_(temperature), dim=1, out=teacher)
        if name == "forward_kl":
            q = log_q.exp()
            divergences = log_q.sub_(log_p).mul_(q).sum(1)
            if needs_grad:
                log_p.exp_().sub_(q)
            return divergences
        if name == "reverse_kl":
            ratio, from_teacher, scale = log_p - log_q, torch.zeros((), device=log_p.device), 1.0
        else:
            log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
            ratio, scale = log_p - log_m, 1 - beta
            from_teacher = beta * log_m.neg_().add_(log_q).mul_(log_q.exp_()).sum(1)
        p = log_p.exp_()
        from_student = (p * ratio).sum(1)
        if needs_grad:
            p.mul_(ratio.sub_(from_student[:, None])).mul_(scale)
        return from_teacher + scale * from_student
