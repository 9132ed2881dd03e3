"""Print steps, validations, checkpoints and the final summary on rank 0's standard output."""

from pathlib import Path

from toolkit.checkpoints.store import FINAL
from toolkit.data.base import DataModule
from toolkit.data.chat.sources import tokenizer_template
from toolkit.distributed.device import precision_hint
from toolkit.errors import StoppedByFileError, one_line
from toolkit.escape import shell_word
from toolkit.models.families import export_error
from toolkit.planning.best_metric import VAL
from toolkit.planning.data import describe_stand_in, option_to_trust
from toolkit.training.run import Callback, Metrics, Run, late
from toolkit.ui.events import REPORT


class Console(Callback):
    """Reports to the trainer's display, see :mod:`toolkit.ui.progress`."""

    def on_train_start(self, trainer: Run) -> None:
        where = {"step": trainer.progress.step, "total_steps": trainer.display.total_steps, "out_dir": trainer.out_dir}
        trainer.display.event("start", command=trainer.args.command, **where)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        message = one_line(error) or type(error).__name__
        status = "stopped" if isinstance(error, StoppedByFileError) else "failed"
        trainer.display.event("end", status=status, step=trainer.progress.step, error=message)

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        step = trainer.progress.step
        if "loss" in metrics:
            trainer.display.step(step, {k: v for k, v in metrics.items() if not k.startswith(VAL)})
        if validation := {k: v for k, v in metrics.items() if k.startswith(VAL)}:
            trainer.display.validation(step, validation)

    def on_checkpoint_saved(self, trainer: Run, folder: Path) -> None:
        trainer.display.checkpoint(trainer.progress.step, trainer.address(folder))

    def on_train_end(self, trainer: Run) -> None:
        progress, display = trainer.progress, trainer.display
        if trainer.skipped_steps:
            display.message(
                f"skipped {trainer.skipped_steps} steps{' (GradScaler)' * (trainer.args.train.skip_spikes is None)}"
            )
        display.message(
            f"finished after {progress.step:,} steps and {progress.tokens:,} tokens; model in {trainer.place}/{FINAL}"
        )
        if (note := describe_stand_in(trainer.config, trainer.data)) is not None:
            display.message(note)
        if (trainer.out_dir / REPORT).exists():
            display.message(f"report: {trainer.place}/{REPORT}")
        for command in next_commands(trainer):
            display.message(f"  {command}")
        hint = precision_hint(trainer.config.device, trainer.config.precision)
        if hint is not None and trainer.resume_from is None:
            display.message(f"  {hint}")
        counts = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
        display.event("end", status="finished", **counts, model=f"{trainer.place}/{FINAL}")


def next_commands(trainer: Run) -> list[str]:
    """Return commands to run next with the trained model; empty for a custom nn.Module."""
    config, data = trainer.spec.config, trainer.data
    if config is None or not trainer.args.is_repeatable:
        return []
    hf_dir = trainer.out_dir / "hf" if trainer.remote is None else Path("out", "hf")
    final, hf = (shell_word(str(path)) for path in (f"{trainer.place}/{FINAL}", hf_dir))
    merge = "" if trainer.base is None else " --merge true"
    trust = "" if option_to_trust(trainer.args.data) is None else " --trust_checkpoint_data true"
    has_template = data.tokenizer is not None and tokenizer_template(data.tokenizer) is not None
    is_chat = has_template and trainer.args.data.has_answers
    is_scored = config.head is not None
    is_evaluated = trainer.args.objective.is_likelihood or is_scored
    commands = {
        f"toolkit chat {final}": is_chat and not is_scored,
        f'toolkit generate {final} --prompt "..."': data.tokenizer is not None and not is_chat and not is_scored,
        f"toolkit classify {final} --texts {texts_of(trainer.args.data)}": is_scored,
        f"toolkit evaluate {final}{trust}": data.val is not None and is_evaluated,
        f"toolkit convert_to_hf {final} {hf}{merge}": export_error(config) is None,
    }
    return [command for command, is_possible in commands.items() if is_possible]


def texts_of(data: DataModule) -> str:
    """Return the file of a run for `toolkit classify`, which knows its columns; FILE for other data."""
    path = getattr(data, "path", None) if data.content == "labels" else None
    return shell_word(path) if path is not None and Path(path).is_file() else "FILE"
