"""Options shared by generate and chat."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from toolkit.config import Accelerator

if TYPE_CHECKING:
    from toolkit.inference.sampling import Sampling


@dataclass(frozen=True)
class InferenceOptions:
    """Options to load a checkpoint for inference and to sample from it.

    Args:
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 disables.
        top_p: Nucleus sampling: sample from the most likely tokens with this total probability; 1 disables.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: bf16-true on CUDA, else the checkpoint's.
        quantize: 4-bit format (bitsandbytes) of the blocks' linear layers. bnb.nf4-dq also quantizes the scales.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """

    is_flat: ClassVar[bool] = True  # the fields are options without a prefix

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    base_checkpoint_dir: str | None = None
    accelerator: Accelerator = "auto"
    precision: Literal["32-true", "bf16-true"] | None = None
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None
    verify_checkpoint: bool = True

    @property
    def sampling(self) -> "Sampling":
        """How to choose the tokens. Raises UserError if an option is out of range."""
        from toolkit.inference.sampling import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def loading(self) -> dict[str, Any]:
        """The keyword arguments of :func:`toolkit.inference.load.load_checkpoint`."""
        return {name: value for name, value in vars(self).items() if name not in ("temperature", "top_k", "top_p")}
