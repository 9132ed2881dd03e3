"""Evaluate a checkpoint on a data module, as validation in training does, or on lm-eval tasks."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from toolkit.checkpoints.find import is_hf_folder
from toolkit.checkpoints.folder import HYPERPARAMETERS, find_model, read_model_config
from toolkit.checkpoints.hf.sums import require_intact
from toolkit.config import none_if_auto
from toolkit.config.classes import class_names, find_class
from toolkit.config.command import as_mapping, parse_object
from toolkit.data import DataModule, Mixture, PythonStdlib
from toolkit.data.base import choose_seq_length, is_ragged, row_count
from toolkit.data.batch import Batch, choose_padding
from toolkit.data.chat.sources import tokenizer_template
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import choose_attention_kernels
from toolkit.distributed.fabric import single_device_fabric
from toolkit.errors import UserError, notice, require_option
from toolkit.extension import is_known, load_registered, missing_message, split_names
from toolkit.inference.chat import find_template
from toolkit.inference.load import load_quantized
from toolkit.inference.text import require_embedded
from toolkit.io.safe_parse import read_yaml
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.objectives import NextToken, Objective
from toolkit.planning.data import option_to_trust, row_options
from toolkit.training.hyperparameters import keep_old_ends
from toolkit.training.validate import batches_by_source, validate
from toolkit_metric.answerer import Answerer
from toolkit_metric.answers import answer_prompts, measure_answers, set_up_metrics
from toolkit_metric.options import EvaluateOptions, RunData
from toolkit_metric.tasks import find_tasks, load_lm, open_hf_folder, require_lm_eval, run_tasks


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint to evaluate on one device."""

    options: EvaluateOptions
    folder: Path
    fabric: Fabric
    tokenizer: Tokenizer | None

    @property
    def precision(self) -> str:
        return str(self.fabric.strategy.precision.precision)

    def load_model(self) -> GPT:
        """Load the model, with its adapters unmerged."""
        dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float32
        quantize = self.options.quantize
        is_supported = quantize is None or self.precision != "16-mixed"
        require_option(is_supported, "precision", self.precision, f"is not supported with --quantize {quantize}")
        return load_quantized(self.folder, quantize, self.fabric.device, dtype, self.options.base_checkpoint_dir)


def open_checkpoint(options: EvaluateOptions) -> EvaluatedModel:
    """Find and verify a checkpoint for evaluation; for tasks, also a Hugging Face folder."""
    folder = Path(options.checkpoint_dir)
    if options.tasks is not None and is_hf_folder(folder):
        for name in ("base_checkpoint_dir", "quantize"):
            value = getattr(options, name)
            require_option(value is None, name, value, f"has no effect on a Hugging Face folder, {folder}; remove it")
        for line in require_intact(folder, "checkpoint_dir") if options.verify_checkpoint else ():
            notice(line)
    else:
        # hyperparameters.yaml must match its checksum, because it names the data
        base_dir, verify = options.base_checkpoint_dir, options.verify_checkpoint
        folder = find_model(options.checkpoint_dir, base_dir, verify, editable=())
    fabric = single_device_fabric(options.accelerator, options.precision)
    choose_attention_kernels(fixed_shapes=False, has_masks=True)
    tokenizer = None
    if options.tokenizer_dir is not None:
        tokenizer = Tokenizer.load(options.tokenizer_dir, report=notice)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder, flag="checkpoint_dir")
    return EvaluatedModel(options, folder, fabric, tokenizer)


