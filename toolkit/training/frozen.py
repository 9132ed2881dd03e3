"""Build the frozen model of an objective, such as a teacher. It has no gradients and is not in checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import read_model_config
from toolkit.data.cache import hash_inputs
from toolkit.distributed.private_lightning import FabricModule
from toolkit.planning.frozen import find_frozen
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import RunArgs, objective_entry
from toolkit.training.model import ModelSpec, build_model, specify_model
from toolkit.training.verify import require_intact_on_all_ranks

REFERENCE_DIR = "reference_dir"


def build_frozen(
    config: ResolvedConfig,
    spec: ModelSpec,
    fabric: Fabric,
    folder: Path,
    report: Callable[[str], None],
    longest_ragged: int = 0,
    is_exact: bool = False,
) -> FabricModule:
    """Load the model of ``folder`` for inference, with the run's strategy. Collective.

    Call this before the trained model is built, because the strategy keeps properties of the last model. With
    bf16-mixed, the weights are stored in bf16.

    Args:
        spec: The model, see :func:`specify_frozen`.
        report: Receives notes on the folder.
        longest_ragged: See :func:`toolkit.training.model.build_model`.
        is_exact: Store the weights in the trained model's dtype.
    """
    args = config.args
    if args.verify_checkpoint:
        require_intact_on_all_ranks(folder, fabric.local_rank == 0, report, model_only=True)
    compiler = args.compiler if args.compiler == "torch" else "none"
    train = replace(args.train, activation_checkpointing="none")
    config = replace(config, args=replace(args, compiler=compiler, train=train))
    if config.precision == "bf16-mixed" and not is_exact:
        config = replace(config, precision="bf16-true")
    model = build_model(fabric, spec, config, longest_ragged, folder)
    return model.eval()


def specify_frozen(config: ResolvedConfig) -> ModelSpec | None:
    """Describe the objective's frozen model; None if it needs none."""
    if config.frozen is None:
        return None
    spec = specify_model(config.frozen, None, ())
    spec.module.requires_grad_(False)
    return spec


def model_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of a checkpoint's weights and of its architecture, without the name."""
    config = {name: value for name, value in read_model_config(folder).to_dict().items() if name != "name"}
    return hash_inputs({"weights": base_fingerprint(folder), "config": config})


def objective_fingerprint(args: RunArgs) -> dict[str, Any]:
    """Return the objective's options with the fingerprint of another model instead of its folder."""
    entry = objective_entry(args.objective)
    for option, folder in (
        (args.objective.frozen_option, find_frozen(args.objective)),
        (REFERENCE_DIR, args.reference_dir),
    ):
        if folder is not None:
            entry["init_args"][option] = model_fingerprint(folder)
    return entry
