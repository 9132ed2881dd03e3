"""The callbacks of a run: built-in ones by its options, and the user's."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import rename_damaged
from toolkit.config import AUTO
from toolkit.data.base import row_count
from toolkit.data.order import SampleOrder
from toolkit.distributed import ranks
from toolkit.distributed.device import peak_flops
from toolkit.distributed.private_lightning import FabricModule
from toolkit.errors import UserError
from toolkit.io.tempfiles import sweep
from toolkit.objectives.base import LOSS, Objective, checked_parts
from toolkit.objectives.inputs import original_module
from toolkit.planning.best_metric import VAL, BestMetric, direction_of
from toolkit.training.callbacks.best import EarlyStopping, KeepBest
from toolkit.training.callbacks.console import Console
from toolkit.training.callbacks.metrics import (
    ExternalLoggers,
    MetricsFile,
    ThroughputMonitor,
)
from toolkit.training.callbacks.mixture import MixtureShares
from toolkit.training.callbacks.registered import make_callbacks
from toolkit.training.callbacks.replicas import ReplicaCheck
from toolkit.training.callbacks.spikes import SkipSpikes
from toolkit.training.callbacks.upload import Upload
from toolkit.training.hyperparameters import resolved_hyperparameters
from toolkit.training.launch import Launch
from toolkit.training.run import Callback
from toolkit.training.throughput import Throughput
from toolkit.ui.loggers import MetricsCSV, make_loggers, rows_crc
from toolkit.ui.progress import metric_names

if TYPE_CHECKING:
    from toolkit.checkpoints.remote.remote_run import RemoteRun
    from toolkit.checkpoints.remote.uploader import Uploader
    from toolkit.training.callbacks.samples import Sampler


def build_callbacks(
    launch: Launch,
    objective: Objective,
    model: FabricModule,
    order: SampleOrder,
    user_callbacks: Sequence[Callback],
    sampler: "Sampler | None",
    stack: ExitStack,
    leaders: list[int],
    added: Mapping[str, list[Callback]],
) -> list[Callback]:
    """Return all callbacks in order: checks, throughput, the user's, outputs, early stopping and best checkpoint.

    ``stack`` holds rank 0's lock on the folder until the run ends. ``leaders`` as in :class:`Checkpointer`. ``added``
    has the callbacks of extensions by place. ``objective`` has its frozen model.
    """
    args = launch.args
    if launch.is_short:
        return [ReplicaCheck(launch.spec), *user_callbacks]
    peak = peak_flops(launch.fabric.device, launch.config.precision)
    throughput = Throughput(launch.flops, peak and peak * ranks.world_size())
    callbacks: list[Callback] = [
        ReplicaCheck(launch.spec),
        ThroughputMonitor(throughput),
        *added["before"],
    ]
    if args.profile:
        from toolkit.training.callbacks.profile import Profile  # large, and few runs use it

        callbacks.append(Profile(args.profiler))
    if args.train.skip_spikes is not None:
        callbacks.append(SkipSpikes(args.train.skip_spikes))
    if args.data.sources_by_name:
        callbacks.append(MixtureShares(order))  # type: ignore[arg-type]  # the order of a mixture
    callbacks += [*user_callbacks, *added["metrics"]]
    columns = [name for callback in callbacks for name in callback.columns]
    directions = {
        name: direction_of(callback.higher_is_better, name)
        for callback in callbacks for name in callback.columns if name.startswith(VAL)
    }  # fmt: skip
    of_data = [f"val_loss_{name}" for name in launch.data.val_sources]
    module = original_module(model)
    of_validation = [part.name for part in checked_parts(objective, module.eval()) if part.name != LOSS]
    parts = {part.name: part.weight for part in checked_parts(objective, module.train()) if part.name != LOSS}
    names_of_parts = [*of_validation, *objective.metric_names(module)]
    of_parts = [f"{VAL}{name}" for name in names_of_parts]
    launch.display.metric_names = metric_names(
        [*columns, *(name for name in of_parts if not parts.get(name.removeprefix(VAL)))]
    )
    columns = [*of_data, *columns, *parts, *of_parts]
    best = BestMetric.from_options(args.eval, objective)
    if args.eval.best_by != AUTO:
        is_likelihood, known = objective.is_likelihood, objective.higher_is_better
        if launch.data.val is not None and row_count(launch.data.val):
            names = [f"{VAL}{objective.best_by}", *of_data, *["val_ppl"] * is_likelihood]
            names += ["val_bpb"] * (is_likelihood and launch.data.tokenizer is not None)
            directions |= dict.fromkeys(names, False)
            directions |= {f"{VAL}{name}": False if parts.get(name) else known.get(name) for name in names_of_parts}
        best = best.among(directions)
    if args.train.keep_best or args.train.patience is not None:
        name = "best/" if args.train.keep_best else "the best one"
        launch.display.message(f"{name} is the checkpoint with {best}; see --eval.best_by and --eval.best_mode")
    wait_reporter = ranks.WaitReporter(f"open {launch.out_dir}", launch.display.message)
    csv = ranks.run_on_rank0(lambda: open_metrics(launch, columns, stack), wait_reporter)
    callbacks += [MetricsFile(csv)] if csv is not None else []
    callbacks += added["outputs"]
    callbacks += ranks.run_on_rank0(lambda: [start_loggers(launch, csv)]) or []
    if launch.remote is not None:
        callbacks.append(start_uploads(launch.remote, launch, stack, leaders))
    if ranks.global_rank() == 0:
        callbacks.append(Console())  # after the uploads, because it prints the final summary
    callbacks += added["after"]
    if sampler is not None:
        callbacks.append(sampler)
    if args.train.patience is not None:
        callbacks.append(EarlyStopping(args.train.patience, best))
    if args.train.keep_best:
        callbacks.append(KeepBest(best))
    return callbacks


def open_metrics(launch: Launch, columns: list[str], stack: ExitStack) -> MetricsCSV:
    """Lock the folder for this run, rename damaged checkpoints, and open metrics.csv. On rank 0."""
    progress, resume_from, out_dir = launch.progress, launch.resume_from, launch.out_dir
    stack.enter_context(exclusive_lock(out_dir))
    sweep(out_dir)
    if resolve_resume(launch.args.resume, out_dir) != next(iter(launch.damaged), resume_from):
        raise UserError(f"--out_dir {out_dir}: another process has just used this folder; start the run again")
    for folder in launch.damaged:  # otherwise it would count as the newest checkpoint, and for --train.keep_last
        launch.display.message(f"renamed {folder} to {rename_damaged(folder).name}; delete it when you do not need it")
    resume_step = None if resume_from is None else progress.step
    path = out_dir / "logs" / "metrics.csv"
    expected = progress.logged_rows if resume_from and resume_from.parent == out_dir else 0
    is_changed = expected and progress.metrics_crc not in (0, rows_crc(path, expected))
    csv = MetricsCSV(path, resume_step, columns)
    if csv.n_resumed < expected or is_changed:
        lost = f"{expected - csv.n_resumed} of" if csv.n_resumed < expected else "some of"
        launch.display.message(f"warning: {path}: {lost} the {expected} rows to step {resume_step} are lost or damaged")
    return csv


def start_loggers(launch: Launch, csv: MetricsCSV | None) -> Callback:
    """Return the callback that logs to the run's loggers. On rank 0."""
    assert csv is not None
    step = None if launch.resume_from is None else launch.progress.step
    values = resolved_hyperparameters(launch.config)
    loggers = make_loggers(launch.args.logger_name, launch.out_dir, launch.args.log, values, step, csv.logged_step)
    return ExternalLoggers(loggers)