def evaluate(checkpoint: EvaluatedModel) -> dict[str, Any]:
    """Return the data's name, loss (nats per token), perplexity, bits_per_byte, sequences and tokens.

    Without a tokenizer there are no bits per byte.
    """
    options, data, split = checkpoint.options, checkpoint.options.data, checkpoint.options.split
    length, size = none_if_auto(options.max_seq_length), options.micro_batch_size
    if isinstance(data, RunData):
        data, of_run = data_of_run(checkpoint.folder, trust=options.trust_checkpoint_data)
        length = length or of_run
    else:
        data = data.as_trained(checkpoint.folder)
    native = checkpoint.load_model()
    config, block_size = native.config, native.config.block_size
    objective = objective_of_head(config, data)
    length = choose_seq_length(data, length, "max_seq_length")
    length = length or block_size
    if not 0 < length <= block_size:
        raise UserError(f"--max_seq_length {length}: must be from 1 to {block_size}, the model's context length")
    of_rows = row_options(objective, config)
    prepared = data.prepare(tokenizer=checkpoint.tokenizer, max_seq_length=length, report=notice, **of_rows)
    rows = prepared.val if split == "val" else prepared.train
    count = row_count(rows)
    if count is None:
        raise UserError(f"--split {split}: the number of rows of this data is unknown; use --split val")
    if split == "train" and not getattr(rows, "is_dense", True):  # of a mixture
        raise UserError("--split train: is not supported with data that defines its sample order; use --split val")
    if rows is None or not count:
        raise UserError(
            f"--split {split}: this data has no such split; set --data.val_split_fraction (for text "
            "--data.val_fraction), or use --split train"
        )
    sources = (prepared.val_sources if split == "val" else {}) or {"": rows}
    padding = choose_padding(checkpoint.fabric.device.type, is_ragged(rows), block_size)
    limit = None if options.eval.max_iters is None else options.eval.max_iters * size
    batches = batches_by_source(
        sources, limit, micro_batch_size=size, rank=0, world_size=1, padding=padding, count=objective.count,
        added_bos=prepared.added_bos,
    )  # fmt: skip
    source = "--data" if prepared.tokenizer is None else prepared.tokenizer.name
    read = Counter(sequences=0, tokens=0)
    checked = {name: _embedded(one, config.padded_vocab_size, source, read) for name, one in batches.items()}
    token_bytes = prepared.tokenizer.token_bytes() if prepared.tokenizer is not None else None
    model = checkpoint.fabric.setup(native)
    metrics = validate(checkpoint.fabric, objective, model, checked, token_bytes)
    if not metrics:
        raise UserError(f"--data {type(data).__name__}: has no tokens with loss; give --eval.metric for answers")
    names = {"val_loss": "loss", "val_ppl": "perplexity", "val_bpb": "bits_per_byte"}
    named = {names.get(name, name.removeprefix("val_")): value for name, value in metrics.items()}
    return {"data": f"{type(data).__name__}, {split}"} | named | read


def evaluate_answers(checkpoint: EvaluatedModel) -> dict[str, Any]:
    """Return the metrics of ``--eval.metric``, as a validation of a run has them, and the number of prompts."""
    options, data, tokenizer, val = checkpoint.options, checkpoint.options.data, checkpoint.tokenizer, None
    path, fabric = options.eval.metric_data, checkpoint.fabric
    length = none_if_auto(options.max_seq_length)
    if tokenizer is None:
        raise UserError(f"--eval.metric {options.eval.metric}: needs a tokenizer; specify --tokenizer_dir")
    if isinstance(data, RunData) and (path is None or (checkpoint.folder / HYPERPARAMETERS).is_file()):
        data, of_run = data_of_run(checkpoint.folder, trust=options.trust_checkpoint_data or path is not None)
        length = length or of_run
    config = read_model_config(checkpoint.folder)
    if path is None and data.has_answers:
        length = choose_seq_length(data, length, "max_seq_length") or config.block_size
        prepared = data.prepare(tokenizer=tokenizer, max_seq_length=length, report=notice)
        val, tokenizer = prepared.val, prepared.tokenizer or tokenizer
    with ExitStack() as stack:
        setup, processes = set_up_metrics(options.eval, data, val, tokenizer, config.block_size, notice, stack)
        padding = choose_padding(fabric.device.type, True, config.block_size)
        answerer = Answerer(checkpoint.load_model().eval(), fabric.device, padding=padding)
        with fabric.autocast():
            answers = answer_prompts(setup, answerer, tokenizer, options.eval.metric_new_tokens)
        metrics, _ = measure_answers(setup, processes, *answers)
    return {"data": path or f"{type(data).__name__}, val"} | metrics | {"prompts": len(setup.prompts)}


def objective_of_head(config: ModelConfig, data: DataModule) -> Objective:
    """Return what a model is evaluated by: as its head was trained, or as a language model."""
    if config.head is None:
        if data.content in ("preferences", "labels"):
            raise UserError(
                f"--data {type(data).__name__}: evaluate needs answers, not preferences or labels; give other --data, "
                "or --tasks"
            )
        return NextToken()
    objective: Objective = load_registered("heads", config.head)()
    content, needed = ("labels", "Classification") if objective.row_kind == "labeled" else ("preferences", "Preference")
    if data.content != content:
        raise UserError(f"--data {type(data).__name__}: the model has a {config.head} head; use --data {needed}")
    return objective


