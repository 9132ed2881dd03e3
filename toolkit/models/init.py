"""Weight initialization as a pure function of (seed, parameter name), independent of ranks and order.

| parameter | initial value |
|---|---|
| weights of norms (:data:`NORMS`) | 1; 0 with norm_offset |
| ``attn.out_norm`` (linear attention), ``attn.dt_bias`` | 1 |
| ``attn.A_log`` (as in transformers) | log of uniform, 0.01 to 16 |
| all biases, ``mlp.correction`` | 0 |
| ``layer_scalar``, ``mlp.gate_scale``, ``mlp.expert_scale`` | 1 |
| ``mlp.alpha_p``, ``mlp.alpha_n`` (slopes of 0.8 after softplus and beta), ``mlp.beta``, ``mlp.eps`` | :data:`XIELU` |
| ``attn.proj.weight``, ``mlp.*proj.weight`` (outputs to the residual stream) | normal, 0.02 / sqrt(2 n_layer) |
| all other weights (``wte``, ``wpe``, ``attn.qkv``, ``mlp.*fc*``, ``mlp.*gate``, ``lm_head``, ...) | normal, 0.02 |
| ``attn.sinks`` (as in transformers) | normal, 0.02 |

Means are zero. The scheme is GPT-2's (Radford et al. 2019, section 2.3, and its Hugging Face implementation). A tied
head is initialized under the embedding's name.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from toolkit.models.config import ModelConfig

ParameterValue = Callable[[str, torch.Size], Tensor]
"""Maps a parameter's name and shape to its value."""
STD = 0.02
DRAWN_NUMEL = 1 << 30
"""Maximum elements that are drawn ahead: 4 GB. The experts of one layer of DeepSeek-V3 are 15 GB."""
XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.8 - 0.5)), "beta": 0.5, "eps": -1e-6}
NORMS = (
    "norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", "norm_q", "norm_k", "q_a_norm", "kv_a_norm", "ln_f",
    "per_layer_norm", "post_per_layer_norm", "experts_norm", "post_experts_norm", "post_dense_norm",
)  # fmt: skip


def draw(name: str, shape: torch.Size | tuple[int, ...], *, seed: int, config: ModelConfig) -> Tensor:
    """Return the initial value of parameter ``name`` in fp32 on the CPU, so that all devices get the same values."""
    module, _, kind = name.rpartition(".")
    if kind in ("bias", "correction"):
        return torch.zeros(shape, device="cpu")
    if kind in ("layer_scalar", "gate_scale", "expert_scale"):
        return torch.ones(shape, device="cpu")
    if kind in XIELU:
        return torch.full(shape, XIELU[kind], device="cpu")
    if kind == "dt_bias" or module.endswith(".out_norm"):
        return torch.ones(shape, device="cpu")
    if kind == "A_log":
        return torch.empty(shape, device="cpu").uniform_(0.01, 16, generator=parameter_generator(name, seed)).log_()
    if module.rpartition(".")[2] in NORMS:
        return torch.full(shape, 0.0 if config.norm_offset else 1.0, device="cpu")
    std = STD / math.sqrt(2 * config.n_layer) if module.endswith(".proj") else STD
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=parameter_generator(name, seed))


