"""What ``import toolkit`` offers: load, train, finetune and generate, with the options of the commands.

Models, datasets and optimizers may be Python objects; this module turns them into the arguments of the commands' runs.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.checkpoints.folder import find_model, load_model
from toolkit.checkpoints.store import FINAL
from toolkit.commands import finetune_full, finetune_lora, pretrain
from toolkit.commands import generate as generate_command
from toolkit.commands.inference_options import InferenceOptions
from toolkit.config import AUTO, TrainingCommand, none_if_auto
from toolkit.config.command import as_mapping, parse_object
from toolkit.data.base import DataModule
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.in_memory import InMemoryData
from toolkit.data.tokens.iterable import IN_ORDER, IterableData, is_iterable, is_loader
from toolkit.data.tokens.rows import PythonData
from toolkit.distributed import ranks
from toolkit.distributed.device import DTYPES
from toolkit.distributed.signals import handlers_restored
from toolkit.errors import PeerShutdownError, UserError, did_you_mean
from toolkit.inference.batch import continue_texts
from toolkit.inference.load import load_checkpoint
from toolkit.io.paths import require_folder, require_local
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.gpt import GPT, Block
from toolkit.models.loss_wrapper import LossWrapper, find_blocks
from toolkit.planning.run_args import RunArgs, run_args
from toolkit.training.callbacks import Callback
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.run import detect_devices, run_training
from toolkit.ui.loggers import read_metrics

_DTYPES = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; the same on every rank.

    Args:
        out_dir: The folder of the run; its local staging folder if it is on remote storage.
        checkpoint: The folder of the last weights, ``out_dir/final``.
        step: Optimizer steps done.
        tokens: Input tokens so far, over all ranks.
        metrics: The last row of metrics.csv: loss, val_loss where there was held-out data, ...
    """

    out_dir: Path
    checkpoint: Path
    step: int
    tokens: int
    metrics: dict[str, float]


def load(
    checkpoint_dir: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    verify_checkpoint: bool = True,
    base_checkpoint_dir: str | Path | None = None,
) -> GPT:
    """Load the model of a checkpoint folder; for a LoRA checkpoint the base with unmerged adapters.

    Args:
        checkpoint_dir: A folder, or the name of one below ``checkpoints/``.
        device: Where the weights go.
        dtype: Their type: torch's, or "fp32", "bf16", "fp16"; that of the file when not given.
        verify_checkpoint: Compare files with their checksums first; false also reads edited files.
        base_checkpoint_dir: Base model of the adapters; the path recorded in training when not given.

    Raises:
        UserError: there is no such folder, or its weights do not fit its configuration.
    """
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise UserError(f"dtype {dtype}: must be one of {', '.join(_DTYPES)}{did_you_mean(dtype, _DTYPES)}")
        dtype = _DTYPES[dtype]
    require_folder("checkpoint_dir", checkpoint_dir)
    require_folder("base_checkpoint_dir", base_checkpoint_dir)
    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    return load_model(folder, device, dtype, base_checkpoint_dir)


def generate(
    model: str | Path | GPT, prompt: str | Sequence[str], *, tokenizer_dir: str | Path | None = None, **options: Any
) -> list[str]:
    """Continue a prompt, or several together, with the options of ``toolkit generate``.

    Args:
        model: A checkpoint folder, or a model, such as that of :func:`load`, on its device.
        prompt: The text to continue, or a list of texts.
        tokenizer_dir: A folder with a tokenizer.json. Required for a model, which has none; of a checkpoint folder its
            own when not given.
        options: The options of ``toolkit generate`` by name: max_new_tokens, temperature, top_k, top_p, num_samples,
            seed, for several samples batch_size; for a checkpoint folder also base_checkpoint_dir, accelerator,
            precision, quantize, verify_checkpoint.

    Returns:
        The new text of each sample, without the prompt; of several prompts first all samples of the first.

    Raises:
        UserError: an option is out of range, or the folder has no model or tokenizer.
        GuardError: the logits contain NaN or Inf.
    """
    given = {"checkpoint_dir": "" if isinstance(model, GPT) else model}
    values = parse_object(generate_command.setup, options | given)
    shared: InferenceOptions = values["shared"]
    if values["prompts_path"] is not None:
        raise UserError(f"prompts_path {values['prompts_path']}: give the prompts themselves, as a list")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if len(prompts) * values["num_samples"] < 2 and values["batch_size"] is not None:
        raise UserError(f"batch_size {values['batch_size']}: has no effect on one sample; leave it out")
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir, "tokenizer_dir")
    if isinstance(model, GPT):
        for name in options.keys() & shared.loading.keys():
            raise UserError(f"{name}: has no effect on a model that is ready")
        if tokenizer is None:
            raise UserError("tokenizer_dir: must be given, a model has no tokenizer")
    else:
        loaded = load_checkpoint(values["checkpoint_dir"], **shared.loading)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    sampling = {"max_new_tokens": values["max_new_tokens"], **shared.sampling}
    seeds = range(values["seed"], values["seed"] + values["num_samples"])
    was_training = model.training
    model.eval()
    try:
        size = values["batch_size"] or 8
        samples = continue_texts(
            model,
            tokenizer,
            prompts,
            batch_size=size,
            seeds=seeds,
            notice=lambda line: print(line, file=sys.stderr),
            **sampling,
        )
        return [sample.text for sample in samples]
    finally:
        model.train(was_training)


