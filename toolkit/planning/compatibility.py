"""Table of options that are not supported together or have no effect together. Does not import torch."""

import os
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.config import AUTO, COMPILERS
from toolkit.errors import UserError, option_text
from toolkit.extension import run_checks
from toolkit.planning.facts import Facts


class Use(NamedTuple):
    """An option or another property of a run, as messages name it, and whether a run has it.

    ``{name:words}`` in ``text`` is the value of ``name`` of :class:`Facts` in messages and ``words`` in the table.
    """

    text: str
    applies: Callable[[Facts], Any] = lambda facts: True


class Row(NamedTuple):
    """Two uses that a run cannot have together."""

    option: Use
    other: Use
    reason: str = ""
    fix: str = "remove one of them"
    verb: str = "is not supported with"

    def applies(self, facts: Facts) -> bool:
        """Whether a run violates this row."""
        return bool(self.option.applies(facts) and self.other.applies(facts))

    def message(self, facts: Facts | None = None) -> str:
        """Return the message for a run, or the line of the table."""
        reason = f": {self.reason}" if self.reason else ""
        text = f"{self.option.text} {self.verb} {self.other.text}{reason}; {self.fix}"
        return re.sub(r"\{([\w.]+):([^}]*)\}", lambda m: option_text(attrgetter(m[1])(facts)) if facts else m[2], text)


def _no_effect(option: Use, other: Use, reason: str = "", fix: str = "remove it") -> Row:
    return Row(option, other, reason, fix, "has no effect with")


def _set(option: str, words: str) -> Use:
    """Return the use of any value of an option but its default; the table has ``words`` in place of the value."""
    return Use(f"--{option} {{{option}:{words}}}", lambda facts: facts.is_set(option))


def _is(option: str, *values: Any) -> Use:
    """Return the use of one of some values of an option."""
    words = ", ".join(map(option_text, values))
    return Use(f"--{option} {{{option}:{words}}}", lambda facts: attrgetter(option)(facts) in values)


def _adapters(part: str) -> Use:
    """Return the use of adapters on a part of the model."""
    return Use(f"--lora_{part} true", lambda f: f.lora is not None and part in f.lora.parts)


def _optimizer(*names: str) -> Use:
    lower = [name.lower() for name in names]
    return Use(
        f"--optimizer.name {{optimizer.name:{', '.join(names)}}}",
        lambda f: f.optimizer_class is None and f.optimizer.name.lower() in lower,
    )


