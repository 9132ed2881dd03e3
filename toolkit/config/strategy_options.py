"""Options of the strategies, in groups that validate themselves."""

from dataclasses import dataclass
from typing import Literal

from toolkit.config.checks import require_positive
from toolkit.errors import require_option

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Auto = Literal["auto"]
AUTO: Auto = "auto"


@dataclass(frozen=True)
class FSDPArgs:
    """FSDP options.

    Args:
        sharding_strategy: HYBRID_SHARD shards over the devices of a node and replicates over nodes; FULL_SHARD shards
            over all devices; SHARD_GRAD_OP shards gradients and optimizer state, but keeps weights unsharded between
            forward and backward; NO_SHARD replicates on every device. auto: HYBRID_SHARD.
        shard_size: Devices per model replica with HYBRID_SHARD. auto: the devices of a node.
        auto_wrap: What becomes an FSDP unit. block: each block; size: modules with at least min_num_params parameters;
            class: modules of wrap_classes. All other weights form the root unit, which stays gathered during a step.
        min_num_params: Minimum parameters of a unit with auto_wrap size, not counting units inside it. auto:
            100,000,000.
        wrap_classes: Class names for auto_wrap class, separated by commas, such as CausalSelfAttention,LLaMAMLP.
        state_dict_type: Checkpoint format. full: one file; sharded: one file per device, faster for large models. All
            commands read both.
        param_dtype: Compute dtype of the blocks' weights. auto: as --precision.
        reduce_dtype: Dtype of gradient reduction. auto: fp32 under mixed precision.
        buffer_dtype: auto: buffers keep their dtype. There is no other value.
        backward_prefetch: pre: all-gather the next block's weights before the current block's backward pass; none: when
            its own starts, which takes less memory.
        forward_prefetch: Issue the next block's all-gather before the current block's forward pass.
        limit_all_gathers: Keep at most two blocks' unsharded weights in memory. Always true.
        accumulate: How gradients accumulate over micro-batches. unsharded: each device keeps all gradients and reduces
            them once per step; sharded: each device reduces them after every micro-batch and keeps its shard. auto:
            sharded if unsharded gradients do not fit in device memory.
        cpu_offload: Keep the shards of weights, gradients and optimizer state in CPU memory, and clip and update there;
            also on one GPU. Much slower; not tested on several GPUs.
    """

    sharding_strategy: Literal["auto", "HYBRID_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = AUTO
    shard_size: int | Auto = AUTO
    auto_wrap: Literal["block", "size", "class"] = "block"
    min_num_params: int | Auto = AUTO
    wrap_classes: list[str] | str | None = None
    state_dict_type: Literal["full", "sharded"] = "full"
    param_dtype: Dtype = AUTO
    reduce_dtype: Dtype = AUTO
    buffer_dtype: Auto = AUTO
    backward_prefetch: Literal["pre", "none"] = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    accumulate: Literal["auto", "unsharded", "sharded"] = AUTO
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        require_positive("fsdp", self, "min_num_params", "shard_size")
        for name, choice in (("min_num_params", "size"), ("wrap_classes", "class")):
            value = getattr(self, name)
            require_option(
                value in (None, AUTO) or self.auto_wrap == choice,
                f"fsdp.{name}", value, f"has no effect with --fsdp.auto_wrap {self.auto_wrap}; use {choice}",
            )  # fmt: skip
        require_option(
            self.auto_wrap != "class" or bool(self.wrap_classes),
            "fsdp.auto_wrap", "class", "name the classes: --fsdp.wrap_classes CausalSelfAttention,LLaMAMLP",
        )  # fmt: skip
        require_option(self.limit_all_gathers, "fsdp.limit_all_gathers", "false", "FSDP always limits them; remove it")


@dataclass(frozen=True)
class DDPArgs:
    """Distributed data parallel (DDP).

    Args:
        bucket_cap_mb: Size of the gradient all-reduce buckets in MB.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves a copy.
        find_unused_parameters: Allow a user-provided model to use only some of its weights in a step; otherwise unused
            weights are an error.
        static_graph: Assume that every step uses the same weights, and find unused weights only once. Not supported
            with accumulation. On more than two ranks, a resumed run rounds its first step differently.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False

    def __post_init__(self) -> None:
        require_positive("ddp", self, "bucket_cap_mb")


@dataclass(frozen=True)
class PipelineArgs:
    """Pipeline parallelism, with --pipeline_parallel_size.

    Args:
        schedule: Order of the micro-batches' forward and backward passes. 1f1b: alternating, with at most one
            micro-batch per stage in memory; gpipe: all forward passes first; interleaved: 1f1b with two stages per
            device; zbv: two stages per device, and the gradients of the weights fill the idle time.
    """

    schedule: Literal["1f1b", "gpipe", "interleaved", "zbv"] = "1f1b"
