"""``--profile``: record a trace, the slowest operators and a time breakdown of a few steps on every rank."""

import os
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import profiler
from torch.autograd import DeviceType

from toolkit.config import ProfilerArgs
from toolkit.distributed import ranks
from toolkit.escape import csv_writer
from toolkit.io.safe_parse import no_follow
from toolkit.private_torch import dump_memory_history, record_memory_history
from toolkit.training.run import Callback, Metrics, Run
from toolkit.training.time_breakdown import Shares, read_shares

MAX_OPERATORS, MAX_RANKS = 10, 8
SECONDS_TO_WRITE = 30 * 60.0  # writing the trace of a large model takes minutes


class Profile(Callback):
    """Profiles the scheduled steps of this launch into ``out_dir/profile/step-FIRST/``.

    Every rank writes ``rank-0000.json.gz`` (a Chrome trace) and ``rank-0000.txt`` (operators). Rank 0 also writes
    ``shares.csv``, see :class:`toolkit.training.time_breakdown.Shares`. The run continues if these cannot be written.

    On CUDA allocations are also recorded. A process that runs out of memory writes them to
    ``memory-rank-0000.pickle`` (not tried on CUDA).
    """

    def __init__(self, args: ProfilerArgs) -> None:
        self.args = args
        self._stack = ExitStack()
        self._profiler: profiler.profile | None = None
        self._operators: list[str] = []
        self._result: Shares | str = "nothing was recorded"
        """This rank's time breakdown, or the reason why there is none."""

    # ---- hooks

    def on_train_start(self, trainer: Run) -> None:
        args, on_cuda = self.args, trainer.fabric.device.type == "cuda"
        self._first = trainer.progress.step + args.wait + args.warmup + 1  # first active step
        self._last = self._first + args.active - 1
        self._on_cuda = on_cuda
        self.folder = trainer.out_dir / "profile" / f"step-{self._first:08d}"
        if on_cuda:
            record_memory_history()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints at start and stop
        activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_cuda else [])]
        self._profiler = self._stack.enter_context(
            profiler.profile(
                activities=activities,
                schedule=profiler.schedule(wait=args.wait, warmup=args.warmup, active=args.active, repeat=1),
                on_trace_ready=lambda _: self._write(trainer.progress.step, trainer.garbage.share),
                record_shapes=args.record_shapes,
                with_stack=args.with_stack,
            )
        )

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        if self._profiler is None:
            return
        if trainer.progress.step < self._last:
            self._profiler.step()
        else:
            with ranks.extended_timeout(max(SECONDS_TO_WRITE, ranks.timeout()), ranks.timeout()):
                self._profiler.step()
                self._end(trainer)
                self._report(trainer)

    def on_train_end(self, trainer: Run) -> None:
        if self._profiler is not None:
            self._end(trainer)
            if trainer.progress.step >= self._first:  # the same on every rank
                self._report(trainer)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        if self._profiler is None:
            return
        if self._on_cuda and isinstance(error, torch.OutOfMemoryError):
            with suppress(OSError):
                path = self._path("memory-rank-", "pickle")
                dump_memory_history(path)
                ranks.rank_print(f"allocations before it ran out of memory: {path}; open it at pytorch.org/memory_viz")
        self._end(trainer)

    # ---- parts

    def _end(self, trainer: Run) -> None:
        """Stop profiling. Recorded steps are written even if the run ends before the last active step."""
        step = trainer.progress.step
        self._stack.close()
        self._profiler = None
        if self._on_cuda:
            record_memory_history(False)
        if step < self._last:
            n = max(0, step - self._first + 1)
            trainer.display.message(
                f"--profile: the run ended at step {step}, before the profiled range (steps {self._first} to "
                f"{self._last}) was complete; {f'the trace has {n} of them' if n else 'there is no trace'}. Lower "
                "--profiler.wait, --profiler.warmup or --profiler.active, or train longer"
            )

    def _path(self, name: str, suffix: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}{ranks.global_rank():04d}.{suffix}"

    def _write(self, step: int, garbage_collection: float) -> None:
        """Write this rank's files. ``step`` is the last completed step; see Shares for ``garbage_collection``."""
        assert self._profiler is not None
        if (n_steps := min(step, self._last) - self._first + 1) < 1:
            return  # the run ended before the first active step
        try:
            trace = self._path("rank-", "json.gz")
            self._profiler.export_chrome_trace(str(trace))
            averages = self._profiler.key_averages(group_by_input_shape=self.args.record_shapes)
            table = averages.table(sort_by=self._self_time, row_limit=100, max_name_column_width=80)
            self._path("rank-", "txt").write_text(table)
            self._operators = format_operators(averages, self._self_time, n_steps)
            self._result = read_shares(trace, n_steps, garbage_collection)
        except Exception as error:  # a profiling failure must not end the run
            self._result = f"{type(error).__name__}: {error}"

    @property
    def _self_time(self) -> str:
        return "self_device_time_total" if self._on_cuda else "self_cpu_time_total"

    def _report(self, trainer: Run) -> None:
        """Print the time breakdown of all ranks and rank 0's slowest operators; write shares.csv. Collective."""
        results = ranks.all_gather_object(self._result)
        shares = {rank: result for rank, result in enumerate(results) if isinstance(result, Shares)}
        last = min(trainer.progress.step, self._last)
        lines = [f"--profile: rank {n} has no trace: {why}" for n, why in enumerate(results) if n not in shares]
        if shares:
            lines.append(
                f"Profile of steps {self._first} to {last} in {self.folder}; the traces open in ui.perfetto.dev"
            )
            lines += format_shares(shares) + self._operators
        for line in lines:
            trainer.display.message(line)
        if ranks.global_rank() == 0 and shares:
            with suppress(OSError), open(self.folder / "shares.csv", "w", newline="", opener=no_follow) as file:
                writer = csv_writer(file)
                writer.writerow(["rank", *(f.name for f in fields(Shares))])
                writer.writerows([rank, *asdict(each).values()] for rank, each in shares.items())


