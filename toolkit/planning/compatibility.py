"""Table of options that are not supported together or have no effect together. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from toolkit.config import AUTO, COMPILERS
from toolkit.data import InstructionData, Preference
from toolkit.errors import UserError
from toolkit.extension import run_checks
from toolkit.planning.facts import Facts


class Use(NamedTuple):
    """An option or another property of a run, as messages name it, and whether a run has it.

    ``{name:words}`` in ``text`` is the value of ``name`` (:meth:`Facts.text`) in messages and ``words`` in the table.
    """

    text: str
    applies: Callable[[Facts], bool] = lambda facts: True


class Row(NamedTuple):
    """Two uses that a run cannot have together."""

    option: Use
    other: Use
    reason: str = ""
    fix: str = "remove one of them"
    verb: str = "is not supported with"

    def applies(self, facts: Facts) -> bool:
        """Whether a run violates this row."""
        return self.option.applies(facts) and self.other.applies(facts)

    def message(self, facts: Facts | None = None) -> str:
        """Return the message for a run, or the line of the table."""
        reason = f": {self.reason}" if self.reason else ""
        text = f"{self.option.text} {self.verb} {self.other.text}{reason}; {self.fix}"
        return re.sub(r"\{([\w.]+):([^}]*)\}", lambda found: facts.text(found[1]) if facts else found[2], text)


def _no_effect(option: Use, other: Use, reason: str = "", fix: str = "remove it") -> Row:
    return Row(option, other, reason, fix, "has no effect with")


def _precision(*names: str) -> Use:
    return Use(f"--precision {{precision:{', '.join(names)}}}", lambda f: f.precision in names)


def _optimizer(*names: str) -> Use:
    lower = [name.lower() for name in names]
    return Use(
        f"--optimizer.name {{optimizer.name:{', '.join(names)}}}",
        lambda f: f.args.optimizer_class is None and f.args.optimizer.name.lower() in lower,
    )


def _param_dtype(dtype: str, other: Use, fix: str) -> Row:
    option = Use(f"--fsdp.param_dtype {dtype}", lambda f: f.args.fsdp.param_dtype == dtype)
    return Row(option, other, "the weights have another dtype", f"use {fix}")


_TENSOR = Use("--tensor_parallel_size {tensor_parallel_size:N}", lambda f: f.args.tensor_parallel_size > 1)
_PIPELINE = Use("--pipeline_parallel_size {pipeline_parallel_size:N}", lambda f: f.args.pipeline_parallel_size > 1)
_CONTEXT = Use("--context_parallel_size {context_parallel_size:N}", lambda f: f.args.context_parallel_size > 1)
_ZBV = Use("--pipeline.schedule zbv", lambda f: f.args.pipeline.schedule == "zbv")
_SEVERAL_DEVICES = Use("{world_size:several} devices", lambda f: f.world_size > 1)
_EXTENSION_STRATEGY = Use("{strategy_name:an extension's strategy}", lambda f: f.is_extension)
_OFFLOAD = Use("--fsdp.cpu_offload true", lambda f: f.strategy is not None and f.strategy.offloads)
_ACCUMULATION = Use("accumulation ({batch:of several micro-batches})", lambda f: f.accumulation > 1)
_CHECKPOINTING = Use(
    "--train.activation_checkpointing {train.activation_checkpointing:selective, full}",
    lambda f: f.args.train.activation_checkpointing != "none",
)
_MIXED_16, _MASTERS = _precision("16-mixed"), _precision("bf16-master")
_FP8 = Use("--train.fp8 {train.fp8:tensorwise, rowwise}", lambda f: f.args.train.fp8 != "none")
_QUANTIZE = Use("--quantize {quantize:bnb.nf4, bnb.nf4-dq}", lambda f: f.args.quantize is not None)
_LORA = Use("finetune_lora", lambda f: f.args.lora is not None)
_IN_BACKWARD = Use("--optimizer.in_backward true", lambda f: f.args.optimizer.in_backward)
_MOMENTS = Use("--optimizer.state_dtype bf16", lambda f: f.args.optimizer.state_dtype == "bf16")
_FOREIGN_OPTIMIZER = Use("a user-provided or extension optimizer", lambda f: not f.is_builtin)
_NOT_IN_PARTS = "it may not update each weight independently of the others"
_FOREIGN_MODEL = Use("a user-provided or extension model", lambda f: f.args.module is not None or f.is_extension_model)
_NO_BLOCKS = Use("a module without known blocks", lambda f: f.args.module is not None and not f.args.block_classes)
_EXPERTS = Use("experts (MoE)", lambda f: f.model is not None and f.model.n_moe_layer > 0)
_COMPILER = Use("--compiler {compiler:NAME of an extension's compiler}", lambda f: f.args.compiler not in COMPILERS)
_USE_TORCH = "use --compiler torch or none"
_OBJECTIVE = Use("--objective {objective_name:NAME}", lambda f: f.objective_name != "NextToken")
_PREFERENCES = Use(
    "--objective {objective_name:DPO, KTO, ORPO, SimPO}", lambda f: f.args.objective.row_kind != "answers"
)
_FROZEN = Use("--objective {objective_name:Distillation}", lambda f: bool(f.args.objective.frozen_option))
_SET_BLOCK_CLASSES = "set block_classes"


# fmt: off
ROWS: tuple[Row, ...] = (
    Row(Use("--model_name {model_name:NAME}", lambda f: f.args.model_name is not None),
        Use("--initial_checkpoint_dir {initial_checkpoint_dir:FOLDER}",
            lambda f: f.args.initial_checkpoint_dir is not None),
        "the checkpoint defines the architecture"),
    # devices and strategies
    Row(Use("--strategy single", lambda f: f.args.strategy == "single"), _SEVERAL_DEVICES,
        fix="use auto, fsdp or ddp"),
    Row(Use("--devices {world_size:2 or more}", lambda f: f.world_size > 1),
        Use("--accelerator mps", lambda f: f.device == "mps"),
        "mps has one device", "use --devices 1 or --accelerator cpu"),
    Row(Use("TORCH_DISTRIBUTED_DEBUG=DETAIL", lambda f: os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"),
        Use("ddp on a CPU", lambda f: (f.strategy_name, f.device) == ("ddp", "cpu")),
        "torch crashes", "use --strategy fsdp"),
    Row(Use("--fsdp.sharding_strategy {fsdp.sharding_strategy:FULL_SHARD, SHARD_GRAD_OP}",
            lambda f: f.args.fsdp.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP")),
        Use("--strategy ddp", lambda f: f.args.strategy == "ddp"), "ddp does not shard"),
    _no_effect(Use("{unused_fsdp:--fsdp.OPTION}", lambda f: bool(f.unused_fsdp)),
               Use("{strategy:ddp, a single device or an extension's strategy}")),
    _no_effect(Use("{unused_ddp:--ddp.OPTION}", lambda f: bool(f.unused_ddp)),
               Use("{strategy:strategies other than ddp}")),
    _no_effect(Use("--timeout {timeout:MINUTES}", lambda f: f.args.timeout != AUTO),
               Use("a single process", lambda f: f.world_size == 1)),
    Row(Use("--ddp.static_graph true", lambda f: f.args.ddp.static_graph), _ACCUMULATION,
        "torch's DDP cannot combine them",
        "use --train.micro_batch_size {samples_per_device:equal to a device's share of the global batch}"),
    Row(Use("{model_parallel_flag:--tensor_parallel_size, --context_parallel_size, --pipeline_parallel_size}",
            lambda f: bool(f.model_parallel_flag)),
        Use("--strategy {args.strategy:single, ddp or an extension's strategy}",
            lambda f: f.args.strategy not in (AUTO, "fsdp", "fsdp2")),
        "only FSDP can be combined with it", "use --strategy fsdp"),
    # tensor parallelism
    Row(_TENSOR, _EXPERTS, "they are not divided"),
    Row(_TENSOR, Use("latent attention (MLA)", lambda f: f.model is not None and f.model.latent_attention is not None),
        "it is not divided"),
    Row(_TENSOR, Use("--model_config.norm_qk_type olmo2",
                     lambda f: f.model is not None and f.model.norm_qk and f.model.norm_qk_type == "olmo2"),
        "the norm needs all heads of a token"),
    Row(_TENSOR, _FOREIGN_MODEL, "only toolkit's own layers are divided"),
    Row(_TENSOR, _COMPILER, fix=_USE_TORCH),
    Row(_TENSOR, _QUANTIZE, "4-bit blocks are not divided"),
    Row(_TENSOR, Use("--lora_dropout {lora.dropout:above 0}",
                     lambda f: f.args.lora is not None and f.args.lora.dropout > 0),
        "the ranks would drop different elements", "use --lora_dropout 0"),
    Row(_TENSOR, _optimizer("Adafactor", "AdamW8bit", "Muon"), "it needs complete matrices", "use AdamW"),
    Row(_TENSOR, _MOMENTS, "the ranks would round equal values differently"),
    # pipeline parallelism
    _no_effect(Use("--pipeline.schedule {pipeline.schedule:gpipe, interleaved, zbv}",
                   lambda f: f.args.pipeline.schedule != "1f1b"),
               Use("--pipeline_parallel_size 1", lambda f: f.args.pipeline_parallel_size == 1)),
    Row(_PIPELINE, Use("{accumulation:too few} micro-batches per step", lambda f: bool(f.enough_micro_batches)),
        "--pipeline.schedule {pipeline.schedule:NAME} needs one per stage, interleaved equally many in each round",
        "use --train.global_batch_size {enough_micro_batches:a multiple}, or a smaller --train.micro_batch_size"),
    Row(_PIPELINE, Use("the {model.n_layer:number of} layers of {model.name:the model}",
                       lambda f: bool(f.uneven_stages)),
        "all {n_stages:} stages have equally many", "use {uneven_stages:a divisor}"),
    Row(_PIPELINE, _EXPERTS, "the balancing loss is a mean over all layers"),
    Row(_PIPELINE, _FOREIGN_MODEL, "its forward is not divided into stages"),
    Row(_PIPELINE, _OBJECTIVE, "the last stage computes the next-token loss"),
    Row(_PIPELINE, _COMPILER, fix=_USE_TORCH),
    Row(_PIPELINE, Use("--lora_head true without other adapters",
                       lambda f: f.args.lora is not None and f.args.lora.parts == ("head",)),
        "the other stages have nothing to train", "add adapters to the blocks"),
    Row(_PIPELINE, _MOMENTS, "the copies of a tied embedding would be rounded differently"),
    Row(_PIPELINE, Use(f"{_FOREIGN_OPTIMIZER.text} of tied embeddings",
                       lambda f: not f.is_builtin and f.args.lora is None and f.has_tied_embeddings),
        f"{_NOT_IN_PARTS}, so their copies would differ", "use --train.tie_embeddings false or AdamW"),
    Row(_PIPELINE, _MIXED_16, "the schedules do not scale losses", "use bf16-mixed or 32-true"),
    Row(_PIPELINE, Use("--fsdp.accumulate sharded", lambda f: f.args.fsdp.accumulate == "sharded"),
        "the schedule reduces gradients once per step", "use unsharded"),
    Row(_ZBV, _CHECKPOINTING, "its backward pass runs in two parts", "use 1f1b"),
    Row(_ZBV, Use("tied embeddings", lambda f: f.has_tied_embeddings),
        "the first and the last stage are on one device", "use 1f1b"),
    # context parallelism
    Row(_CONTEXT, _EXPERTS, "the load-balancing loss needs complete rows"),
    Row(_CONTEXT, _FOREIGN_MODEL, "only toolkit's GPT splits rows"),
    Row(_CONTEXT, _OBJECTIVE, "only the next-token loss is a sum over tokens"),
    Row(_CONTEXT, _COMPILER, fix=_USE_TORCH),
    # objectives with a frozen model
    Row(_FROZEN, _FOREIGN_MODEL, "only toolkit's GPT computes its loss"),
    Row(_FROZEN, _TENSOR, "its frozen model is not divided"),
    Row(_FROZEN, _EXTENSION_STRATEGY, "the frozen model's head cannot be gathered alone", "use --strategy fsdp or ddp"),
    # dtypes
    _param_dtype("bf16", _precision("32-true", "16-mixed"), "bf16-mixed"),
    _param_dtype("fp16", _precision("32-true", "bf16-true", "bf16-master", "bf16-mixed"), "16-mixed"),
    _param_dtype("fp32", _precision("bf16-true", "bf16-master"), "32-true"),
    Row(Use("--fsdp.reduce_dtype fp16", lambda f: f.args.fsdp.reduce_dtype == "fp16"),
        _precision("32-true", "bf16-true", "bf16-master", "bf16-mixed"),
        "fp16 needs the gradient scaler of 16-mixed", "use bf16 or fp32"),
    Row(_OFFLOAD, _MIXED_16, "loss scaling needs gradients on the device", "use bf16-mixed or 32-true"),
    Row(Use("--optimizer.options fused", lambda f: bool(f.args.optimizer.options.get("fused"))), _MIXED_16,
        "a fused optimizer unscales the gradients after they are clipped"),
    # fp8
    Row(_FP8, _LORA, "torchao replaces plain linear layers, not layers with adapters or 4-bit weights"),
    Row(_FP8, _precision("32-true", "16-mixed", "bf16-master"),
        "the other layers compute in bf16", "use bf16-mixed or bf16-true"),
    Row(_FP8, Use("{not_in_fp8:--tensor_parallel_size, an extension's strategy or compiler, a user-provided module}",
                  lambda f: bool(f.not_in_fp8))),
    # FSDP
    _no_effect(Use("--fsdp.shard_size {fsdp.shard_size:N}", lambda f: f.args.fsdp.shard_size != AUTO),
               Use("--fsdp.sharding_strategy {fsdp.sharding_strategy:FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}",
                   lambda f: f.args.fsdp.sharding_strategy not in (AUTO, "HYBRID_SHARD")),
               fix="use HYBRID_SHARD"),
    _no_effect(Use("--fsdp.accumulate {fsdp.accumulate:sharded, unsharded}",
                   lambda f: f.args.fsdp.accumulate != AUTO),
               Use("one micro-batch per step", lambda f: f.batch is not None and f.accumulation == 1),
               "nothing is accumulated"),
    Row(_OFFLOAD, _QUANTIZE, "4-bit weights stay on the device"),
    # user-provided modules
    Row(Use("--strategy fsdp", lambda f: f.is_fsdp and f.args.fsdp.auto_wrap == "block"), _NO_BLOCKS,
        "FSDP shards block by block", _SET_BLOCK_CLASSES),
    Row(_CHECKPOINTING, _NO_BLOCKS, "the blocks are recomputed", _SET_BLOCK_CLASSES),
    Row(_optimizer("Muon"), _NO_BLOCKS, "Muon updates the matrices of blocks", _SET_BLOCK_CLASSES),
    # preferences
    Row(_PREFERENCES, Use("pretrain", lambda f: not f.args.is_finetune), fix="use finetune_lora or finetune_full"),
    Row(_PREFERENCES, Use("--data {data_name:that has no answers}",
                          lambda f: not isinstance(f.args.data, InstructionData)),
        "it compares completions", "use --data Preference"),
    Row(Use("--data Preference", lambda f: isinstance(f.args.data, Preference)),
        Use("--objective {objective_name:NextToken}", lambda f: f.args.objective.row_kind == "answers"),
        "it would also train on the rejected completions", "use --objective DPO, KTO, ORPO or SimPO"),
    Row(Use("--objective KTO", lambda f: f.objective_name == "KTO"),
        Use("--train.global_batch_size 1", lambda f: f.args.train.global_batch_size == 1),
        "it compares with other samples of the batch", "use 2 or more"),
    Row(Use("--objective {objective_name:DPO, KTO}",
            lambda f: f.args.objective.has_reference and not getattr(f.args.objective, "reference_dir", None)),
        Use("--from_peft {from_peft:FOLDER}", lambda f: f.args.from_peft is not None),
        "the model without adapters is not the initial model", "set --objective.reference_dir"),
    # adapters
    Row(_QUANTIZE, _MIXED_16, "4-bit layers compute in bf16 or fp32",
        "use bf16-true, or 32-true on a GPU without bfloat16"),
    _no_effect(Use("--fsdp.state_dict_type sharded", lambda f: f.args.fsdp.state_dict_type == "sharded"), _LORA,
               "adapters are saved in one file"),
    Row(Use("--train.tie_embeddings {train.tie_embeddings:true, false}",
            lambda f: f.args.train.tie_embeddings is not None),
        _LORA, "the base model is frozen", "remove it"),
    Row(_MASTERS, _LORA, "adapters are already fp32 and their base is bf16", "use bf16-true"),
    # optimizers
    Row(_optimizer("Muon", "AdamW8bit"), _EXTENSION_STRATEGY,
        "its shards are not rows of matrices", "use --strategy fsdp, ddp or AdamW"),
    Row(_MASTERS, Use("{strategy_name:fsdp or an extension's strategy}", lambda f: f.is_fsdp or f.is_extension),
        "under fsdp, bf16-mixed has fp32 shards and gathers in bf16", "use bf16-mixed or --strategy ddp"),
    Row(_MOMENTS, _EXTENSION_STRATEGY, "its shards are not rows of matrices", "use --strategy fsdp or ddp"),
    Row(Use(_FOREIGN_OPTIMIZER.text, lambda f: f.needs_unsharded), Use("{strategy_name:fsdp}", lambda f: f.is_fsdp),
        "its needs_unsharded is True", "use --strategy ddp"),
    Row(_MASTERS, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "use bf16-mixed"),
    Row(_MOMENTS, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "remove it"),
    Row(_MOMENTS, Use("--precision bf16-true", lambda f: f.precision == "bf16-true" and f.args.lora is None),
        "moments of bf16 weights are already bf16", "remove it"),
    Row(_MOMENTS, _MIXED_16, "16-mixed is for GPUs without bfloat16", "use bf16-mixed or 32-true"),
    Row(_MOMENTS, _optimizer("AdamW8bit"), "its moments are 8-bit"),
    _no_effect(_MOMENTS, Use("--optimizer.name {optimizer.name:NAME}", lambda f: not f.has_moments),
               "it has no moments with these options"),
    # the update in the backward pass
    _no_effect(_IN_BACKWARD, _LORA, "the gradients of adapters are small"),
    Row(_IN_BACKWARD, _SEVERAL_DEVICES,
        "each weight is updated before other devices' gradients arrive", "use FSDP, which shards gradients"),
    Row(_IN_BACKWARD, _ACCUMULATION, "it needs the complete gradient in one backward pass",
        "use --train.micro_batch_size equal to --train.global_batch_size"),
    Row(_IN_BACKWARD, Use("--train.max_norm {train.max_norm:1.0}", lambda f: f.args.train.max_norm > 0),
        "clipping needs the norm of all gradients first", "use --train.max_norm 0"),
    Row(_IN_BACKWARD, Use("--train.skip_spikes {train.skip_spikes:SIGMA}",
                          lambda f: f.args.train.skip_spikes is not None),
        "the weights are updated before the loss and the norm are known"),
    Row(_IN_BACKWARD, _MIXED_16, "its scaler checks all gradients first", "use bf16-mixed or 32-true"),
    Row(_IN_BACKWARD, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "remove it"),
    Row(_IN_BACKWARD, _OFFLOAD, "the gradients are in CPU memory only after the backward pass"),
    # schedule
    _no_effect(Use("--train.min_lr {train.min_lr:RATE}", lambda f: f.args.train.min_lr != AUTO),
               Use("--train.lr_schedule constant", lambda f: f.args.train.lr_schedule == "constant"),
               fix="remove one of them"),
)
# fmt: on


def find_conflicts(facts: Facts) -> Iterator[str]:
    """Yield the message of each row that a run violates."""
    yield from (row.message(facts) for row in ROWS if row.applies(facts))


def require_compatible(facts: Facts) -> None:
    """Check a run's options against the table, and run the extensions' checks."""
    run_checks(facts.args)
    for message in find_conflicts(facts):
        raise UserError(message)
