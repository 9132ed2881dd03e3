"""An FSDP guide's YAML, the Free Transformer's: the groups ``model``, ``data``, ``training`` and ``distributed``.

FSDP's options have no effect on one device, with another ``--strategy``, or with no_shard, so a file for eight GPUs
also runs on a laptop. Options that apply on one device, such as the precision, are kept.
"""

import math
from functools import partial

from toolkit_foreign.rules import (
    BATCH_SIZE,
    BOOL,
    CLIP_NORM,
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    Convert,
    ForeignConfig,
    Options,
    Rule,
    number,
    text,
)

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BF16 = {True: "bf16-mixed", False: "32-true"}
_PARAM_DTYPE = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}


def _without_fsdp(file: ForeignConfig) -> str:
    """Return the reason why the run does not use FSDP; "" if it does."""
    strategy = file.option("strategy")
    if strategy is not None:
        return "" if strategy.startswith("fsdp") else f"no effect, the strategy is {strategy}"
    return "no effect, use_fsdp is false" if file.find("distributed", "use_fsdp") is False else ""


def _without_shards(file: ForeignConfig) -> str:
    """Return the reason why the run shards nothing; "" if it shards."""
    sharding = file.option("fsdp.sharding_strategy") or file.find("distributed", "fsdp_sharding_strategy")
    if reason := _without_fsdp(file):
        return reason
    if str(sharding).upper() == "NO_SHARD":
        return "no effect, no_shard shards nothing"
    return "no effect on one device" if file.world_size() == 1 else ""


def _min_num_params(file: ForeignConfig, number: int) -> Options | str:
    policy = file.option("fsdp.auto_wrap") or file.find("distributed", "fsdp_auto_wrap_policy")
    if policy not in ("size", "size_based_auto_wrap"):
        return "no effect without fsdp_auto_wrap_policy size_based_auto_wrap"
    return _without_shards(file) or {"fsdp.min_num_params": number}


# ---- precision


def _mixed_precision(file: ForeignConfig, is_mixed: bool) -> str:
    """Return the precision for FSDP's dtypes. The guide's default is bfloat16."""
    dtype = file.find("distributed", "fsdp_param_dtype")
    return _PARAM_DTYPE.get(str(dtype), "bf16-mixed") if is_mixed else "32-true"


def _precision(file: ForeignConfig) -> str | None:
    """Return the precision of the run; None if it is auto."""
    if "precision" in {**file.toolkit_options, **file.overrides}:
        return file.option("precision")
    is_mixed, dtype = (file.find("distributed", key) for key in ("fsdp_mixed_precision", "fsdp_param_dtype"))
    if (is_mixed is None and dtype is None) or _without_fsdp(file):
        return _BF16.get(file.find("training", "bf16"))
    return _mixed_precision(file, is_mixed is not False)


def _without_dtypes(file: ForeignConfig) -> str:
    """Return the reason why FSDP's dtypes have no effect; "" if they apply."""
    is_off = file.find("distributed", "fsdp_mixed_precision") is False
    return "no effect, fsdp_mixed_precision is false" if is_off else _without_fsdp(file)


def _dtype(option: str) -> Convert:
    """Return the converter for a dtype whose auto value follows --precision."""

    def convert(file: ForeignConfig, dtype: str) -> Options | str:
        precision = _precision(file)
        if option == "fsdp.reduce_dtype" and dtype == "fp16" and precision != "16-mixed":
            raise ValueError("needs the gradient scaler of --precision 16-mixed; use float32 or bfloat16")
        if precision and dtype == ("bf16" if precision == "bf16-true" else "fp32"):
            return f"already set by --precision {precision}"
        return _without_shards(file) or {option: dtype}

    return convert


# ---- model, data and training


def _dataset(file: ForeignConfig, name: str) -> Options:
    if not name.startswith("synthetic"):
        raise ValueError(f"use --data HuggingFaceText --data.repo_id {name}")
    vocab_size = file.find("model", "vocab_size")
    return {"data": "SyntheticTokens", **({} if vocab_size is None else {"data.vocab_size": COUNT(vocab_size)})}


def _split_layer(file: ForeignConfig, layer: int) -> str:
    if layer != (file.find("model", "num_layers") or 0) // 2:
        raise ValueError("must be half of num_layers: the latent enters in the middle")
    return "fixed"


def _betas(file: ForeignConfig, _: float) -> Options:
    betas = (file.find("training", "beta1") or 0.9, file.find("training", "beta2") or 0.999)
    return {"optimizer.betas": list(betas)}


