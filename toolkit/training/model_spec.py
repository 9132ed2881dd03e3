"""Build the model on the meta device, then initialize or load its weights shard by shard."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch import distributed as dist

from toolkit.checkpoints.folder import load_compatible_weights, meta_model, read_model_config
from toolkit.checkpoints.run.sharded import is_sharded
from toolkit.checkpoints.run.state_dicts import load_sharded_weights, tied_names
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import Tensors, load_weights
from toolkit.distributed import ranks
from toolkit.distributed.cpu_memory import malloc_trim
from toolkit.distributed.fabric import block_dtype, materialize_with, setup_module
from toolkit.distributed.names import canonical_name
from toolkit.distributed.private_lightning import FabricModule
from toolkit.errors import UserError
from toolkit.extension import load_registered
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.flops import flops_per_token
from toolkit.models.fp8 import SIZE_MULTIPLE, convert_to_fp8, gather_in_fp8
from toolkit.models.gpt import GPT
from toolkit.models.head import pad_head
from toolkit.models.init import Materializer, ParameterValue, draw, weight_initializer
from toolkit.models.lora_config import SCORE, TRAINED_SCORE, LoRAConfig, Quantize, is_adapter
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.planning.resolve import ResolvedConfig
from toolkit.private_torch import configure_compiler


class ModelSpec:
    """A model before wrapping, with properties that wrapping hides.

    Args:
        config: Builds the model on the meta device, with adapters if ``lora`` is set.
        module: A user-provided module (which may be a GPT) with its weights; replaces the model of ``config``.
        blocks: Block classes of ``module``.
        lora: Adapter configuration. With adapters, all other weights are frozen.
        quantize: Quantization of block weights on loading.

    Attributes:
        meta_model: The module if it is on the meta device; None if it has weights.
        config: Model configuration; None for a user-provided module.
        sizes: Number of elements of each parameter, by name.
        shapes: Shapes in the state dict of the undivided model, by name; empty for a user-provided module.
        tied, no_decay_params, block_params: Results of ``tied_names``, ``no_decay_params`` and ``block_params``.
        fingerprint: Values that must not change on resume.
    """

    def __init__(
        self,
        config: ModelConfig | None,
        module: nn.Module | None = None,
        blocks: tuple[type[nn.Module], ...] = (),
        lora: LoRAConfig | None = None,
        quantize: Quantize | None = None,
    ) -> None:
        self.config, self.lora, self.quantize = config, lora, quantize
        self.meta_model: GPT | None = None
        self.shapes: dict[str, torch.Size] = {}
        if module is None:
            assert config is not None
            module = self.meta_model = meta_model(config, lora)
            blocks = (Block,)
            self.shapes = {name: value.shape for name, value in module.state_dict().items()}
        self.module, self.blocks = module, blocks
        self.sizes = {name: p.numel() for name, p in module.named_parameters()}
        self.tied, self.no_decay_params = tied_names(module), no_decay_params(module)
        self.block_params = block_params(module, blocks)
        if config is not None:
            self.fingerprint = config.to_dict()
        else:
            shapes = [f"{canonical_name(name)} {tuple(p.shape)}" for name, p in module.named_parameters()]
            self.fingerprint = {"shapes": hashlib.sha256("\n".join(shapes).encode()).hexdigest()}


def specify_frozen(config: ModelConfig) -> ModelSpec:
    """Build a model that is not trained, such as an objective's teacher, on the meta device."""
    spec = ModelSpec(config)
    spec.module.requires_grad_(False)
    return spec