def format_shares(shares_by_rank: dict[int, Shares]) -> list[str]:
    """Format the time breakdown by rank as table lines. With many ranks, show the ranks that communicate least."""
    least = sorted(shares_by_rank, key=lambda rank: shares_by_rank[rank].communication)[:MAX_RANKS]
    columns = [f.name for f in fields(Shares)]
    headings = [name.replace("_", " ") for name in columns[:-1]]
    lines = ["  ".join(["rank", *headings, "s/step"])]
    for rank in sorted(least):
        values: dict[str, Any] = asdict(shares_by_rank[rank])
        cells = [f"{values[name]:>{len(head)}.1%}" for name, head in zip(columns, headings, strict=False)]
        lines.append("  ".join([f"{rank:>4}", *cells, f"{values['step_s']:>6.3g}"]))
    if len(least) < len(shares_by_rank):
        lines.append(f"(the {MAX_RANKS} of {len(shares_by_rank)} ranks with the least communication)")
    return lines


def format_operators(averages: Any, self_time: str, n_steps: int) -> list[str]:
    """Format the operators with the most self time as table lines. ``self_time`` names the attribute to use."""
    operators = [a for a in averages if a.device_type == DeviceType.CPU and not a.is_user_annotation]
    total = sum(getattr(a, self_time) for a in operators) or 1
    operators.sort(key=lambda a: -getattr(a, self_time))
    lines = [f"{'calls/step':>10}  {'ms/step':>9}  {'share':>6}  operator"]
    for a in operators[:MAX_OPERATORS]:
        self_us = getattr(a, self_time)
        lines.append(f"{a.count / n_steps:>10.4g}  {self_us / n_steps / 1e3:>9.4g}  {self_us / total:>6.1%}  {a.key}")
    return lines