def parameter_generator(name: str, seed: int) -> torch.Generator:
    """Return the CPU generator for initializing parameter ``name``."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))


class Materializer:
    """Materializes and fills the parameters of a model, module by module.

    Args:
        model: The model, optionally on the meta device. Parameter names are recorded here, because FSDP replaces
            parameters unit by unit.
        value_of: Maps (name, shape) to the parameter's value, on any device and in any floating-point dtype.
        device: Device for meta parameters; others keep their device. Dtypes and ties are preserved.
    """

    def __init__(self, model: nn.Module, value_of: ParameterValue, device: torch.device | str = "cpu") -> None:
        self._value_of, self._device = value_of, device
        # for tied parameters the last name wins: transformer.wte.weight
        self._names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._names |= {id(buffer): name for name, buffer in model.named_buffers()}
        self._originals = [*model.parameters(), *model.buffers()]  # keeps the ids valid
        self._filled_parameters: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module, should_fill: Callable[[nn.Parameter], bool] = lambda parameter: True) -> None:
        """Fill the module's buffers and the parameters selected by ``should_fill``, without submodules."""
        for key, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) in self._names:
                setattr(module, key, self._fill(buffer))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_floating_point():
                continue  # quantized: already has its value
            if id(parameter) in self._names and should_fill(parameter):
                if id(parameter) not in self._filled_parameters:
                    self._filled_parameters[id(parameter)] = self._fill(parameter)
                setattr(module, key, self._filled_parameters[id(parameter)])  # tied parameters share one object

    def value(self, parameter: Tensor) -> Tensor:
        """Return the value of a model parameter."""
        return self._value_of(self._names[id(parameter)], parameter.shape)

    def _fill(self, tensor: Tensor) -> Tensor:
        value = self._value_of(self._names[id(tensor)], tensor.shape)
        if tensor.is_meta:
            # moved before it is cast: a GPU casts faster, and a 16-bit file is half the bytes
            filled = torch.empty_like(tensor, device=self._device).copy_(value.to(self._device))
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(filled, requires_grad=tensor.requires_grad) if is_parameter else filled
        tensor.copy_(value)
        return tensor


class InitializedModel(type):
    """Metaclass that initializes a model's weights after the outermost ``__init__``. Uses ``model.config`` and
    ``model.seed``.

    The model is built on the meta device to skip torch's default initialization. If meta is the default device, it
    stays there.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        device = torch.get_default_device()
        with torch.device("meta"):
            model = super().__call__(*args, **kwargs)
        if device.type != "meta":
            initialize(model, model.seed, device)
        return model


def initialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Initialize all parameters of a model with a ``config``. Meta parameters are materialized on ``device``."""
    materialize = Materializer(model, weight_initializer(model, seed), device)
    for module in model.modules():
        materialize(module)


def weight_initializer(model: nn.Module, seed: int) -> ParameterValue:
    """Return a function that maps a parameter's name and shape to its initial value.

    Matrices are drawn before they are requested, in torch's number of threads: one thread draws 100 million values per
    second, and a generator's values depend on their order. Request them in the order of ``model.named_parameters()``;
    in another order they are equal, but drawn in one thread.
    """
    value_of = partial(draw, seed=seed, config=cast(ModelConfig, model.config))
    if type(torch.empty(0, device="cpu")) is not Tensor:
        return value_of  # as in a FakeTensorMode, which other threads would not be in
    # for tied parameters the last name wins, as in Materializer
    names = {id(p): (name, p.shape) for name, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1}
    matrices = _draw_ahead(value_of, names.values())

    def next_value(name: str, shape: torch.Size) -> Tensor:
        if len(shape) > 1:
            for drawn_name, matrix in matrices:
                if drawn_name == name:
                    return matrix.result()
                matrix.cancel()  # of another pipeline stage
        return value_of(name, shape)

    return next_value


def _draw_ahead(
    value_of: ParameterValue, names: Iterable[tuple[str, torch.Size]]
) -> Iterator[tuple[str, Future[Tensor]]]:
    """Yield names and values in order. At most one value per thread and DRAWN_NUMEL elements are in memory."""
    threads = torch.get_num_threads()
    pool, ahead, numel = ThreadPoolExecutor(threads), deque[tuple[str, Future[Tensor]]](), deque[int]()
    for name, shape in names:
        while ahead and (len(ahead) == threads or sum(numel) + shape.numel() > DRAWN_NUMEL):
            numel.popleft()
            yield ahead.popleft()
        numel.append(shape.numel())
        ahead.append((name, pool.submit(value_of, name, shape)))
    pool.shutdown(wait=False)  # its threads end after the last value
    yield from ahead