def _embedded(batches: Iterable[Batch], n_embeddings: int, source: str, read: Counter[str]) -> Iterator[Batch]:
    """Yield the batches and count rows and tokens in ``read``. Raises UserError for a token without an embedding.

    The check is needed because not all token files store their largest token.
    """
    for batch in batches:
        require_embedded([int(batch.input_ids.max()), int(batch.labels.max())], n_embeddings, source)
        read.update(sequences=sum(i >= 0 for i in batch.ids), tokens=batch.n_inputs)
        yield batch


def data_of_run(folder: Path, trust: bool) -> tuple[DataModule, int | None]:
    """Read the data module and tokens per sequence of a checkpoint's run from hyperparameters.yaml.

    Falls back to PythonStdlib, with a notice, if the file or its data option is missing.
    """
    path = folder / HYPERPARAMETERS
    try:
        values = read_yaml(path)
        name, options, length = values["data"]["class_path"], values["data"]["init_args"], None
        cls, extensions = find_class(DataModule, name), split_names(values.get("extensions"))
        length = none_if_auto(values["train"]["max_seq_length"])
        if length is not None and type(length) is not int:
            raise TypeError
    except (OSError, ValueError, TypeError, KeyError):
        cls, extensions = None, []
    if cls is None:
        for missing in filter(lambda extension: not is_known(extension), extensions):
            raise UserError(f"{path}: data {name}: {missing_message(missing)}; or give --data")
        notice(f"{path} does not name the training data: using PythonStdlib")
        return PythonStdlib(), None
    try:
        if cls is Mixture:
            _require_known_sources(options)
        data = cls(**parse_object(cls, as_mapping("init_args", options)))
        if "'add_bos'" not in repr(options):  # written by a version without this option
            keep_old_ends(data)
    except (UserError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: data.{error}; give --data") from error
    if not trust and (option := option_to_trust(data)) is not None:
        raise UserError(
            f"{path}: names data.{option}: if you trust the author of the checkpoint, add "
            "--trust_checkpoint_data true; otherwise set --data"
        )
    return data, length


def _require_known_sources(options: dict[str, Any]) -> None:
    """Reject mixture sources that are not classes of toolkit or an extension, because importing them runs code."""
    for name, source in options["sources"].items():
        if (path := source["data"]["class_path"]) not in class_names(DataModule) or path == "Mixture":
            raise UserError(f"sources.{name}: {path} is not a data module of toolkit")


def evaluate_tasks(checkpoint: EvaluatedModel) -> dict[str, Any]:
    """Return the results by task, and the evaluation settings, see :mod:`toolkit_metric.tasks`."""
    options, tasks = checkpoint.options, str(checkpoint.options.tasks)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError(f"--tasks {tasks!r}: must be task names, separated by commas")
    require_lm_eval(tasks)
    if checkpoint.tokenizer is None:
        raise UserError(f"--tasks {tasks}: {checkpoint.folder} has no tokenizer.json; give --tokenizer_dir")
    template = None
    if options.apply_chat_template is not False:
        try:
            template = find_template(checkpoint.tokenizer)
        except UserError:
            if options.apply_chat_template is True and tokenizer_template(checkpoint.tokenizer) is None:
                hint = "remove the option, or add chat_template.jinja to the folder"
                raise UserError(
                    f"--apply_chat_template true: {checkpoint.folder} has no chat template; {hint}"
                ) from None
            if options.apply_chat_template is True:
                raise
    manager = find_tasks(names, options.include_path)
    device, precision = checkpoint.fabric.device, checkpoint.precision
    with open_hf_folder(
        checkpoint.folder, tasks=tasks, base_checkpoint_dir=options.base_checkpoint_dir, quantize=options.quantize,
    ) as (folder, max_length):  # fmt: skip
        lm = load_lm(
            folder, tasks=tasks, tokenizer_dir=options.tokenizer_dir, tokenizer_name=checkpoint.tokenizer.name,
            max_length=max_length, batch_size=options.micro_batch_size, device=device, precision=precision,
        )  # fmt: skip
        results, directions = run_tasks(
            lm, names, manager, num_fewshot=none_if_auto(options.num_fewshot), limit=options.limit,
            apply_chat_template=template is not None,
        )  # fmt: skip
    settings = {
        "checkpoint_dir": str(checkpoint.folder),
        "apply_chat_template": template is not None,
        "chat_template": None if template is None else template.name,
        "limit": options.limit,
        "precision": precision,
        "device": str(device),
        "lm_eval_version": version("lm_eval"),
    }
    return {"tasks": results, "higher_is_better": directions, "settings": settings}
