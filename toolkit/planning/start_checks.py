"""Check a run's options without torch, which takes seconds to import."""

import glob
import importlib.util
import math
from pathlib import Path

from toolkit.checkpoints.find import CONFIG, read_settings
from toolkit.checkpoints.remote.access import check_out_dir, require_storage
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.config import AUTO, ProfilerArgs
from toolkit.config.classes import has_short_name
from toolkit.data.base import DataModule, LabelSet
from toolkit.data.chat.sources import require_style
from toolkit.distributed.launchers import is_launched
from toolkit.distributed.mesh import data_devices
from toolkit.distributed.world import detect_world
from toolkit.dotted_paths import add_cwd_to_path
from toolkit.errors import UserError, did_you_mean, require_bitsandbytes, require_option, require_package
from toolkit.extension import all_extensions, missing_built_in, registered, require_single, run_checks
from toolkit.io.paths import is_url
from toolkit.models.families import DEFAULT_MODEL, get_config
from toolkit.optim import HYBRID_OPTIMIZERS, PACKAGES, TORCH_OPTIMIZERS
from toolkit.planning.batch_plan import UNKNOWN_BATCH, BatchPlan, plan_batch
from toolkit.planning.best_metric import check_best_by
from toolkit.planning.compatibility import require_compatible
from toolkit.planning.facts import Facts
from toolkit.planning.own_tokenizer import download_hint, own_repository
from toolkit.planning.run_args import RunArgs
from toolkit.ui.loggers import check_loggers


def check_options(args: RunArgs) -> None:
    """Check the options that depend on neither devices nor files."""
    if not args.out_dir:
        raise UserError("--out_dir '': must not be empty; give a folder")
    check_out_dir(args.out_dir, args.staging_dir)
    implemented = {name for _, extension in all_extensions() for name in extension.implements}
    for name, value in (("eval.metric", args.eval.metric), ("eval.tasks", args.eval.tasks)):
        require_option(value is None or name in implemented, name, value, missing_built_in())
    ratio = args.loraplus_lr_ratio
    require_option(0 < ratio < math.inf, "loraplus_lr_ratio", ratio, "must be greater than zero")
    batch = _known_batch(args)
    require_compatible(
        Facts(
            args,
            precision="" if args.precision == AUTO else args.precision,
            world_size=0 if batch is None else batch.data_parallel * args.model_parallel.world_size,
            batch=UNKNOWN_BATCH if batch is None or args.train.micro_batch_size == AUTO else batch,
        )
    )
    if args.base_dir is None and args.module is None:
        get_config(args.model_name or DEFAULT_MODEL).override(args.model_config)


def check_start(args: RunArgs, *, writes: bool = True, has_callbacks: bool = False) -> None:
    """Check processes, packages and files before a run starts, and with ``writes`` also --out_dir and --resume.

    ``has_callbacks``: the run has callbacks in addition to --callbacks.

    Skips files in a process that a launcher started, because rank 0 may already be writing.
    """
    if args.dry_run:
        require_single("planner", "--dry_run true")
    else:
        detect_world(args.devices, args.num_nodes, None)
    check_loggers(args.logger_name, args.log)
    if args.quantize is not None:
        require_bitsandbytes(f"--quantize {args.quantize}")
    if args.optimizer_class is None:
        _check_optimizer_name(args.optimizer.name)
    _check_callbacks(args.callbacks)
    if args.profile and args.resume is False:
        require_profiled_steps(args.profiler, args.train.max_steps)
    train, data = args.train, args.data
    has_limit = train.max_steps is not None or train.max_tokens is not None
    if train.epochs is not None and not has_limit and data.is_streamed:
        raise unknown_rows_error(train.epochs)
    if args.initial_checkpoint_dir is None and args.tokenizer_dir is None and data.has_answers:
        repository = own_repository(args)
        hint = "specify --tokenizer_dir" if repository is None else download_hint(repository)
        raise UserError(f"--data {type(data).__name__}: needs the tokenizer of the model; {hint}")
    if is_launched():
        return
    has_callbacks = has_callbacks or bool(args.callbacks)
    if args.eval.metric is None:
        check_best_by(args.eval, args.objective, has_callbacks)
    run_checks("check_start", args, has_callbacks)
    quantize = "" if args.quantize is None else f" --quantize {args.quantize}"
    check_files(data, f"toolkit {args.command} {args.initial_checkpoint_dir}{quantize}")
    if writes and isinstance(args.resume, str) and is_url(args.resume):
        require_storage(args.resume, "--resume")
    elif writes and not is_url(args.out_dir):
        resolve_resume(args.resume, Path(args.out_dir))
    model = {} if args.base_dir is None else read_settings(args.base_dir, CONFIG)
    problem, labels = model.get("problem_type"), model.get("labels")
    data.check_first_rows(args.objective.row_kind, LabelSet(labels, problem) if problem and labels else None)