_TENSOR, _PIPELINE, _CONTEXT = (_set(f"{name}_parallel_size", "N") for name in ("tensor", "pipeline", "context"))
_MODEL_PARALLEL = (_TENSOR, _PIPELINE, _CONTEXT)
_ZBV = _is("pipeline.schedule", "zbv")
_SEVERAL_DEVICES = Use("{world_size:several} devices", lambda f: f.world_size > 1)
_FSDP = Use("{strategy_name:fsdp}", lambda f: f.is_fsdp)
_EXTENSION_STRATEGY = Use("--strategy {strategy_name:NAME of an extension's strategy}", lambda f: f.is_extension)
_OFFLOAD = Use("--fsdp.cpu_offload true", lambda f: f.strategy_plan is not None and f.strategy_plan.offloads)
_ACCUMULATION = Use("accumulation ({batch:of several micro-batches})", lambda f: f.batch.accumulation > 1)
_CHECKPOINTING = _set("train.activation_checkpointing", "selective, full")
_MIXED_16, _MASTERS = _is("precision", "16-mixed"), _is("precision", "bf16-master")
_NOT_16_MIXED = _is("precision", "32-true", "bf16-true", "bf16-master", "bf16-mixed")
_FP8 = _set("train.fp8", "tensorwise, rowwise")
_RESIDUAL = _is("train.residual_dtype", "bf16")
_QUANTIZE = _set("quantize", "bnb.nf4, bnb.nf4-dq")
_LORA = Use("finetune_lora", lambda f: f.lora is not None)
_IN_BACKWARD = _is("optimizer.in_backward", True)
_MOMENTS = _is("optimizer.state_dtype", "bf16")
_EMA = _set("train.ema", "DECAY")
_FOREIGN_OPTIMIZER = Use("a user-provided or extension optimizer", lambda f: not f.is_builtin)
_SCHEDULE_FREE = Use("a schedule-free optimizer", lambda f: f.sets_weights)
_NOT_IN_PARTS = "it may not update each weight independently of the others"
_USER_MODULE = Use("a user-provided module", lambda f: f.module is not None)
_FOREIGN_MODEL = Use("a user-provided or extension model", lambda f: f.module is not None or f.is_extension_model)
_NO_BLOCKS = Use("a module without known blocks", lambda f: f.module is not None and not f.block_classes)
_EXPERTS = Use("experts (MoE)", lambda f: f.model is not None and f.model.n_moe_layer > 0)
_NO_EXPERTS = Use("a model without experts (MoE)", lambda f: f.model is not None and f.model.n_moe_layer == 0)
_LINEAR_ATTENTION = Use("linear attention", lambda f: f.model is not None and f.model.linear_attention is not None)
_NO_LINEAR_ATTENTION = Use(
    "a model without linear attention", lambda f: f.model is not None and f.model.linear_attention is None
)
_ATTENTION_PARTS = {"query", "key", "value", "projection"}
_GEMMA_4 = Use("Gemma 4", lambda f: f.model is not None and f.model.family == "gemma4_text")
_COMPILER = Use("--compiler {compiler:NAME of an extension's compiler}", lambda f: f.compiler not in COMPILERS)
_OBJECTIVE = Use("--objective {objective_name:NAME}", lambda f: f.objective_name != "NextToken")
_PREFERENCES = Use(
    "--objective {objective_name:DPO, KTO, ORPO, SimPO}",
    lambda f: f.objective.row_kind != "answers" and not f.objective.head,
)
_HEAD = Use("--head {objective.head:classification, reward, token_reward}", lambda f: f.objective.head)
_CLASSIFICATION = Use("--head classification", lambda f: f.objective.head == "classification")
_FROZEN = Use("--objective {objective_name:Distillation}", lambda f: f.objective.frozen_option)
_TRACKS_NOTHING = Use(
    "a run without --train.keep_best true or --train.patience",
    lambda f: not f.train.keep_best and f.train.patience is None,
)
_METRIC, _TASKS = _set("eval.metric", "NAME"), _set("eval.tasks", "NAMES")
_NO_VALIDATION = Use(
    "a run without validations",
    lambda f: not (f.eval.interval or f.eval.initial_validation or f.eval.final_validation),
)
_NEFTUNE, _PRETRAIN = _set("train.neftune_alpha", "ALPHA"), Use("pretrain", lambda f: not f.is_finetune)
_OTHER_DTYPE = "the weights have another dtype"
_SET_BLOCK_CLASSES = "set block_classes"