_LATENT = "model_config.family_options"
_ALWAYS = partial(Rule, {True: True}, "", no_effect="fixed")
_DROPOUT = Rule(NOT_NEGATIVE, "", no_effect="no effect, there is no dropout")
MODEL = {
    "vocab_size": Rule(COUNT, "", no_effect="no effect, the data defines it"),
    "hidden_dim": Rule(COUNT, "model_config.n_embd"),
    "num_layers": Rule(COUNT, "model_config.n_layer"),
    "num_heads": Rule(COUNT, "model_config.n_head"),
    "num_kv_heads": Rule(COUNT, "model_config.n_query_groups"),
    "ffn_hidden_dim": Rule(COUNT, "model_config.intermediate_size"),
    "max_seq_len": Rule(COUNT, "model_config.block_size"),
    "dropout": _DROPOUT,
    "use_rmsnorm": _ALWAYS(),
    "use_rope": _ALWAYS(),
    "use_swiglu": _ALWAYS(),
    "latent_dim": Rule(COUNT, f"{_LATENT}.latent_bits"),
    "split_layer": Rule(COUNT, "", _split_layer),
}
DATA = {
    "dataset_name": Rule(text, "data", _dataset),
    "data_dir": Rule(text, "", no_effect="no effect, prepared data is in --data.cache_dir"),
    "max_length": Rule(COUNT, "train.max_seq_length"),
    "num_workers": Rule(COUNT_OR_ZERO, "data.num_workers"),
}
TRAINING = {
    "batch_size": BATCH_SIZE,
    "gradient_accumulation_steps": Rule(COUNT, "", no_effect="counted in --train.global_batch_size"),
    "learning_rate": Rule(POSITIVE, "train.learning_rate", note="not scaled; --train.lr_scaling scales it"),
    "warmup_steps": Rule(COUNT_OR_ZERO, "train.lr_warmup_steps"),
    "weight_decay": Rule(NOT_NEGATIVE, "optimizer.weight_decay"),
    "beta1": Rule(POSITIVE, "optimizer.betas", _betas),
    "beta2": Rule(POSITIVE, "optimizer.betas", _betas),
    "gradient_checkpointing": Rule({True: "full", False: "none"}, "train.activation_checkpointing"),
    "bf16": Rule(_BF16, "precision"),
    "gradient_clip_norm": CLIP_NORM,
    "grad_clip": CLIP_NORM,
    "max_steps": Rule(COUNT, "train.max_steps"),
    "num_epochs": Rule(COUNT, "train.epochs"),
    "log_every": Rule(COUNT, "train.log_interval"),
    "eval_every": Rule(COUNT, "eval.interval"),
    "save_every": Rule(COUNT, "train.save_interval"),
    "checkpoint_dir": Rule(text, "out_dir"),
    "beta_kl": Rule(partial(number, "1, the paper's", lambda n: n == 1), "", no_effect="fixed"),
    "kappa_free_bits": Rule(
        NOT_NEGATIVE,
        f"{_LATENT}.free_bits",
        lambda file, nats: {f"{_LATENT}.free_bits": round(nats / math.log(2), 4)},
        note="nats, in bits",
    ),
}
DISTRIBUTED = {
    "use_fsdp": Rule({True: "fsdp", False: "ddp"}, "strategy"),
    "fsdp_sharding_strategy": Rule(
        {name.lower(): name for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")},
        "fsdp.sharding_strategy",
        no_effect=_without_fsdp,
    ),
    "fsdp_backward_prefetch": Rule(
        {"backward_pre": "pre", "backward_post": "none"},  # fully_shard gathers before the backward pass, or not ahead
        "fsdp.backward_prefetch",
        no_effect=_without_shards,
    ),
    "fsdp_forward_prefetch": Rule(BOOL, "fsdp.forward_prefetch", no_effect=_without_shards),
    "fsdp_auto_wrap_policy": Rule(
        {"transformer_auto_wrap": "block", "size_based_auto_wrap": "size"},
        "fsdp.auto_wrap",
        no_effect=_without_shards,
        fixes={"custom": "name the classes of the units: --fsdp.auto_wrap class --fsdp.wrap_classes NAME,NAME"},
    ),
    "fsdp_min_num_params": Rule(COUNT, "fsdp.min_num_params", _min_num_params),
    "fsdp_state_dict_type": Rule(
        {"full_state_dict": "full", "sharded_state_dict": "sharded"},
        "fsdp.state_dict_type",
        no_effect=_without_fsdp,
        fixes={"local_state_dict": "use sharded_state_dict: it also writes a file per device, and loads on any number"},
    ),
    "fsdp_mixed_precision": Rule(
        BOOL, "precision", lambda file, is_mixed: {"precision": _mixed_precision(file, is_mixed)}, _without_fsdp
    ),
    "fsdp_param_dtype": Rule(_PARAM_DTYPE, "precision", no_effect=_without_dtypes),
    "fsdp_reduce_dtype": Rule(_DTYPES, "fsdp.reduce_dtype", _dtype("fsdp.reduce_dtype"), _without_dtypes),
    "fsdp_buffer_dtype": Rule(_DTYPES, "fsdp.buffer_dtype", _dtype("fsdp.buffer_dtype"), _without_dtypes),
    "cpu_offload": Rule(BOOL, "fsdp.cpu_offload", no_effect=_without_fsdp),
}
