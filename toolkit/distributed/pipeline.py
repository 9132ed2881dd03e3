"""Pipeline parallelism: each rank holds the blocks of its stages and passes the residual stream on.

The first stage also has the embedding, the last one the final norm, the head and the loss. A rank's model is the GPT
without the modules of other ranks, so the names of its weights do not change. Every stage reads the same micro-batches
and computes masks and positions from them. A tied embedding is on the first and the last rank; both copies get the sum
of their gradients, so they stay equal.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from toolkit.distributed import ranks
from toolkit.distributed.stages import STAGES_PER_RANK, layers_of, stages_of
from toolkit.models.gpt import GPT

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
Inputs = dict[str, Any]
"""Arguments of GPT's forward for one micro-batch."""


class Stage(nn.Module):
    """A stage. Its blocks, embedding and head are shared with the rank's model.

    Takes and returns the residual stream, (B, T, n_embd); with context parallelism and labels, of this rank's tokens.
    The first stage ignores its argument; the last one returns the loss sum, or logits if the micro-batch has no labels.
    Each call takes the next micro-batch of ``inputs``.
    """

    def __init__(self, pipeline: "Pipeline", index: int, layers: range) -> None:
        super().__init__()
        self.inputs: Iterator[Inputs] = iter(())
        self.index, self.layers, self._pipeline = index, layers, pipeline
        self.is_first, self.is_last = index == 0, index == pipeline.n_stages - 1
        ends = [part for part, is_here in pipeline.ends(self.is_first, self.is_last).items() if is_here]
        self.parts = nn.ModuleList(
            [*map(pipeline.model.get_submodule, ends), *(pipeline.model.blocks[i] for i in layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        model, inputs = self._pipeline.model, dict(next(self.inputs))
        labels, logits_to_keep = inputs.get("labels"), inputs.pop("logits_to_keep", 0)
        with self._pipeline.autocast():
            x, shared = model.embed(**inputs, x=None if self.is_first else x)
            x, _ = model.run_blocks(x, self.layers, shared)
            if not self.is_last:
                return x
            if labels is None:
                return model.logits(x[:, -logits_to_keep:])
            return model.cross_entropy(x, model.own_tokens(labels))


class Pipeline:
    """A rank's stages of a model. Removes the other stages from ``model``, whose forward calls :meth:`forward`.

    Args:
        model: On the meta device.
        schedule: One of :data:`SCHEDULES`.
        device: The device of this rank.
        autocast: Returns the autocast context of the run's precision.
    """

    def __init__(
        self, model: GPT, schedule: str, device: torch.device, autocast: Callable[[], AbstractContextManager]
    ) -> None:
        self.model, self.autocast, self._schedule, self._device = model, autocast, schedule, device
        layout = ranks.layout()
        self.size, self.rank = layout.pipeline, layout.coordinates(ranks.global_rank())["pipeline"]
        self._group = ranks.group("pipeline")
        self.n_stages = self.size * STAGES_PER_RANK[schedule]
        self._owners = {i: rank for rank in range(self.size) for i in stages_of(schedule, self.size, rank)}
        indices = stages_of(schedule, self.size, self.rank)
        layers = {i: layers_of(i, self.n_stages, model.config.n_layer) for i in indices}
        self.has_first, self.has_last = 0 in indices, self.n_stages - 1 in indices
        self._remove_other_stages({layer for part in layers.values() for layer in part})
        self.dtype = next(model.blocks[layers[indices[0]][0]].parameters()).dtype  # of the residual stream
        if model.execution.autocasts_residual:
            self.dtype = torch.bfloat16
        self.stages = [Stage(self, i, layers[i]) for i in indices]
        self._losses: list[Tensor] = []
        self._scale = 1.0
        self._built: tuple[Any, Any] = (None, None)
        # with zbv, inputs and weights get their gradients in two backward passes
        model.execute_with(pipeline=self, reusable_loss=schedule == "zbv")
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs errors that are raised

    @property
    def tied_copy(self) -> Tensor | None:
        """The last stage's copy of a tied embedding; None on other ranks."""
        return self.model.lm_head.weight if self.model.config.tie_embeddings and self.has_last else None

    def ends(self, is_first: bool, is_last: bool) -> dict[str, bool]:
        """Return the modules outside the blocks, and whether a stage has them. Tied modules are on both ends."""
        is_tied = self.model.config.tie_embeddings and (is_first or is_last)
        where = {"transformer.wte": is_first or is_tied, "transformer.ln_f": is_last, "lm_head": is_last or is_tied}
        return where | ({"transformer.wpe": is_first} if self.model.config.position_embedding == "learned" else {})

    def _remove_other_stages(self, layers: set[int]) -> None:
        model = self.model
        for i in set(range(model.config.n_layer)) - layers:
            model.transformer.h[i] = nn.Identity()  # keeps the names of the others
        for name, is_here in self.ends(self.has_first, self.has_last).items():
            if not is_here:
                owner, _, child = name.rpartition(".")
                delattr(model.get_submodule(owner), child)
        if not self.has_last and hasattr(model, "lm_head"):  # only the weight is tied
            model.lm_head.register_parameter("bias", None)
            if hasattr(model.lm_head, "lora"):
                model.lm_head.lora = nn.ModuleDict()

    def accumulate(self, micro_batches: list[Inputs], scale: float) -> Tensor:
        """Run the forward and backward passes of a step; all micro-batches have one shape.

        Differentiates ``scale`` times the loss sum. Returns the loss sum, an fp32 scalar: zero except on the
        last stage's rank.
        """
        self._losses, self._scale = [], scale
        for stage in self.stages:
            stage.inputs = iter(micro_batches)
        order = torch.arange(len(micro_batches), device=self._device)
        arguments = [order] if self.has_first else []  # the schedule needs tensors to split; the stages ignore them
        schedule = self._build(len(micro_batches), micro_batches[0]["input_ids"].shape)
        try:
            schedule.step(*arguments, target=order if self.has_last else None, return_outputs=False)
        except RuntimeError as error:  # a schedule wraps the error of a forward pass
            raise error.__cause__ or error from None
        self._sum_tied_gradients()
        return torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=self._device)

    def _build(self, n_micro_batches: int, shape: torch.Size) -> Any:
        """Return the schedule for micro-batches of (B, T) tokens. Its receive buffers have a fixed shape."""
        key = (n_micro_batches, shape)
        if self._built[0] != key:
            ids = torch.empty(shape, device="meta")
            x = self._residual_stream(self.model.own_tokens(ids)).requires_grad_()
            index, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
            stages = [
                PipelineStage(
                    stage,
                    stage.index,
                    self.n_stages,
                    self._device,
                    input_args=index if stage.is_first else x,
                    output_args=loss.requires_grad_() if stage.is_last else x,
                    group=self._group,
                )
                for stage in self.stages
            ]
            build = SCHEDULES[self._schedule]
            local: Any = stages if STAGES_PER_RANK[self._schedule] > 1 else stages[0]
            self._built = key, build(local, n_micro_batches, loss_fn=self._scaled_loss, scale_grads=False)
        return self._built[1]

    def _scaled_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        self._losses.append(loss.detach().clone())
        return loss * self._scale

    def _sum_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding, in the same order on both ranks."""
        if not self.model.config.tie_embeddings or self.rank not in (0, self.size - 1):
            return
        weight: Any = self.model.transformer.wte.weight
        if weight.grad is None:
            return
        gradient = weight.grad.to_local()
        sent = gradient.to(self._device, copy=True)  # shards may be offloaded
        received = torch.empty_like(sent)
        other = dist.get_global_rank(self._group, self.size - 1 - self.rank)
        operations = [
            dist.P2POp(dist.isend, sent, other, self._group),
            dist.P2POp(dist.irecv, received, other, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient += received.to(gradient.device)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return what GPT's forward returns, without gradients, through the stages one after the other.

        Logits are the same on all ranks. The loss is zero except on the last stage's rank.
        """
        assert not torch.is_grad_enabled()
        inputs |= {"input_ids": input_ids, "labels": labels}
        mine = {stage.index: stage for stage in self.stages}
        tokens = input_ids if labels is None else self.model.own_tokens(labels)
        x = self._residual_stream(tokens)
        for index in range(self.n_stages):
            if (stage := mine.get(index)) is not None:
                stage.inputs = iter([inputs])
                x = stage(x)
            if index < self.n_stages - 1:
                x = self._pass_on(x, index)
        if (cache := inputs.get("kv_cache")) is not None:  # the caches of other ranks' layers stay empty
            length = max(layer.length for layer in cache.layers)
            for layer in cache.layers:
                layer.length = length
        if labels is not None:
            return x if self.has_last else torch.zeros((), device=self._device), (tokens >= 0).sum()
        kept = inputs.get("logits_to_keep", 0) or input_ids.size(1)
        shape = (input_ids.size(0), kept, self.model.config.padded_vocab_size)
        logits = x.float().contiguous() if self.has_last else torch.empty(shape, device=self._device)
        owner = dist.get_global_rank(self._group, self._owners[self.n_stages - 1])
        dist.broadcast(logits, owner, group=self._group)
        return logits

    def _residual_stream(self, tokens: Tensor) -> Tensor:
        """Return an empty tensor, (B, T, n_embd), for tokens (B, T)."""
        return torch.empty(*tokens.shape, self.model.config.n_embd, dtype=self.dtype, device=tokens.device)

    def _pass_on(self, x: Tensor, index: int) -> Tensor:
        """Send the output of a stage to the rank of the next one."""
        source, target = self._owners[index], self._owners[index + 1]
        if source != target and self.rank == source:
            dist.send(x.to(self.dtype), dist.get_global_rank(self._group, target), group=self._group)
        elif source != target and self.rank == target:
            x = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.recv(x, dist.get_global_rank(self._group, source), group=self._group)
        return x