def build_model(
    fabric: Fabric,
    spec: ModelSpec,
    config: ResolvedConfig,
    longest_ragged: int,
    source: Path | None,
    adapters: Tensors | None = None,
) -> FabricModule:
    """Initialize or load the weights, and wrap the model for the strategy.

    Every rank initializes one FSDP unit at a time from the seed, or reads it from the shared file, and keeps its shard.
    No rank ever has a second complete copy (M3).

    Args:
        longest_ragged: Tokens in the longest row if row lengths vary; otherwise 0.
        source: Checkpoint folder to load weights from; None initializes them.
        adapters: Adapter weights by name; None initializes them with no effect on the output.
    """
    module, args = spec.module, config.args
    if config.precision in ("bf16-true", "bf16-master"):
        module.to(torch.bfloat16)
        for name, parameter in module.named_parameters():
            if is_adapter(name):  # adapter updates are too small for bf16
                parameter.data = parameter.data.float()
    elif spec.meta_model is None:
        for parameter in module.parameters():  # a user's module may be in 16 bits; buffers keep their dtypes
            parameter.data = parameter.data.float()
    fp8 = args.train.fp8
    if fp8 != "none" and isinstance(module, GPT):
        is_uneven = (config.max_seq_length or 1) % (SIZE_MULTIPLE * ranks.layout().context) > 0
        convert_to_fp8(module, fp8, fabric.device.type, pads_tokens=is_uneven or longest_ragged > 0)
    # with adapters, weights are read one unit at a time, because the base checkpoint has no adapters
    shards = spec.lora is None and source is not None and is_sharded(source / WEIGHTS) and _shards_fit(spec, source)
    if spec.meta_model is None:
        _load_into_module(module, None if shards else source)
    else:
        values = _values(spec, spec.meta_model, fabric, args.seed, source, shards, adapters)
        if (size := ranks.layout().tensor) > 1:
            from toolkit.distributed.tensor_parallel import split_model

            rank = ranks.layout().coordinates(ranks.global_rank())["tensor"]
            values = split_model(spec.meta_model, size, rank, ranks.group("tensor"))(values)
        spec.meta_model.execute_with(autocasts_residual=args.train.residual_dtype == "bf16")
        if ranks.layout().pipeline > 1:
            from toolkit.distributed.pipeline import Pipeline

            Pipeline(spec.meta_model, args.pipeline.schedule, fabric.device, fabric.autocast)
        materialize = Materializer(module, values, fabric.device)
        materialize_with(fabric, module, materialize)
    if isinstance(module, GPT):
        pad_head(module)
        context = ContextGroup.of(ranks.group("context")) if ranks.layout().context > 1 else None
        module.execute_with(seed=args.seed, context=context, neftune_alpha=args.train.neftune_alpha or 0.0)
    checkpoint_blocks(module, spec.blocks, args.train.activation_checkpointing)
    if args.compiler == "torch":
        compile_blocks(module, spec.blocks, longest_ragged)
    elif args.compiler != "none":
        load_registered("compilers", args.compiler)(module, spec.blocks, longest_ragged, args.groups)
    wrapped = setup_module(fabric, module)
    if fp8 == "tensorwise":
        gather_in_fp8(wrapped)
    malloc_trim()
    if shards:
        assert source is not None
        load_sharded_weights(unwrapped(wrapped), spec.tied, source / WEIGHTS)
    return wrapped


def compile_blocks(module: nn.Module, blocks: tuple[type[nn.Module], ...], longest_ragged: int) -> None:
    """Compile the blocks in place. Class and weight names do not change.

    Rows of varying length share one graph. Recompiling while gradients accumulate fails under FSDP in mixed
    precision, where the accumulated gradient is fp32 and the weight bf16 (pytorch 111317).
    """
    is_exact = False
    if isinstance(module, GPT):
        is_exact = module.config.qat is not None  # so that the export has the integers of training
        loss = module.execution.compiled_loss or True
        module.execute_with(compiled_loss=loss, uniform_length=longest_ragged)
        # selective checkpointing warns about in-place operations such as gpt-oss's; tests cover them
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    torch.compiler.reset()  # graphs of an earlier run in this process count toward torch's recompile limit
    configure_compiler(longest_ragged > 0, is_exact)
    for part in module.modules():
        if isinstance(part, blocks):
            part.compile(dynamic=True if longest_ragged else None)


def unwrapped(wrapped: FabricModule) -> nn.Module:
    """Return the module inside Fabric's wrapper: the DDP or FSDP module, or the plain one."""
    return wrapped._forward_module


