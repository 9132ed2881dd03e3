"""The options ``--qat.*``, and the functions of :class:`toolkit.models.quantizer.Quantizer`.

Every run imports this module, which imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from toolkit.errors import require_option
from toolkit.extension import import_by_name
from toolkit.models.config import ModelConfig

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs

Weights = Literal["none", "int4", "int8", "int8-int4"]
GROUP_SIZE = 32


@dataclass(frozen=True)
class QATArgs:
    """Quantization-aware training: the linear layers of the blocks compute with quantized weights.

    Args:
        weights: int4 or int8: round the weights as an export with this format does. int8-int4: int4 weights, and inputs
            rounded to int8 per token. none: do not round. Default: as the initial checkpoint was trained.
        group_size: Weights of a row that share a scale. Default: as the initial checkpoint was trained, or 32.
    """

    weights: Weights | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        choices = get_args(Weights)
        require_option(
            self.weights in (None, *choices), "qat.weights", self.weights, f"must be one of {', '.join(choices)}"
        )
        is_valid = self.group_size is None or (type(self.group_size) is int and self.group_size > 1)
        require_option(is_valid, "qat.group_size", self.group_size, "must be 2 or more")
        if self.weights in (None, "none"):
            require_option(
                self.group_size is None,
                "qat.group_size",
                self.group_size,
                "needs --qat.weights; add it",
            )


_DTYPES = {"32-true": "float32", "16-mixed": "float16"}  # others compute in bfloat16


def configure(args: RunArgs, precision: str, config: ModelConfig | None) -> ModelConfig | None:
    """Return the architecture of a run with its quantization; None for a user-provided module.

    Raises:
        UserError: An option is not supported, or the groups do not divide the width of a layer.
    """
    options: QATArgs = args.groups.get("qat", QATArgs())
    initial = (config and config.qat) or {"weights": "none", "group_size": GROUP_SIZE}
    qat = initial | {name: value for name, value in asdict(options).items() if value is not None}
    if qat["weights"] == "none":
        return config and replace(config, qat=None)
    from toolkit_quantized.checks import require_supported

    require_supported(args, qat["weights"], is_set=options.weights is not None)
    assert config is not None
    from toolkit.models.gpt import model_on_meta

    config = replace(config, qat=qat | {"dtype": _DTYPES.get(precision, "bfloat16")})
    model_on_meta(config.with_vocab_size(64))  # raises if groups do not divide a width
    return config


__getattr__ = import_by_name(
    __name__,
    {
        "attach": "toolkit_quantized.layers.attach",
        "freeze": "toolkit_quantized.layers.freeze",
        "hold": "toolkit_quantized.layers.HeldWeights",
        "make_packing": "toolkit_quantized.packing.Packing",
    },
)