def unknown_rows_error(epochs: float) -> UserError:
    return UserError(
        f"--train.epochs {epochs:g}: the number of rows of this data is unknown; set --train.max_tokens or "
        "--train.max_steps instead"
    )


def require_profiled_steps(profiler: ProfilerArgs, total_steps: int | None) -> None:
    """Check that a new run of ``total_steps`` steps (None: unknown) reaches a step that ``--profile`` records."""
    before = profiler.wait + profiler.warmup
    if total_steps is not None and total_steps <= before:
        raise UserError(
            f"--profiler.wait {profiler.wait}: with --profiler.warmup {profiler.warmup}, profiling begins after step "
            f"{before}, but the run has only {total_steps}; lower them, or train longer"
        )


def _known_batch(args: RunArgs) -> BatchPlan | None:
    """Return the batch plan; None if it depends on detected devices or on memory."""
    train = args.train
    micro, nodes = (1 if value == AUTO else value for value in (train.micro_batch_size, args.num_nodes))
    devices = 1 if (args.devices, args.accelerator) == (AUTO, "cpu") else args.devices
    if is_launched() and AUTO in (args.devices, args.num_nodes):
        return None
    if not isinstance(devices, int) or devices < 1 or nodes < 1 or args.preset != "balanced":
        return None
    data_devices(args.model_parallel, devices, nodes)  # checks that the sizes divide the devices
    ranks = args.model_parallel.world_size
    return plan_batch(train.global_batch_size, micro, devices, nodes, ranks, args.objective.answers)


def _check_optimizer_name(name: str) -> None:
    """Check an optimizer name without importing torch; a newer torch may have other names than these."""
    if name in PACKAGES:
        require_package(f"--optimizer.name {name}", *PACKAGES[name])
    names = {*TORCH_OPTIMIZERS, *HYBRID_OPTIMIZERS, *registered("optimizers")}
    in_python = "; a class of another package is given in Python, as toolkit.train(optimizer=CLASS), or by an extension"
    hint = in_python if "." in name else did_you_mean(name, names)
    if name.lower() not in map(str.lower, names) and hint:
        raise UserError(f"--optimizer.name {name}: no such optimizer{hint}")


def _check_callbacks(callbacks: object) -> None:
    """Check that the packages of callbacks exist, without importing them."""
    for path in callbacks.split(",") if isinstance(callbacks, str) else ():
        add_cwd_to_path()
        if "." in path and importlib.util.find_spec(path.strip().partition(".")[0]) is None:
            raise UserError(f"--callbacks {path}: no such class in the current folder or an installed package")


def check_files(data: DataModule, command: str) -> None:
    """Check the paths of a data module from toolkit or an extension. ``command`` is for a message."""
    if not has_short_name(type(data), DataModule):
        return
    if getattr(data, "prompt_style", None):
        require_style(data.prompt_style)  # type: ignore[attr-defined]
    for name, value in vars(data).items():
        if name == "json_path" and not value and not getattr(data, "repo_id", None):
            raise UserError(
                f"--data.json_path: must be set: `{command} --data JSON --data.json_path FILE`, or "
                f"`{command} --data Alpaca2k` for a first try"
            )
        if not name.endswith("_path") or not value or name in data.takes_urls:
            continue  # URLs are checked when they are listed
        path = Path(value).expanduser()
        if glob.has_magic(str(value)) and not path.exists():
            if not data.takes_patterns:
                raise UserError(f"--data.{name} {value}: must be a file, or a folder with train and val; not a pattern")
            if not glob.glob(str(path), recursive=True):
                raise UserError(f"--data.{name} {value}: no file matches; check the pattern")
        elif not path.exists():
            raise UserError(f"--data.{name} {value}: no such file or folder")
        elif path.is_file() and not path.stat().st_size:
            raise UserError(f"--data.{name} {value}: the file is empty; give a file with data")
