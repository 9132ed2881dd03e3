"""``toolkit.Trainer``: a training run as an object with the arguments of :func:`toolkit.train`."""

from contextlib import ExitStack
from typing import Any

from toolkit.config.command import parse_object
from toolkit.errors import UserError
from toolkit.planning.run_args import RunArgs
from toolkit.planning.training_options import PretrainOptions
from toolkit.training.engine import Engine, open_run, resolve_run
from toolkit.training.python_args import TrainResult, names_arguments, read_run_args, run_from_python
from toolkit.training.run import Callback, Run
from toolkit.training.trainer_names import PYTHON_OBJECTS, trainer_options, translate

OF_RUN = (
    "args", "callbacks", "config", "data", "display", "fabric", "model", "optimizer", "out_dir", "progress",
    "request_stop", "save", "validate",
)  # fmt: skip
"""Names of the run that a Trainer also has."""


class Trainer:
    """A training run with the arguments of :func:`toolkit.train`.

    Once the run has started, ``run`` is what callbacks get, and its public names are also the Trainer's, such as
    ``progress``, ``model`` and ``out_dir``.

    Options of the group ``train`` may be keyword arguments, such as ``max_steps=100``. OpenLanguageModel's names also
    work: dataloader, device, context_length, grad_accum_steps, weight_decay, grad_clip_norm, sharding_strategy and
    others.

    Args:
        model: See :func:`toolkit.train`.
        dataset: See :func:`toolkit.train`. A DataLoader determines the micro-batch size. With one, or with
            ``batch_size``, the global batch is micro-batch size x devices x ``grad_accum_steps``, 1 by default.
        val_dataset: Validation dataset.
        preset: "balanced", "memory" or "speed", see ``--preset``.
        strategy: "auto", "single", "ddp" or "fsdp".
        options: Options of the group ``train``, and all other arguments of :func:`toolkit.train`.

    Raises:
        UserError: an argument is unknown or set twice.
    """

    def __init__(self, model: Any = None, dataset: Any = None, *more: Any, **options: Any) -> None:
        self._options = trainer_options((dataset, *more), {"model": model} | options)
        objects = (*PYTHON_OBJECTS, "callbacks", "strategy")
        with names_arguments():  # fail now
            parse_object(PretrainOptions, {k: v for k, v in self.arguments().items() if k not in objects})
        self._run: Run | None = None
        self.result: TrainResult | None = None

    def fit(self, **limits: Any) -> TrainResult:
        """Train and return the result. ``limits`` are additional options, such as ``max_steps=100``.

        Raises:
            See :func:`toolkit.train`.
        """
        arguments = self.arguments(**limits)
        callbacks = arguments.pop("callbacks", ())
        objects = {name: arguments.pop(name) for name in PYTHON_OBJECTS if name in arguments}
        with names_arguments():
            args = read_run_args("pretrain", arguments, **objects)
            self.result = run_from_python(args, callbacks, self._train)
        return self.result

    train = fit
    save_checkpoint: Any = Run.save_checkpoint

    def arguments(self, **limits: Any) -> dict[str, Any]:
        """Return the arguments of :func:`toolkit.train` that are equivalent to ``fit(**limits)``."""
        for name in limits.keys() & self._options.keys():
            raise UserError(f"{name}: is already an argument of Trainer; remove one of them")
        return translate(self._options | limits)

    @property
    def run(self) -> Run:
        """The run. Available from ``on_train_start`` on."""
        if self._run is None:
            raise UserError("Trainer: the run has not started; call fit() first")
        return self._run

    def __getattr__(self, name: str) -> Any:
        if name not in OF_RUN:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.run, name)

    def _train(self, args: RunArgs, callbacks: list[Callback]) -> None:
        with ExitStack() as stack:
            self._run = open_run(*resolve_run(args, callbacks), stack)
            if self._run is not None:
                Engine(self._run).train()