# fmt: off
ROWS: tuple[Row, ...] = (
    Row(_set("model_name", "NAME"), _set("initial_checkpoint_dir", "FOLDER"),
        "the checkpoint defines the architecture"),
    # devices and strategies
    Row(_is("strategy", "single"), _SEVERAL_DEVICES, fix="use auto, fsdp or ddp"),
    Row(Use("--devices {world_size:2 or more}", lambda f: f.world_size > 1),
        Use("--accelerator mps", lambda f: f.device == "mps"),
        "mps has one device", "use --devices 1 or --accelerator cpu"),
    Row(Use("TORCH_DISTRIBUTED_DEBUG=DETAIL", lambda f: os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"),
        Use("ddp on a CPU", lambda f: (f.strategy_name, f.device) == ("ddp", "cpu")),
        "torch crashes", "use --strategy fsdp"),
    Row(_is("fsdp.sharding_strategy", "FULL_SHARD", "SHARD_GRAD_OP"), _is("strategy", "ddp"), "ddp does not shard"),
    _no_effect(Use("{unused_option:--fsdp.OPTION, --ddp.OPTION}", lambda f: f.unused_option),
               Use("{strategy_plan:another strategy}")),
    _no_effect(_set("timeout", "MINUTES"), Use("a single process", lambda f: f.world_size == 1)),
    Row(_is("ddp.static_graph", True), _ACCUMULATION,
        "torch's DDP cannot combine them",
        "use --train.micro_batch_size {samples_per_device:equal to a device's share of the global batch}"),
    *(Row(size, Use("--strategy {strategy:single, ddp or an extension's strategy}",
                    lambda f: f.strategy not in (AUTO, "fsdp")),
          "only FSDP can be combined with it", "use --strategy fsdp") for size in _MODEL_PARALLEL),
    *(Row(size, _COMPILER, fix="use --compiler torch or none") for size in _MODEL_PARALLEL),
    *(Row(size, _LINEAR_ATTENTION, reason) for size, reason in (
        (_TENSOR, "its heads are not split across ranks"), (_CONTEXT, "its state needs complete rows"))),
    _no_effect(_adapters("linear_attention"), _NO_LINEAR_ATTENTION),
    _no_effect(Use("finetune_lora with adapters of only attention",
                   lambda f: f.lora is not None and {*f.lora.parts} <= _ATTENTION_PARTS),
               Use("a model whose layers all have linear attention",
                   lambda f: f.model is not None and all(map(f.model.has_linear_attention, range(f.model.n_layer)))),
               fix="use --lora_linear_attention true"),
    *(Row(size, _GEMMA_4, "its layers share keys and values and take per-layer inputs") for size in _MODEL_PARALLEL),
    Row(_COMPILER, _GEMMA_4, "its blocks take per-layer inputs", "use --compiler torch or none"),
    # tensor parallelism
    Row(_TENSOR, Use("--lora_query true of gated attention",
                     lambda f: _adapters("query").applies(f) and f.model is not None and f.model.attention_gate),
        "an adapter's rows of queries and gates are not split apart"),
    Row(_TENSOR, _EXPERTS, "they are not divided"),
    Row(_TENSOR, Use("latent attention (MLA)", lambda f: f.model is not None and f.model.latent_attention is not None),
        "its heads are not split across ranks"),
    Row(_TENSOR, Use("--model_config.norm_qk_type olmo2",
                     lambda f: f.model is not None and f.model.norm_qk and f.model.norm_qk_type == "olmo2"),
        "the norm needs all heads of a token"),
    Row(_TENSOR, _FOREIGN_MODEL, "only toolkit's own layers are divided"),
    Row(_TENSOR, _QUANTIZE, "4-bit blocks are not divided"),
    Row(_TENSOR, Use("--lora_dropout {lora.dropout:above 0}",
                     lambda f: f.lora is not None and f.lora.dropout > 0),
        "the ranks would drop different elements", "use --lora_dropout 0"),
    Row(_TENSOR, _optimizer("Adafactor", "AdamW8bit", "Muon"), "it needs complete matrices", "use AdamW"),
    Row(_TENSOR, _MOMENTS, "the ranks would round equal values differently"),
    # pipeline parallelism
    _no_effect(_set("pipeline.schedule", "gpipe, interleaved, zbv"), _is("pipeline_parallel_size", 1)),
    Row(_PIPELINE, Use("{batch.accumulation:too few} micro-batches per step", lambda f: f.enough_micro_batches),
        "--pipeline.schedule {pipeline.schedule:NAME} needs one per stage, interleaved equally many in each round",
        "use --train.global_batch_size {enough_micro_batches:a multiple}, or a smaller --train.micro_batch_size"),
    Row(_PIPELINE, Use("the {model.n_layer:number of} layers of {model.name:the model}",
                       lambda f: f.uneven_stages),
        "all {n_stages:N} stages have equally many", "use {uneven_stages:a divisor}"),
    Row(_PIPELINE, _EXPERTS, "the balancing loss is a mean over all layers"),
    Row(_PIPELINE, _FOREIGN_MODEL, "its forward is not divided into stages"),
    Row(_PIPELINE, _OBJECTIVE, "the last stage computes the next-token loss"),
    Row(_PIPELINE, Use("--lora_head true without other adapters",
                       lambda f: f.lora is not None and f.lora.parts == ("head",)),
        "the other stages have nothing to train", "add adapters to the blocks"),
    Row(_PIPELINE, Use("adapters of only attention in a model with linear attention",
                       lambda f: f.lora is not None and _LINEAR_ATTENTION.applies(f)
                       and {*f.lora.parts} <= {*_ATTENTION_PARTS, "head"}),
        "a stage may have nothing to train", "use --lora_linear_attention true"),
    Row(_PIPELINE, _MOMENTS, "the copies of a tied embedding would be rounded differently"),
    Row(_PIPELINE, Use(f"{_FOREIGN_OPTIMIZER.text} of tied embeddings",
                       lambda f: not f.is_builtin and f.lora is None and f.has_tied_embeddings),
        f"{_NOT_IN_PARTS}, so their copies would differ", "use --train.tie_embeddings false or AdamW"),
    Row(_PIPELINE, _MIXED_16, "the schedules do not scale losses", "use bf16-mixed or 32-true"),
    Row(_PIPELINE, _is("fsdp.accumulate", "sharded"),
        "the schedule reduces gradients once per step", "use unsharded"),
    Row(_ZBV, _CHECKPOINTING, "its backward pass runs in two parts", "use 1f1b"),
    Row(_ZBV, Use("tied embeddings", lambda f: f.has_tied_embeddings),
        "the first and the last stage are on one device", "use 1f1b"),
    # context parallelism
    Row(_CONTEXT, _EXPERTS, "the load-balancing loss needs complete rows"),
    Row(_CONTEXT, _FOREIGN_MODEL, "only toolkit's GPT splits rows"),
    Row(_CONTEXT, _OBJECTIVE, "only the next-token loss is a sum over tokens"),
    # objectives with a frozen model
    Row(_FROZEN, _FOREIGN_MODEL, "only toolkit's GPT computes its loss"),
    Row(_FROZEN, _TENSOR, "its frozen model is not divided"),
    Row(_FROZEN, _EXTENSION_STRATEGY, "the frozen model's head cannot be gathered alone", "use --strategy fsdp or ddp"),
    # dtypes
    Row(_is("fsdp.param_dtype", "bf16"), _is("precision", "32-true", "16-mixed"), _OTHER_DTYPE, "use bf16-mixed"),
    Row(_is("fsdp.param_dtype", "fp16"), _NOT_16_MIXED, _OTHER_DTYPE, "use 16-mixed"),
    Row(_is("fsdp.param_dtype", "fp32"), _is("precision", "bf16-true", "bf16-master"), _OTHER_DTYPE, "use 32-true"),
    Row(_is("fsdp.reduce_dtype", "fp16"), _NOT_16_MIXED,
        "fp16 needs the gradient scaler of 16-mixed", "use bf16 or fp32"),
    Row(_OFFLOAD, _MIXED_16, "loss scaling needs gradients on the device", "use bf16-mixed or 32-true"),
    Row(Use("--optimizer.options fused", lambda f: f.optimizer.options.get("fused")), _MIXED_16,
        "a fused optimizer unscales the gradients after they are clipped"),
    # fp8
    Row(_FP8, _LORA, "torchao replaces plain linear layers, not layers with adapters or 4-bit weights"),
    Row(_FP8, _is("precision", "32-true", "16-mixed", "bf16-master"),
        "the other layers compute in bf16", "use bf16-mixed or bf16-true"),
    *(Row(_FP8, other) for other in (_TENSOR, _EXTENSION_STRATEGY, _COMPILER, _USER_MODULE)),
    # residual stream
    Row(_RESIDUAL, _is("precision", "32-true", "16-mixed"), "the blocks do not compute in bf16", "use bf16-mixed"),
    _no_effect(_RESIDUAL, _is("precision", "bf16-true", "bf16-master"), "it is already in bf16"),
    *(Row(_RESIDUAL, other) for other in (_FOREIGN_MODEL, _COMPILER)),
    # FSDP
    _no_effect(_set("fsdp.shard_size", "N"),
               _is("fsdp.sharding_strategy", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), fix="use HYBRID_SHARD"),
    _no_effect(_set("fsdp.accumulate", "sharded, unsharded"),
               Use("one micro-batch per step", lambda f: f.batch.accumulation == 1),
               "nothing is accumulated"),
    Row(_OFFLOAD, _QUANTIZE, "4-bit weights stay on the device"),
    # user-provided modules
    Row(Use("--strategy fsdp", lambda f: f.is_fsdp and f.fsdp.auto_wrap == "block"), _NO_BLOCKS,
        "FSDP shards block by block", _SET_BLOCK_CLASSES),
    Row(_CHECKPOINTING, _NO_BLOCKS, "the blocks are recomputed", _SET_BLOCK_CLASSES),
    Row(_optimizer("Muon"), _NO_BLOCKS, "Muon updates the matrices of blocks", _SET_BLOCK_CLASSES),
    # preferences
    Row(_PREFERENCES, _PRETRAIN, fix="use finetune_lora or finetune_full"),
    Row(_PREFERENCES, Use("--data {data_name:that has no answers}",
                          lambda f: not f.data.has_answers),
        "it compares completions", "use --data Preference"),
    Row(Use("--data Preference", lambda f: f.data.content == "preferences"),
        Use("--objective {objective_name:NextToken}", lambda f: f.objective.row_kind == "answers"),
        "it would also train on the rejected completions", "use --objective DPO, KTO, ORPO or SimPO"),
    # heads
    Row(_HEAD, _PRETRAIN, fix="use finetune_lora or finetune_full"),
    Row(_CLASSIFICATION, Use("--data {data_name:without labels}", lambda f: f.data.content != "labels"),
        "it needs labels", "use --data Classification"),
    Row(Use("--head {objective.head:reward, token_reward}", lambda f: f.objective.head in ("reward", "token_reward")),
        Use("--data {data_name:without pairs}", lambda f: f.data.content != "preferences"),
        "it compares completions", "use --data Preference"),
    Row(Use("--data Classification", lambda f: f.data.content == "labels"),
        Use("--objective {objective_name:NAME}", lambda f: f.objective.head != "classification"),
        "it has labels, not answers", "use --head classification"),
    Row(_HEAD, _FOREIGN_MODEL,
        "only toolkit's own architectures have score layers"),
    Row(_HEAD, _TENSOR, "the score layer is not divided"),
    Row(_HEAD, Use("--lora_head true", lambda f: f.lora is not None and f.lora.head),
        "there is no LM head; the score layer is always trained", "remove it"),
    Row(_HEAD, _set("from_peft", "FOLDER"), "the folder's score layer is not read"),
    _no_effect(_set("train.tie_embeddings", "true, false"), _HEAD, "there is no LM head"),
    Row(Use("--eval.max_new_tokens {eval.max_new_tokens:N}", lambda f: f.eval.max_new_tokens not in (0, AUTO)), _HEAD,
        "there is no LM head to generate with", "remove it"),
    Row(Use("--objective KTO", lambda f: f.objective_name == "KTO"),
        _is("train.global_batch_size", 1),
        "it compares with other samples of the batch", "use 2 or more"),
    Row(Use("--objective {objective_name:DPO, KTO}",
            lambda f: f.objective.has_reference and not getattr(f.objective, "reference_dir", None)),
        _set("from_peft", "FOLDER"),
        "the model without adapters is not the initial model", "set --objective.reference_dir"),
    # noise on the embeddings
    Row(_NEFTUNE, _PRETRAIN, "it regularizes finetuning", "remove it"),
    Row(_NEFTUNE, _FOREIGN_MODEL, "only toolkit's GPT adds it", "remove it"),
    Row(_NEFTUNE, _OBJECTIVE, "it is for the next-token loss", "remove it"),
    # adapters
    Row(_QUANTIZE, _MIXED_16, "4-bit layers compute in bf16 or fp32",
        "use bf16-true, or 32-true on a GPU without bfloat16"),
    _no_effect(_adapters("experts"), _NO_EXPERTS),
    _no_effect(_adapters("router"), _NO_EXPERTS),
    _no_effect(_adapters("mlp"), Use("a model whose MLPs are all experts (MoE)", lambda f: f.has_only_experts),
               fix="use --lora_experts true"),
    _no_effect(_is("fsdp.state_dict_type", "sharded"), _LORA, "adapters are saved in one file"),
    Row(_set("train.tie_embeddings", "true, false"), _LORA, "the base model is frozen", "remove it"),
    Row(_MASTERS, _LORA, "adapters are already fp32 and their base is bf16", "use bf16-true"),
    # optimizers
    Row(_optimizer("Muon", "AdamW8bit"), _EXTENSION_STRATEGY,
        "its shards are not rows of matrices", "use --strategy fsdp, ddp or AdamW"),
    Row(_MASTERS, Use("{strategy_name:fsdp or an extension's strategy}", lambda f: f.is_fsdp or f.is_extension),
        "under fsdp, bf16-mixed has fp32 shards and gathers in bf16", "use bf16-mixed or --strategy ddp"),
    Row(_MOMENTS, _EXTENSION_STRATEGY, "its shards are not rows of matrices", "use --strategy fsdp or ddp"),
    Row(Use(_FOREIGN_OPTIMIZER.text, lambda f: f.needs_unsharded), _FSDP,
        "its needs_unsharded is True", "use --strategy ddp"),
    Row(_optimizer("SOAP"), _FSDP,
        "it needs complete matrices", "use --strategy ddp"),
    Row(_MASTERS, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "use bf16-mixed"),
    Row(_MOMENTS, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "remove it"),
    Row(_MOMENTS, Use("--precision bf16-true", lambda f: f.precision == "bf16-true" and f.lora is None),
        "moments of bf16 weights are already bf16", "remove it"),
    Row(_MOMENTS, _MIXED_16, "16-mixed is for GPUs without bfloat16", "use bf16-mixed or 32-true"),
    Row(_MOMENTS, _optimizer("AdamW8bit"), "its moments are 8-bit"),
    _no_effect(_MOMENTS, Use("--optimizer.name {optimizer.name:NAME}", lambda f: not f.has_moments),
               "it has no moments with these options"),
    # averaged weights
    *(Row(use, _EXTENSION_STRATEGY, "it may hold the weights in other copies", "use --strategy fsdp or ddp")
      for use in (_EMA, _SCHEDULE_FREE)),
    Row(_EMA, _SCHEDULE_FREE, "the optimizer averages the weights itself"),
    Row(_is("train.lr_schedule", "linear", "wsd"), _SCHEDULE_FREE, "the average replaces the decay", "use constant"),
    # the update in the backward pass
    _no_effect(_IN_BACKWARD, _LORA, "the gradients of adapters are small"),
    Row(_IN_BACKWARD, _SEVERAL_DEVICES,
        "each weight is updated before other devices' gradients arrive", "use FSDP, which shards gradients"),
    Row(_IN_BACKWARD, _ACCUMULATION, "it needs the complete gradient in one backward pass",
        "use --train.micro_batch_size equal to --train.global_batch_size"),
    Row(_IN_BACKWARD, Use("--train.max_norm {train.max_norm:1.0}", lambda f: f.train.max_norm > 0),
        "clipping needs the norm of all gradients first", "use --train.max_norm 0"),
    Row(_IN_BACKWARD, _set("train.skip_spikes", "SIGMA"),
        "the weights are updated before the loss and the norm are known"),
    Row(_IN_BACKWARD, _MIXED_16, "its scaler checks all gradients first", "use bf16-mixed or 32-true"),
    Row(_IN_BACKWARD, _FOREIGN_OPTIMIZER, _NOT_IN_PARTS, "remove it"),
    Row(_IN_BACKWARD, _OFFLOAD, "the gradients are in CPU memory only after the backward pass"),
    # validation
    *(Row(_METRIC, other, reason) for other, reason in (
        (_HEAD, "there is no LM head to answer with"),
        (_USER_MODULE, "it may not generate text"), (_PIPELINE, "the stages would wait for each other at every token"),
        (_CONTEXT, "answers are too short to be split"))),
    *(Row(_TASKS, other, reason) for other, reason in (
        (_USER_MODULE, "it cannot be exported"), (_PIPELINE, "no rank has a complete model"))),
    *(_no_effect(_set(f"eval.best_{name}", words), _TRACKS_NOTHING, fix="set one of them or remove it")
      for name, words in (("by", "NAME"), ("mode", "max, min"))),
    *(Row(use, _NO_VALIDATION, fix="set --eval.interval")
      for use in (_METRIC, _TASKS, _is("train.keep_best", True))),
    _no_effect(_set("train.patience", "N"), _is("eval.interval", 0), fix="set --eval.interval"),
    # schedule
    _no_effect(_set("train.min_lr", "RATE"), _is("train.lr_schedule", "constant"), fix="remove one of them"),
)
# fmt: on


def find_conflicts(facts: Facts) -> Iterator[str]:
    """Yield the message of each row that a run violates."""
    yield from (row.message(facts) for row in ROWS if row.applies(facts))


def require_compatible(facts: Facts) -> None:
    """Check a run's options against the table, and run the extensions' checks."""
    run_checks("check", facts.args)
    for message in find_conflicts(facts):
        raise UserError(message)