def _names_arguments(function: Any) -> Any:
    """Let messages name arguments: the same names as on the command line, without the dashes."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except UserError as error:
            error.args = (re.sub(r"(?<![\w-])--(?=[a-z])", "", str(error)),)
            raise

    return run


@_names_arguments
def train(
    model: str | ModelConfig | nn.Module | None = None,
    dataset: Any = None,
    *,
    val_dataset: Any = None,
    optimizer: Any = None,
    block_classes: Iterable[type[nn.Module] | str] | None = None,
    num_workers: int = 0,
    allow_duplicate_data: bool = False,
    callbacks: Iterable[Callback] = (),
    **options: Any,
) -> TrainResult:
    """Train a model: the run of ``toolkit pretrain``, with ready objects where you have them.

    On several devices (``devices=2``) the script is started once more for each further one, as it is; under torchrun or
    srun all processes are there already. All calls of ``train`` in one script use the same number of devices.

    Args:
        model: The name of a model, a :class:`ModelConfig`, or any module. Its forward is ``forward(input_ids, labels)``
            and returns ``(loss_sum, n_tokens)`` as :class:`GPT`'s does, or ``forward(input_ids)`` and returns logits
            (B, T, vocabulary) or an object with ``.logits``. A module is trained in place, or taken apart where it is
            sharded: the trained weights are those of the returned ``checkpoint``. All ranks begin with rank 0's.
        dataset: A :class:`~toolkit.data.DataModule`, or anything with ``len()`` and ``[index]``, which is shuffled, or
            an iterable, which is read in its own order and begins anew when it ends, or a torch DataLoader. An item is
            a 1-D tensor of T + 1 tokens, or ``{"input_ids": (T,), "labels": (T,)}`` or a tuple of both, where
            ``labels[t]`` is the token that follows ``input_ids[t]``, or -100 where nothing is to be learned.
            ``dataset[i]`` must not change, and an iterable yields the same items on every rank: each takes its own. A
            DataLoader yields the batches of its rank, of any size: their rows are taken one after the other.
        val_dataset: Held-out rows, with ``len()`` and ``[index]``.
        optimizer: A class of torch.optim or another with the same interface, its name, or the options of
            ``--optimizer`` as a dictionary or :class:`~toolkit.config.OptimizerArgs`; ``"name"`` in it may be a class.
        block_classes: Classes (or their names) of the blocks of a ready module, which are sharded and compiled one by
            one; those in its longest ``nn.ModuleList`` when not given.
        num_workers: Processes that read ``dataset``; 0 reads in the training process. Not for iterables.
        allow_duplicate_data: Let a DataLoader feed the same samples to several ranks.
        callbacks: Objects of classes derived from :class:`toolkit.Callback`.
        options: The options of ``toolkit pretrain`` by name; groups are dictionaries or the classes of
            :mod:`toolkit.config`: ``train={"max_steps": 100}, devices=2, strategy="fsdp", out_dir="out/mine"``.

    Raises:
        UserError: a mistake in the arguments; nothing has been written.
        GuardError, StoppedBySignalError, PeerLostError: as on the command line, see :mod:`toolkit.errors`.
        SystemExit: on the other ranks, where rank 0 raises one of these.
    """
    if not isinstance(strategy := options.get("strategy", AUTO), str):
        raise UserError(f"strategy {type(strategy).__name__}: give a name, such as 'fsdp', and options as fsdp={{...}}")
    chosen, cls = _read_optimizer(optimizer)
    arguments = parse_object(pretrain.setup, options | {"optimizer": chosen})
    arguments |= _read_model(model, block_classes, arguments) | {"optimizer_class": cls}
    arguments["data"] = _read_data(
        dataset, val_dataset, num_workers, allow_duplicate_data, options.get("data"), arguments
    )
    return _run("pretrain", arguments, callbacks)


@_names_arguments
def finetune(
    checkpoint_dir: str | Path,
    dataset: Any = None,
    *,
    lora: bool = False,
    val_dataset: Any = None,
    optimizer: Any = None,
    num_workers: int = 0,
    allow_duplicate_data: bool = False,
    callbacks: Iterable[Callback] = (),
    **options: Any,
) -> TrainResult:
    """Finetune a checkpoint: the run of ``toolkit finetune_full``, or of ``toolkit finetune_lora`` with ``lora``.

    Args:
        checkpoint_dir: The initial model, or the base of the adapters.
        dataset: A :class:`~toolkit.data.DataModule`, such as ``toolkit.data.JSON(json_path="questions.jsonl")``, or
            rows of tokens as in :func:`train`, for which the folder needs no tokenizer.
        lora: Train low-rank adapters (``lora_r`` and further options); otherwise all weights.
        val_dataset, optimizer, num_workers, allow_duplicate_data, callbacks: See :func:`train`.
        options: The options of the command by name, groups as dictionaries. A group as an object of
            :mod:`toolkit.config` replaces the command's defaults by its own.

    Raises:
        See :func:`train`.
    """
    command: TrainingCommand = "finetune_lora" if lora else "finetune_full"
    setup = finetune_lora.setup if lora else finetune_full.setup
    if dataset is None and "data" not in options:
        raise UserError("dataset: must be given, a DataModule or rows of tokens")
    chosen, cls = _read_optimizer(optimizer)
    arguments = parse_object(setup, options | {"checkpoint_dir": checkpoint_dir, "optimizer": chosen})
    arguments["optimizer_class"] = cls
    arguments["data"] = _read_data(
        dataset, val_dataset, num_workers, allow_duplicate_data, options.get("data"), arguments
    )
    return _run(command, arguments, callbacks)


def _run(command: TrainingCommand, arguments: dict[str, Any], callbacks: Iterable[Callback]) -> TrainResult:
    callbacks, data = list(callbacks), arguments["data"]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = getattr(callback, "__name__", type(callback).__name__)
            raise UserError(f"callbacks {name}: must be objects of a class of toolkit.Callback")
    for name, value in vars(data).items() if type(data).__module__.startswith("toolkit.") else ():
        if name not in getattr(data, "takes_urls", ()):
            require_local(f"data.{name}", value)
    args = run_args(command, **arguments)
    _require_script(args)
    try:
        with handlers_restored():
            run_training(args, callbacks)
        return ranks.broadcast_from_rank0(ranks.run_on_rank0(lambda: _result(args.run_dir)))
    except PeerShutdownError as error:
        raise SystemExit(error.exit_code) from None  # rank 0 says why; here a traceback would only hide that


def _result(out_dir: Path) -> TrainResult:
    checkpoint = out_dir / FINAL
    meta, rows = read_meta(checkpoint), read_metrics(out_dir / "logs" / "metrics.csv")
    last = {name: value for name, value in (rows[-1] if rows else {}).items() if value == value}  # NaN: an empty cell
    metrics = {name: value for name, value in last.items() if name not in ("step", "tokens")}
    return TrainResult(out_dir, checkpoint, meta["step"], meta["tokens"], metrics)


def _require_script(args: RunArgs) -> None:
    """Refuse to start processes from where there is no script that they could run."""
    _, world = detect_devices(args)
    if world.starts_processes and not Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
        raise UserError(
            f"devices {world.devices}: a notebook, a prompt, stdin or python -c has no script to start the other "
            "processes with; put this into a file and run that, or take devices=1"
        )


# ---- model, data, optimizer


def _read_model(
    model: Any, block_classes: Iterable[type[nn.Module] | str] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of RunArgs that say what is trained."""
    if model is not None and arguments["model_name"] is not None:
        raise UserError(f"model_name {arguments['model_name']}: a model is given, too; leave one of them out")
    if isinstance(model, nn.Module):
        return _read_module(model, block_classes, arguments)
    if block_classes is not None:
        raise UserError("block_classes: only for a user-provided module; remove it, toolkit's models have known blocks")
    if model is None or isinstance(model, str):
        return {} if model is None else {"model_name": model}
    if not isinstance(model, ModelConfig):
        raise UserError(f"model {type(model).__name__}: must be a model's name, a ModelConfig or a torch.nn.Module")
    if arguments["initial_checkpoint_dir"] is not None:
        raise UserError("initial_checkpoint_dir: brings its own architecture; leave it or the ModelConfig out")
    return {"model_config": ModelOverrides(**model.override(arguments["model_config"]).to_dict())}


