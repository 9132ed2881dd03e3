"""Run lm-eval tasks on a model, with lm-eval's own adapter of transformers (HFLM)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoints.adapters import has_adapters_only
from toolkit.checkpoints.find import is_hf_folder
from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.hf.export_hf import export_hf, require_transformers
from toolkit.errors import UserError, did_you_mean, notice, one_line, require_option
from toolkit.inference.text import require_embedded
from toolkit.io.tempfiles import sweep, temporary_prefix
from toolkit.models.quantize import Quantize

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

_AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


def require_lm_eval(tasks: str) -> None:
    """Raise UserError if lm-eval, or what its adapter of transformers needs, is not installed."""
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise UserError(f"--tasks {tasks}: {error}; run: pip install 'lm-eval[hf]>=0.4.9.2'") from error


def find_tasks(names: list[str], include_path: str | None) -> TaskManager:
    """Return a task manager that has the tasks, groups or tags. ``include_path`` is a folder with further tasks.

    Index lm-eval's built-in tasks, which takes seconds, only if a name needs them.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise UserError(f"--include_path {include_path}: no such folder; pass a folder with task files")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = "use a task name of lm-eval, or --include_path FOLDER with a task file"
            raise UserError(f"--tasks {name}: no such task{did_you_mean(name, manager.all_tasks) or f'; {hint}'}")
    return manager


@contextmanager
def open_hf_folder(
    folder: Path,
    *,
    tasks: str,
    base_checkpoint_dir: str | None,
    quantize: Quantize | None,
) -> Iterator[tuple[Path, int | None]]:
    """Yield a folder for transformers, and the model's context length if known.

    A Hugging Face folder is used directly. A model folder is exported to a temporary folder, which is deleted at the
    end: unmerged adapters merged in bf16, and also in bf16 instead of 4 bits, both with a notice.

    Args:
        folder: A model folder, or a Hugging Face folder.
        tasks: The value of ``--tasks``, for messages.
        base_checkpoint_dir: Base model of the adapters; by default the path recorded in training.
        quantize: 4-bit format that the user asked for.
    """
    if is_hf_folder(folder):
        yield folder.resolve(), None
        return
    config, dtype, has_adapters = read_model_config(folder), None, has_adapters_only(folder)
    require_transformers(f"--tasks {tasks}", config)
    hint = "the model was trained with --qat.weights, and has quantized weights; remove it"
    require_option(config.qat is None or quantize is None, "quantize", quantize, hint)
    if config.qat is None and (has_adapters or quantize is not None):
        dtype = torch.bfloat16
        quantized = "" if quantize is None else f", not quantized to {quantize}"
        notice(f"--tasks: evaluates an export{' with merged adapters' * has_adapters} in bf16{quantized}")
    sweep(Path(gettempdir()))  # exports of killed processes
    with TemporaryDirectory(prefix=temporary_prefix()) as parent:
        exported = Path(parent) / "hf"
        dense = None if config.qat is None else "dense"
        export_hf(folder, exported, dtype, has_adapters, base_checkpoint_dir, flag="TMPDIR", quantize=dense)
        yield exported, config.block_size


def load_lm(
    folder: Path,
    *,
    tasks: str,
    tokenizer_dir: str | None,
    tokenizer_name: str,
    max_length: int | None,
    batch_size: int,
    device: torch.device,
    precision: str,
) -> HFLM:
    """Load a Hugging Face folder with transformers, as a model for :func:`run_tasks`.

    Raises UserError if transformers cannot load it.

    Args:
        folder: The folder; an absolute path, because lm-eval looks for others on the hub.
        tasks: The value of ``--tasks``, for messages.
        tokenizer_dir: A folder with another tokenizer.
        tokenizer_name: The tokenizer's name in messages.
        max_length: The model's context length; None: as in its config.json.
        batch_size: Sequences per forward pass. With longrope, which uses the factors of the longest row, always 1.
        device: Compute device.
        precision: Fabric's name.
    """
    import transformers
    from lm_eval.models.huggingface import HFLM

    transformers.utils.logging.disable_progress_bar()
    try:
        lm = HFLM(
            str(folder), tokenizer=tokenizer_dir, max_length=max_length, batch_size=batch_size, device=str(device),
            dtype="bfloat16" if precision == "bf16-true" else "float32",
            mixed_precision_dtype=_AUTOCAST.get(precision), softmax_dtype="float32", use_safetensors=True,
        )  # fmt: skip
    except Exception as error:  # any failure to load, such as an unknown architecture
        reason = one_line(error)[:300]
        raise UserError(f"--tasks {tasks}: transformers {transformers.__version__} cannot load it: {reason}") from error
    if "longrope" in str(lm.config):
        lm.batch_size_per_gpu = 1

    def check_ids(embedding: Any, inputs: tuple[torch.Tensor]) -> None:
        require_embedded([int(inputs[0].max())], embedding.num_embeddings, tokenizer_name)

    lm.model.get_input_embeddings().register_forward_pre_hook(check_ids)
    return lm


def run_tasks(
    lm: HFLM,
    names: list[str],
    manager: TaskManager,
    *,
    num_fewshot: int | None,
    limit: float | None,
    apply_chat_template: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, bool]]]:
    """Return metrics with standard errors, num_fewshot and the number of samples, by task or task group; and whether
    the highest value is the best one, of metrics whose direction lm-eval knows.

    Args:
        lm: The model, from :func:`load_lm`.
        names: Names of tasks, groups or tags.
        manager: See :func:`find_tasks`.
        num_fewshot: Number of few-shot examples; None for the task's default. Ignored by tasks whose default is 0.
        limit: Maximum number of questions per task, or a fraction if below 1; None for all.
        apply_chat_template: Whether to use the model's chat template, with the examples as previous turns.
    """
    import datasets
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    evaluator.get_git_commit_hash = lambda: None  # prints "fatal: not a git repository" outside of one
    joined = ",".join(names)
    try:
        with redirect_stdout(sys.stderr):  # tasks may print
            results = evaluator.simple_evaluate(
                lm,
                tasks=names,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"--tasks {joined}: cannot load the dataset: {error}") from error
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        raise UserError(f"--tasks {joined}: executes code written by the model, which is not supported") from error
    except AssertionError as error:
        reason = one_line(error) or f"an answer has no tokens, or more than the model's context length, {lm.max_length}"
        raise UserError(f"--tasks {joined}: {reason}") from error
    for name, shots in results["n-shot"].items():
        if num_fewshot is not None and shots != num_fewshot:
            notice(f"--num_fewshot {num_fewshot}: has no effect on task {name}, which uses {shots}")
    metrics: dict[str, dict[str, Any]] = {}
    directions: dict[str, dict[str, bool]] = {}
    for name, values in results["results"].items():  # acc,none and acc_stderr,none; or another filter than none
        named = {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
        samples = results["n-samples"].get(name, {}).get("effective")
        metrics[name] = {key: value for key, value in named.items() if isinstance(value, int | float)}
        known = {key: results["higher_is_better"].get(name, {}).get(key.partition(",")[0]) for key in named}
        directions[name] = {key: is_higher for key, is_higher in known.items() if is_higher is not None}
        sizes = {"num_fewshot": results["n-shot"].get(name), "samples": samples}
        metrics[name] |= {key: value for key, value in sizes.items() if value is not None}
    return metrics, directions
