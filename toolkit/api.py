"""The Python API: load, train, finetune and generate, with the options of the commands."""

from collections.abc import Iterable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.checkpoints.folder import find_model, load_model, require_language_model
from toolkit.commands import generate as generate_command
from toolkit.commands.inference_options import InferenceOptions
from toolkit.config.command import parse_object
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import DTYPES
from toolkit.errors import UserError, did_you_mean, notice
from toolkit.inference.batch import continue_texts
from toolkit.inference.load import load_checkpoint
from toolkit.io.paths import require_folder
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.training.engine import run_training
from toolkit.training.python_args import TrainResult, names_arguments, read_run_args, run_from_python
from toolkit.training.run import Callback
from toolkit.training.trainer import Trainer

_DTYPES = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class AutoTrainer(Trainer):
    """:class:`Trainer`, whose strategy is "auto", under OpenLanguageModel's name."""


class DDPTrainer(Trainer):
    """:class:`Trainer` with ``strategy="ddp"``, under OpenLanguageModel's name."""

    __init__ = partialmethod(Trainer.__init__, strategy="ddp")


class FSDPTrainer(Trainer):
    """:class:`Trainer` with ``strategy="fsdp"``, under OpenLanguageModel's name."""

    __init__ = partialmethod(Trainer.__init__, strategy="fsdp")


def HFTokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer, under OpenLanguageModel's name. Trainers take its folder, as ``tokenizer_dir``.

    Args:
        name: A folder with a tokenizer.json, or the name of one in ``checkpoints/``.

    Raises:
        UserError: there is none.
    """
    return Tokenizer.load(name, flag="HFTokenizer")


def load(
    checkpoint_dir: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    verify_checkpoint: bool = True,
    base_checkpoint_dir: str | Path | None = None,
) -> GPT:
    """Load a model from a checkpoint folder. A LoRA checkpoint gives the base model with unmerged adapters.

    A model trained with ``--qat.weights`` has its quantized weights, with adapters merged; training continues without.

    Args:
        checkpoint_dir: A checkpoint folder, or the name of one in ``checkpoints/``.
        device: Device of the weights.
        dtype: Dtype of the weights: a torch dtype, "fp32", "bf16" or "fp16". Default: as stored.
        verify_checkpoint: Verify checksums first. Set to False to load edited files.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.

    Raises:
        UserError: the folder does not exist, or its weights do not match its configuration.
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
    """Generate continuations of one or several prompts, with the options of ``toolkit generate``.

    Args:
        model: A checkpoint folder, or a loaded model on its current device.
        prompt: The text to continue, or a list of texts.
        tokenizer_dir: A folder with a tokenizer.json. Required for a loaded model. Default for a checkpoint folder: the
            folder itself.
        options: The options of ``toolkit generate`` by name: max_new_tokens, temperature, top_k, top_p, num_samples,
            seed, for several samples batch_size; for a checkpoint folder also base_checkpoint_dir, accelerator,
            precision, quantize, verify_checkpoint.

    Returns:
        The generated text of each sample, without the prompt. Samples are ordered by prompt.

    Raises:
        UserError: an option is out of range, or the folder has no model or tokenizer.
        GuardError: the logits contain NaN or Inf.
    """
    positional = {"checkpoint_dir": "" if isinstance(model, GPT) else model}
    values = parse_object(generate_command.setup, options | positional)
    shared: InferenceOptions = values["shared"]
    if values["prompts_path"] is not None:
        raise UserError(
            f"prompts_path {values['prompts_path']}: is not supported in Python; pass the prompts as a list"
        )
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if len(prompts) * values["num_samples"] < 2 and values["batch_size"] is not None:
        raise UserError(f"batch_size {values['batch_size']}: has no effect with a single sample; remove it")
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir, "tokenizer_dir")
    if isinstance(model, GPT):
        require_language_model(model.config, "model")
        for name in options.keys() & shared.loading.keys():
            raise UserError(f"{name}: has no effect on a loaded model; remove it")
        if tokenizer is None:
            raise UserError("tokenizer_dir: must be set, because a loaded model has no tokenizer")
    else:
        loaded = load_checkpoint(values["checkpoint_dir"], **shared.loading)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    sampling = shared.sampling
    seeds = range(values["seed"], values["seed"] + values["num_samples"])
    was_training = model.training
    model.eval()
    try:
        size = values["batch_size"] or 8
        samples = continue_texts(
            model,
            tokenizer,
            prompts,
            max_new_tokens=values["max_new_tokens"],
            sampling=sampling,
            batch_size=size,
            seeds=seeds,
            notice=notice,
        )
        return [sample.text for sample in samples]
    finally:
        model.train(was_training)