def _read_module(
    module: nn.Module, block_classes: Iterable[type[nn.Module] | str] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    no_effect = {
        "initial_checkpoint_dir": arguments["initial_checkpoint_dir"] is not None,
        "model_config": arguments["model_config"] != ModelOverrides(),
        "train.tie_embeddings": arguments["train"].tie_embeddings is not None,
    }
    for name in (name for name, given in no_effect.items() if given):
        raise UserError(f"{name}: has no effect on a model that is ready; change the model itself")
    if any(p.is_meta for p in module.parameters()):
        raise UserError("model: has weights on the meta device, which are no values; build it on the CPU")
    if isinstance(module, GPT):
        return {"module": module, "block_classes": (Block,)}
    blocks = find_blocks(module, block_classes)
    if (compiler := arguments["shared"].compiler) not in (AUTO, "none") and not blocks:
        raise UserError(
            f"compiler {compiler}: compiles the blocks, and none were found; name their classes: block_classes"
        )
    return {"module": LossWrapper(module), "block_classes": blocks}


def _read_data(
    dataset: Any,
    val_dataset: Any,
    num_workers: int,
    allow_duplicates: bool,
    data: DataModule | None,
    arguments: dict[str, Any],
) -> DataModule:
    train = arguments["train"]
    if allow_duplicates and not is_loader(dataset):
        raise UserError("allow_duplicate_data True: only for a DataLoader; other data is split by toolkit")
    if dataset is not None and data is not None:
        raise UserError("data: a dataset is given, too; leave one of them out")
    if dataset is None or isinstance(dataset, DataModule):
        if val_dataset is not None or num_workers:
            name = "num_workers" if num_workers else "val_dataset"
            raise UserError(f"{name}: a DataModule has its own; set it there")
        if isinstance(arguments.get("module"), LossWrapper) and train.max_seq_length == AUTO:
            raise UserError("train.max_seq_length: must be given, the model's context length is not known")
        return arguments["data"] if dataset is None else dataset
    ready: PythonData
    max_length = none_if_auto(train.max_seq_length)
    if is_iterable(dataset):
        if num_workers:
            raise UserError(f"num_workers {num_workers}: {IN_ORDER}")
        ready = IterableData(dataset, val_dataset, max_length, allow_duplicates)
    else:
        ready = InMemoryData(dataset, val_dataset, num_workers, max_length)
    other_limits = (train.max_steps, train.epochs, train.max_time)
    if ready.is_ragged and (train.max_tokens is not None or other_limits == (None, None, None)):
        raise UserError(
            f"train.max_tokens {train.max_tokens}: the rows of the dataset differ in length, so that the number of "
            "steps, which the learning rate's schedule needs, is not known; give train.max_steps or train.epochs"
        )
    return ready


def _read_optimizer(value: Any) -> tuple[dict[str, Any], type[torch.optim.Optimizer] | None]:
    """Return the options of ``--optimizer``, and the class where torch.optim has none of that name."""
    if value is None:
        return {}, None
    if inspect.isclass(value) or isinstance(value, str):
        value = {"name": value}
    if isinstance(value, torch.optim.Optimizer):
        raise UserError(
            f"optimizer {type(value).__name__}: give the class, the run makes the object from the sharded weights"
        )
    values = dict(as_mapping("optimizer", value))
    cls = values.get("name")
    if not inspect.isclass(cls):
        return values, None
    if not issubclass(cls, torch.optim.Optimizer):
        raise UserError(f"optimizer {cls.__name__}: must be a class derived from torch.optim.Optimizer")
    name = cls.__name__
    if getattr(torch.optim, name, None) is cls:
        return values | {"name": name}, None
    return values | {"name": f"{cls.__module__}.{cls.__qualname__}"}, cls