def start_uploads(remote: "RemoteRun", launch: Launch, stack: ExitStack, leaders: Sequence[int] = ()) -> Upload:
    """Start to upload to the run's remote folder. Rank 0 must hold the lock on the staging folder.

    ``leaders`` are the ranks that upload the part of a checkpoint on their disk.
    """

    def start() -> "Uploader | None":
        if ranks.global_rank() == 0:
            uploader = remote.start_uploads(launch.args.train.keep_last, launch.display.message)
        elif ranks.global_rank() in leaders:
            uploader = remote.start_part_uploads()
        else:
            return None
        stack.callback(uploader.close)
        return uploader

    return Upload(ranks.call_on_all_ranks(start), launch.args, launch.display)


def finish_run(launch: Launch, stack: ExitStack) -> None:
    """Complete the cleanup, outputs and uploads of a finished run, if an earlier launch could not."""
    display, remote = launch.display, launch.remote
    display.message(f"{launch.resume_from} has reached step {launch.progress.step}: the run is finished, nothing to do")
    if launch.args.dry_run:
        return
    if launch.world.global_rank == 0:
        sweep(launch.out_dir)
    make_callbacks(launch, stack, ["outputs"])
    if remote is not None:
        ranks.run_on_rank0(lambda: stack.enter_context(exclusive_lock(remote.out_dir)))
        start_uploads(remote, launch, stack).finish()