@names_arguments()
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
    """Pretrain a model as ``toolkit pretrain`` does. Model, dataset, optimizer and callbacks may be Python objects.

    With several devices (``devices=2``), the script is started again for each further device, unless torchrun or srun
    started it. All calls of ``train`` in one script must use the same number of devices.

    Args:
        model: The name of a model, a :class:`ModelConfig`, or any module. A module's ``forward(input_ids, labels)``
            returns ``(loss_sum, n_tokens)`` as :class:`GPT`'s does, or its ``forward(input_ids)`` returns logits
            (B, T, vocabulary) or an object with ``.logits``. A module is trained in place, or sharded in place by FSDP;
            the returned ``checkpoint`` has the trained weights. All ranks start from rank 0's weights.
        dataset: A :class:`~toolkit.data.DataModule`, a map-style dataset (``len()`` and ``[index]``; shuffled), an
            iterable (read in order, restarted at its end), or a torch DataLoader. An item is a 1-D tensor of T + 1
            tokens, or ``{"input_ids": (T,), "labels": (T,)}`` or a tuple of both, where ``labels[t]`` is the token that
            follows ``input_ids[t]``, or -100 for no loss. ``dataset[i]`` must not change. An iterable must yield the
            same items on every rank; each rank takes a different subset. A DataLoader yields its rank's batches, of any
            size; their rows are regrouped into micro-batches.
        val_dataset: A map-style validation dataset (``len()`` and ``[index]``).
        optimizer: A subclass of torch.optim.Optimizer, its name, or the options of ``--optimizer`` as a dictionary or
            :class:`~toolkit.config.OptimizerArgs`; its ``"name"`` may be a class.
        block_classes: Classes (or their names) of a user-provided module's blocks. Each block is sharded and compiled
            separately. Default: the classes in the module's longest ``nn.ModuleList``.
        num_workers: Number of processes that read ``dataset``; 0 reads in the training process. Not for iterables.
        allow_duplicate_data: Allow a DataLoader to give the same samples to several ranks.
        callbacks: Instances of :class:`toolkit.Callback`.
        options: The options of ``toolkit pretrain`` by name; groups are dictionaries or the classes of
            :mod:`toolkit.config`: ``train={"max_steps": 100}, devices=2, strategy="fsdp", out_dir="out/mine"``.

    Raises:
        UserError: invalid arguments; nothing has been written.
        GuardError, StoppedBySignalError, StoppedByFileError, PeerLostError: as on the command line, see
            :mod:`toolkit.errors`.
        SystemExit: on the other ranks, if rank 0 raises one of these.
    """
    args = read_run_args(
        "pretrain", options, model, dataset, val_dataset, optimizer, block_classes, num_workers, allow_duplicate_data
    )
    return run_from_python(args, callbacks, run_training)


@names_arguments()
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
    """Finetune a checkpoint as ``toolkit finetune_full`` does, or with ``lora`` as ``toolkit finetune_lora`` does.

    Args:
        checkpoint_dir: Checkpoint of the initial model, or of the adapters' base model.
        dataset: A :class:`~toolkit.data.DataModule`, such as ``toolkit.data.JSON(json_path="questions.jsonl")``, or
            tokenized rows as in :func:`train`. Tokenized rows need no tokenizer in the folder.
        lora: Train low-rank adapters (``lora_r`` and further options); otherwise all weights.
        val_dataset, optimizer, num_workers, allow_duplicate_data, callbacks: See :func:`train`.
        options: The options of the command by name. A group is a dictionary, or an object of :mod:`toolkit.config`,
            whose defaults then replace the command's.

    Raises:
        See :func:`train`.
    """
    if dataset is None and "data" not in options:
        raise UserError("dataset: must be a DataModule or rows of tokens")
    args = read_run_args(
        "finetune_lora" if lora else "finetune_full",
        options | {"checkpoint_dir": checkpoint_dir},
        dataset=dataset,
        val_dataset=val_dataset,
        optimizer=optimizer,
        num_workers=num_workers,
        allow_duplicate_data=allow_duplicate_data,
    )
    return run_from_python(args, callbacks, run_training)