def describe_model(spec: ModelSpec, seq_length: float, forward_only: bool = False) -> str:
    """Return name, parameter count and FLOPs per token (N8) as one line."""
    name = (spec.config and spec.config.name) or spec.module._get_name()
    text = f"{name}: {sum(spec.sizes.values()):,} parameters"
    trained = sum(p.numel() for p in spec.module.parameters() if p.requires_grad)
    if trained < sum(spec.sizes.values()) and not forward_only:
        text += f", {trained:,} of them trained"
    if spec.lora is not None:
        text += f" (rank {spec.lora.r} on {', '.join(spec.lora.parts)})"
    if spec.config is None:
        return text
    full, causal = (
        flops_per_token(spec.module, spec.config, seq_length, causal=half, forward_only=forward_only) / 1e6
        for half in (False, True)
    )
    return f"{text}, {full:.1f} MFLOP per token ({causal:.1f} with causal attention counted by half)"


def _shards_fit(spec: ModelSpec, source: Path) -> bool:
    """Whether shards can be loaded directly. They cannot if head or tied embeddings of model and checkpoint differ."""
    config = spec.config
    if config is None:
        return True
    stored = read_model_config(source)
    if (stored.head, stored.tie_embeddings) == (config.head, config.tie_embeddings):
        return True
    if ranks.world_size() > 1:
        option = f"--train.tie_embeddings {config.tie_embeddings}"
        if stored.head != config.head:
            option = f"--head {config.head}"
        raise UserError(f"{option}: not so in the sharded checkpoint {source}; run `toolkit consolidate` on it first")
    return False


def _values(
    spec: ModelSpec,
    model: GPT,
    fabric: Fabric,
    seed: int,
    source: Path | None,
    shards: bool,
    adapters: Tensors | None,
) -> ParameterValue:
    """Return a function from name and shape to weight. Without FSDP, quantized layers get their weights immediately."""
    if shards:
        return lambda name, shape: torch.zeros(()).expand(shape)  # filled by load_sharded_weights
    if source is None:
        return weight_initializer(model, seed)
    stored_head = read_model_config(source).head
    weights = load_compatible_weights(source, model, has_new_head=stored_head is None and spec.lora is None)
    if spec.lora is None:
        draw_score = partial(draw, seed=seed, config=model.config)  # of a new head
        return lambda name, shape: weights[name] if name in weights else draw_score(name, shape)
    packed: dict[str, Callable[[], Tensor]] = {}
    if spec.quantize is not None:
        from toolkit.models.quantize import quantize_linears, reserve_quantized

        storage = block_dtype(fabric, next(model.parameters()).dtype)  # in which FSDP stores 4-bit weights
        if storage is None:
            quantize_linears(model, spec.quantize, weights.__getitem__, fabric.device)
        else:
            packed = reserve_quantized(model, spec.quantize, storage, weights.__getitem__, fabric.device)
        spec.sizes |= {
            name: p.numel() for name, p in model.named_parameters()
        }  # packed 4-bit weights have fewer elements
    from toolkit.models.lora import adapter_values  # imported with the adapters of the model

    initial = adapter_values(model, seed, weights.__getitem__) if adapters is None else None
    tensors = weights | (adapters or {})
    if stored_head is not None and adapters is None:
        tensors[TRAINED_SCORE] = load_weights(source)[SCORE]

    def value_of(name: str, shape: torch.Size) -> Tensor:
        if initial is not None and is_adapter(name) and name not in tensors:
            return initial(name, shape)
        return packed[name]() if name in packed else tensors[name]

    return value_of


@torch.no_grad()
def _load_into_module(module: nn.Module, source: Path | None) -> None:
    """Load a checkpoint into a user-provided module. Missing tensors are broadcast from rank 0."""
    state = module.state_dict()
    weights = {} if source is None else load_weights(source)
    for name, tensor in state.items():
        if canonical_name(name) in weights:
            tensor.copy_(weights[canonical_name(name)])
        elif ranks.is_distributed():
            on_cpu = tensor.detach().cpu().contiguous()
            dist.broadcast(on_cpu, src=0)
            tensor.copy_(on_cpu)
