"""Table of options that are not supported together or have no effect together. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from toolkit.config import AUTO
from toolkit.data import InstructionData, Preference
from toolkit.errors import UserError
from toolkit.extension import run_checks
from toolkit.planning.facts import Facts


class Row(NamedTuple):
    """An option that is not supported with another option or a condition.

    In texts, ``{name:words}`` is the value of ``name`` (:meth:`Facts.text`) in messages and ``words`` in the table.
    """

    option: str
    other: str
    applies: Callable[[Facts], bool]
    reason: str
    fix: str = "remove one of them"
    verb: str = "is not supported with"

    def message(self, facts: Facts | None = None) -> str:
        """Return the message for a run, or the line of the table."""
        text = f"{self.option} {self.verb} {self.other}{': ' * bool(self.reason)}{self.reason}; {self.fix}"
        return re.sub(r"\{([\w.]+):([^}]*)\}", lambda found: facts.text(found[1]) if facts else found[2], text)


def _no_effect(
    option: str, other: str, applies: Callable[[Facts], bool], reason: str = "", fix: str = "remove it"
) -> Row:
    return Row(option, other, applies, reason, fix, "has no effect with")


def _dtypes() -> Iterator[Row]:
    """Yield a row for each FSDP compute dtype that some precisions do not support."""
    for dtype, precisions, others, fix in (
        ("bf16", ("bf16-true", "bf16-master", "bf16-mixed"), "32-true, 16-mixed", "bf16-mixed"),
        ("fp16", ("16-mixed",), "32-true, bf16-true, bf16-master, bf16-mixed", "16-mixed"),
        ("fp32", ("32-true", "bf16-mixed", "16-mixed"), "bf16-true, bf16-master", "32-true"),
    ):

        def applies(f: Facts, dtype: str = dtype, precisions: tuple[str, ...] = precisions) -> bool:
            return f.args.fsdp.param_dtype == dtype and f.precision not in ("", *precisions)

        other = f"--precision {{precision:{others}}}"
        yield Row(f"--fsdp.param_dtype {dtype}", other, applies, "the weights have another dtype", f"use {fix}")


_IN_BACKWARD = "--optimizer.in_backward true"
_CHECKPOINTING = "--train.activation_checkpointing {train.activation_checkpointing:selective, full}"
_QUANTIZE = "--quantize {quantize:bnb.nf4, bnb.nf4-dq}"
_OFFLOAD = "--fsdp.cpu_offload true"
_MASTERS = "--precision bf16-master"
_MOMENTS = "--optimizer.state_dtype bf16"
_NAME = "--optimizer.name {optimizer.name:NAME}"
_NO_ROWS = "{strategy_name:an extension's strategy}"
_TENSOR = "--tensor_parallel_size {tensor_parallel_size:N}"
_PIPELINE = "--pipeline_parallel_size {pipeline_parallel_size:N}"
_FOREIGN = "a user-provided or extension optimizer"
_NO_BLOCKS = "a module without known blocks"
_CONTEXT = "--context_parallel_size {context_parallel_size:N}"
_FROZEN = "--objective {objective_name:Distillation}"
_SET_BLOCK_CLASSES = "set block_classes"
_FP8 = "--train.fp8 {train.fp8:tensorwise, rowwise}"


# fmt: off
ROWS: tuple[Row, ...] = (
    Row("--model_name {model_name:NAME}", "--initial_checkpoint_dir {initial_checkpoint_dir:FOLDER}",
        lambda f: f.args.model_name is not None and f.args.initial_checkpoint_dir is not None,
        "the checkpoint defines the architecture"),
    # devices and strategies
    Row("--strategy single", "{world_size:several} devices",
        lambda f: f.args.strategy == "single" and f.world_size > 1, "", "use auto, fsdp or ddp"),
    Row("--devices {world_size:2 or more}", "--accelerator mps", lambda f: f.device == "mps" and f.world_size > 1,
        "mps has one device", "use --devices 1 or --accelerator cpu"),
    Row("TORCH_DISTRIBUTED_DEBUG=DETAIL", "ddp on a CPU",
        lambda f: (f.strategy_name, f.device, os.environ.get("TORCH_DISTRIBUTED_DEBUG")) == ("ddp", "cpu", "DETAIL"),
        "torch crashes", "use --strategy fsdp"),
    Row("--fsdp.sharding_strategy {fsdp.sharding_strategy:FULL_SHARD, SHARD_GRAD_OP}", "--strategy ddp",
        lambda f: f.args.strategy == "ddp" and f.args.fsdp.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"),
        "ddp does not shard"),
    _no_effect("{unused_fsdp:--fsdp.OPTION}", "{strategy:ddp, a single device or an extension's strategy}",
               lambda f: bool(f.unused_fsdp)),
    _no_effect("{unused_ddp:--ddp.OPTION}", "{strategy:strategies other than ddp}", lambda f: bool(f.unused_ddp)),
    _no_effect("--timeout {timeout:MINUTES}", "a single process",
               lambda f: f.args.timeout != AUTO and f.world_size == 1),
    Row("--ddp.static_graph true", "accumulation ({batch:of several micro-batches})",
        lambda f: f.args.ddp.static_graph and f.accumulation > 1, "torch's DDP cannot combine them",
        "use --train.micro_batch_size {samples_per_device:equal to a device's share of the global batch}"),
    Row("{model_parallel_flag:--tensor_parallel_size, --context_parallel_size, --pipeline_parallel_size}",
        "--strategy {args.strategy:single, ddp or an extension's strategy}",
        lambda f: bool(f.model_parallel_flag) and f.args.strategy not in (AUTO, "fsdp", "fsdp2"),
        "only FSDP can be combined with it", "use --strategy fsdp"),
    # tensor parallelism
    Row(_TENSOR, "experts (MoE)", lambda f: f.divides("n_expert"), "they are not divided"),
    Row(_TENSOR, "latent attention (MLA)", lambda f: f.divides("latent_attention"), "it is not divided"),
    Row(_TENSOR, "--model_config.norm_qk_type olmo2",
        lambda f: f.divides("norm_qk") and f.model is not None and f.model.norm_qk_type == "olmo2",
        "the norm needs all heads of a token"),
    Row(_TENSOR, "a user-provided or extension model",
        lambda f: f.is_tensor_parallel and (f.args.module is not None or f.is_extension_model),
        "only toolkit's own layers are divided"),
    Row(_TENSOR, "--compiler {compiler:NAME of an extension's compiler}",
        lambda f: f.is_tensor_parallel and f.args.compiler not in (AUTO, "none", "torch"),
        "", "use --compiler torch or none"),
    Row(_TENSOR, _QUANTIZE, lambda f: f.is_tensor_parallel and f.args.quantize is not None,
        "4-bit blocks are not divided"),
    Row(_TENSOR, "--lora_dropout {lora.dropout:above 0}",
        lambda f: f.is_tensor_parallel and f.args.lora is not None and f.args.lora.dropout > 0,
        "the ranks would drop different elements", "use --lora_dropout 0"),
    Row(_TENSOR, "--optimizer.name {optimizer.name:Adafactor, AdamW8bit, Muon}",
        lambda f: f.is_tensor_parallel and f.uses("adafactor", "adamw8bit", "muon"),
        "it needs complete matrices", "use AdamW"),
    Row(_TENSOR, _MOMENTS, lambda f: f.is_tensor_parallel and f.has_bf16_moments,
        "the ranks would round equal values differently"),
    # pipeline parallelism
    _no_effect("--pipeline.schedule {pipeline.schedule:gpipe, interleaved, zbv}", "--pipeline_parallel_size 1",
               lambda f: f.args.pipeline.schedule != "1f1b" and not f.is_pipeline_parallel),
    Row(_PIPELINE, "{accumulation:too few} micro-batches per step", lambda f: bool(f.enough_micro_batches),
        "--pipeline.schedule {pipeline.schedule:NAME} needs one per stage, interleaved equally many in each round",
        "use --train.global_batch_size {enough_micro_batches:a multiple}, or a smaller --train.micro_batch_size"),
    Row(_PIPELINE, "the {model.n_layer:number of} layers of {model.name:the model}", lambda f: bool(f.uneven_stages),
        "all {n_stages:} stages have equally many", "use {uneven_stages:a divisor}"),
    Row(_PIPELINE,
        "experts (MoE)", lambda f: f.is_pipeline_parallel and f.model is not None and f.model.n_moe_layer > 0,
        "the balancing loss is a mean over all layers"),
    Row(_PIPELINE, "a user-provided or extension model",
        lambda f: f.is_pipeline_parallel and (f.args.module is not None or f.is_extension_model),
        "its forward is not divided into stages"),
    Row(_PIPELINE, "--objective {objective_name:NAME}",
        lambda f: f.is_pipeline_parallel and not f.is_next_token, "the last stage computes the next-token loss"),
    Row(_PIPELINE, "--compiler {compiler:NAME of an extension's compiler}",
        lambda f: f.is_pipeline_parallel and f.args.compiler not in (AUTO, "none", "torch"),
        "", "use --compiler torch or none"),
    Row(_PIPELINE, "--lora_head true without other adapters",
        lambda f: f.is_pipeline_parallel and f.args.lora is not None and f.args.lora.parts == ("head",),
        "the other stages have nothing to train", "add adapters to the blocks"),
    Row(_PIPELINE, _MOMENTS, lambda f: f.is_pipeline_parallel and f.has_bf16_moments,
        "the copies of a tied embedding would be rounded differently"),
    Row(_PIPELINE, f"{_FOREIGN} of tied embeddings",
        lambda f: f.is_pipeline_parallel and not f.is_builtin and not f.has_adapters and f.model is not None
        and f.model.tie_embeddings,
        "it may not update each weight independently of the others, so their copies would differ",
        "use --train.tie_embeddings false or AdamW"),
    Row(_PIPELINE, "--precision 16-mixed", lambda f: f.is_pipeline_parallel and f.precision == "16-mixed",
        "the schedules do not scale losses", "use bf16-mixed or 32-true"),
    Row(_PIPELINE,
        "--fsdp.accumulate sharded", lambda f: f.is_pipeline_parallel and f.args.fsdp.accumulate == "sharded",
        "the schedule reduces gradients once per step", "use unsharded"),
    Row("--pipeline.schedule zbv", _CHECKPOINTING,
        lambda f: f.args.pipeline.schedule == "zbv" and f.is_recomputed,
        "its backward pass runs in two parts", "use 1f1b"),
    Row("--pipeline.schedule zbv", "tied embeddings",
        lambda f: f.args.pipeline.schedule == "zbv" and f.model is not None and f.model.tie_embeddings,
        "the first and the last stage are on one device", "use 1f1b"),
    # context parallelism
    Row(_CONTEXT, "experts (MoE)", lambda f: f.is_context_parallel and f.model is not None and f.model.n_expert > 0,
        "the load-balancing loss needs complete rows"),
    Row(_CONTEXT, "a user-provided or extension model",
        lambda f: f.is_context_parallel and (f.args.module is not None or f.is_extension_model),
        "only toolkit's GPT splits rows"),
    Row(_CONTEXT, "--objective {objective_name:NAME}",
        lambda f: f.is_context_parallel and not f.is_next_token,
        "only the next-token loss is a sum over tokens"),
    Row(_CONTEXT, "--compiler {compiler:NAME of an extension's compiler}",
        lambda f: f.is_context_parallel and f.args.compiler not in (AUTO, "none", "torch"),
        "", "use --compiler torch or none"),
    # objectives with a frozen model
    Row(_FROZEN, "a user-provided or extension model",
        lambda f: f.has_frozen and (f.args.module is not None or f.is_extension_model),
        "only toolkit's GPT computes its loss"),
    Row(_FROZEN, _TENSOR, lambda f: f.has_frozen and f.is_tensor_parallel, "its frozen model is not divided"),
    Row(_FROZEN, _NO_ROWS, lambda f: f.has_frozen and f.is_extension,
        "the frozen model's head cannot be gathered alone", "use --strategy fsdp or ddp"),
    # dtypes
    *_dtypes(),
    Row("--fsdp.reduce_dtype fp16", "--precision {precision:32-true, bf16-true, bf16-master, bf16-mixed}",
        lambda f: f.args.fsdp.reduce_dtype == "fp16" and f.precision not in ("", "16-mixed"),
        "fp16 needs the gradient scaler of 16-mixed", "use bf16 or fp32"),
    Row(_OFFLOAD, "--precision 16-mixed", lambda f: f.args.fsdp.cpu_offload and f.precision == "16-mixed",
        "loss scaling needs gradients on the device", "use bf16-mixed or 32-true"),
    Row("--optimizer.options fused", "--precision 16-mixed",
        lambda f: bool(f.args.optimizer.options.get("fused")) and f.precision == "16-mixed",
        "a fused optimizer unscales the gradients after they are clipped"),
    # fp8
    Row(_FP8, "finetune_lora", lambda f: f.has_fp8 and f.has_adapters,
        "torchao replaces plain linear layers, not layers with adapters or 4-bit weights"),
    Row(_FP8, "--precision {precision:32-true, 16-mixed, bf16-master}",
        lambda f: f.has_fp8 and f.precision not in ("", "bf16-mixed", "bf16-true"),
        "the other layers compute in bf16", "use bf16-mixed or bf16-true"),
    Row(_FP8, "{not_in_fp8:--tensor_parallel_size, an extension's strategy or compiler, a user-provided module}",
        lambda f: f.has_fp8 and bool(f.not_in_fp8), ""),
    # FSDP
    _no_effect("--fsdp.shard_size {fsdp.shard_size:N}",
               "--fsdp.sharding_strategy {fsdp.sharding_strategy:FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}",
               lambda f: f.args.fsdp.shard_size != AUTO and f.args.fsdp.sharding_strategy not in (AUTO, "HYBRID_SHARD"),
               fix="use HYBRID_SHARD"),
    _no_effect("--fsdp.accumulate {fsdp.accumulate:sharded, unsharded}", "one micro-batch per step",
               lambda f: f.args.fsdp.accumulate != AUTO and f.batch is not None and f.accumulation == 1,
               "nothing is accumulated"),
    Row(_OFFLOAD, _QUANTIZE, lambda f: f.offloads and f.args.quantize is not None,
        "4-bit weights stay on the device"),
    # user-provided modules
    Row("--strategy fsdp", _NO_BLOCKS,
        lambda f: f.has_no_blocks and f.is_fsdp and f.args.fsdp.auto_wrap == "block",
        "FSDP shards block by block", _SET_BLOCK_CLASSES),
    Row(_CHECKPOINTING, _NO_BLOCKS, lambda f: f.has_no_blocks and f.is_recomputed,
        "the blocks are recomputed", _SET_BLOCK_CLASSES),
    Row("--optimizer.name Muon", _NO_BLOCKS, lambda f: f.has_no_blocks and f.uses("muon"),
        "Muon updates the matrices of blocks", _SET_BLOCK_CLASSES),
    # preferences
    Row("--objective {objective_name:DPO, KTO, ORPO, SimPO}", "pretrain",
        lambda f: f.row_kind != "answers" and not f.args.is_finetune, "", "use finetune_lora or finetune_full"),
    Row("--objective {objective_name:DPO, KTO, ORPO, SimPO}", "--data {data_name:that has no answers}",
        lambda f: f.row_kind != "answers" and not isinstance(f.args.data, InstructionData),
        "it compares completions", "use --data Preference"),
    Row("--data Preference", "--objective {objective_name:NextToken}",
        lambda f: f.row_kind == "answers" and isinstance(f.args.data, Preference),
        "it would also train on the rejected completions", "use --objective DPO, KTO, ORPO or SimPO"),
    Row("--objective KTO", "--train.global_batch_size 1",
        lambda f: f.objective_name == "KTO" and f.args.train.global_batch_size == 1,
        "it compares with other samples of the batch", "use 2 or more"),
    Row("--objective {objective_name:DPO, KTO}", "--from_peft {from_peft:FOLDER}",
        lambda f: f.args.objective.has_reference and f.args.from_peft is not None and not f.reference_option,
        "the model without adapters is not the initial model", "set --objective.reference_dir"),
    # adapters
    Row(_QUANTIZE, "--precision 16-mixed", lambda f: f.args.quantize is not None and f.precision == "16-mixed",
        "4-bit layers compute in bf16 or fp32", "use bf16-true, or 32-true on a GPU without bfloat16"),
    _no_effect("--fsdp.state_dict_type sharded", "finetune_lora",
               lambda f: f.has_adapters and f.args.fsdp.state_dict_type == "sharded",
               "adapters are saved in one file"),
    Row("--train.tie_embeddings {train.tie_embeddings:true, false}", "finetune_lora",
        lambda f: f.has_adapters and f.args.train.tie_embeddings is not None, "the base model is frozen", "remove it"),
    Row(_MASTERS, "finetune_lora", lambda f: f.has_adapters and f.precision == "bf16-master",
        "adapters are already fp32 and their base is bf16", "use bf16-true"),
    # optimizers
    Row("--optimizer.name {optimizer.name:Muon, AdamW8bit}", _NO_ROWS,
        lambda f: f.is_extension and f.uses("muon", "adamw8bit"),
        "its shards are not rows of matrices", "use --strategy fsdp, ddp or AdamW"),
    Row(_MASTERS, "{strategy_name:fsdp or an extension's strategy}",
        lambda f: (f.is_fsdp or f.is_extension) and f.precision == "bf16-master",
        "under fsdp, bf16-mixed has fp32 shards and gathers in bf16", "use bf16-mixed or --strategy ddp"),
    Row(_MOMENTS, _NO_ROWS, lambda f: f.is_extension and f.has_bf16_moments,
        "its shards are not rows of matrices", "use --strategy fsdp or ddp"),
    Row(_FOREIGN, "{strategy_name:fsdp}", lambda f: f.is_fsdp and f.needs_unsharded,
        "its needs_unsharded is True", "use --strategy ddp"),
    Row(_MASTERS, _FOREIGN, lambda f: f.precision == "bf16-master" and not f.is_builtin,
        "it may not update each weight independently of the others", "use bf16-mixed"),
    Row(_MOMENTS, _FOREIGN, lambda f: f.has_bf16_moments and not f.is_builtin,
        "it may not update each weight independently of the others", "remove it"),
    Row(_MOMENTS, "--precision bf16-true",
        lambda f: f.has_bf16_moments and f.precision == "bf16-true" and not f.has_adapters,
        "moments of bf16 weights are already bf16", "remove it"),
    Row(_MOMENTS, "--precision 16-mixed", lambda f: f.has_bf16_moments and f.precision == "16-mixed",
        "16-mixed is for GPUs without bfloat16", "use bf16-mixed or 32-true"),
    Row(_MOMENTS, "--optimizer.name AdamW8bit", lambda f: f.has_bf16_moments and f.uses("adamw8bit"),
        "its moments are 8-bit"),
    _no_effect(_MOMENTS, _NAME, lambda f: f.has_bf16_moments and not f.has_moments,
               "it has no moments with these options"),
    # the update in the backward pass
    _no_effect(_IN_BACKWARD, "finetune_lora", lambda f: f.args.optimizer.in_backward and f.has_adapters,
               "the gradients of adapters are small"),
    Row(_IN_BACKWARD, "{world_size:several} devices", lambda f: f.args.optimizer.in_backward and f.world_size > 1,
        "each weight is updated before other devices' gradients arrive", "use FSDP, which shards gradients"),
    Row(_IN_BACKWARD, "accumulation ({batch:of several micro-batches})",
        lambda f: f.args.optimizer.in_backward and f.accumulation > 1,
        "it needs the complete gradient in one backward pass",
        "use --train.micro_batch_size equal to --train.global_batch_size"),
    Row(_IN_BACKWARD, "--train.max_norm {train.max_norm:1.0}",
        lambda f: f.args.optimizer.in_backward and f.args.train.max_norm > 0,
        "clipping needs the norm of all gradients first", "use --train.max_norm 0"),
    Row(_IN_BACKWARD, "--train.skip_spikes {train.skip_spikes:SIGMA}",
        lambda f: f.args.optimizer.in_backward and f.args.train.skip_spikes is not None,
        "the weights are updated before the loss and the norm are known"),
    Row(_IN_BACKWARD, "--precision 16-mixed", lambda f: f.args.optimizer.in_backward and f.precision == "16-mixed",
        "its scaler checks all gradients first", "use bf16-mixed or 32-true"),
    Row(_IN_BACKWARD, _FOREIGN, lambda f: f.args.optimizer.in_backward and not f.is_builtin,
        "it may not update each weight independently of the others", "remove it"),
    Row(_IN_BACKWARD, _OFFLOAD, lambda f: f.args.optimizer.in_backward and f.offloads,
        "the gradients are in CPU memory only after the backward pass"),
    # schedule
    _no_effect("--train.min_lr {train.min_lr:RATE}", "--train.lr_schedule constant",
               lambda f: f.args.train.lr_schedule == "constant" and f.args.train.min_lr != AUTO,
               fix="remove one of them"),
)
# fmt: on


def find_conflicts(facts: Facts, rows: Iterable[Row] = ROWS) -> Iterator[str]:
    """Yield the message of each row that a run violates."""
    yield from (row.message(facts) for row in rows if row.applies(facts))


def check_rows(facts: Facts, rows: Iterable[Row] = ROWS) -> None:
    """Raise UserError with the message of the first row that a run violates."""
    for message in find_conflicts(facts, rows):
        raise UserError(message)


def require_compatible(facts: Facts) -> None:
    """Check a run's options against the table, and run the extensions' checks."""
    run_checks(facts.args)
    check_rows(facts)
