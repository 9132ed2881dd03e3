"""Numbers for each answer from functions as in ``--eval.metric``, such as rewards."""

import math
import weakref
from collections.abc import Callable, Sequence

from toolkit.errors import UserError
from toolkit_metric.answers import call_metric, try_metric
from toolkit_metric.entries import parse_metrics
from toolkit_metric.process import MetricProcess
from toolkit_metric.prompts import Prompt


class AnswerScores:
    """The functions of an option, in processes that end with this object.

    Args:
        value: Names, see :func:`toolkit_metric.entries.parse_metrics`.
        flag: The option. ``flag_timeout`` has the seconds of a call.
        prompts: For a trial with the references of two.
        report: Receives a line if a function starts slowly.

    Attributes:
        names: Names of the numbers.

    Raises:
        UserError: A function cannot be used.
    """

    def __init__(
        self, value: str, seconds: float, flag: str, prompts: Sequence[Prompt], report: Callable[[str], None]
    ) -> None:
        self._flag, self.names = flag, list[str]()
        self._processes: list[MetricProcess] = []
        for metric in parse_metrics(value, flag):
            process = MetricProcess(metric, seconds, flag)
            weakref.finalize(self, process.close)
            self._processes.append(process)
            if process.traits.needs_log_probs:
                raise UserError(f"{process.entry}: compares choices, and is not supported for answers; use another one")
            names = [*try_metric(process, prompts, report)]
            if twice := sorted({*names} & {*self.names}):
                raise UserError(f"{process.entry}: {twice[0]} is also another number; rename it")
            self.names += names

    def score(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[dict[str, float]]:
        """Return the numbers of each answer by name. Raises UserError if one is missing or not finite."""
        scores: list[dict[str, float]] = [{} for _ in answers]
        for process in self._processes:
            for name, values in call_metric(process, prompts, answers).items():
                if not isinstance(values, list):
                    raise UserError(f"{process.entry}: {name} is one number; return a list with one for each answer")
                for score, value in zip(scores, values, strict=True):
                    if not math.isfinite(value):
                        raise UserError(f"{process.entry}: {name} is {value}; return finite numbers")
                    score[name] = value
        for score in scores[:1]:
            if other := sorted(score.keys() ^ set(self.names)):
                raise UserError(f"{self._flag}: {other[0]} is not always returned; always return the same names")
        return scores
