"""Options of the metrics of answers, in training and in toolkit evaluate. Imports no torch."""

from dataclasses import dataclass

from toolkit.config.checks import require_positive
from toolkit.errors import require_option


@dataclass(frozen=True)
class MetricArgs:
    """Metrics of answers that the model generates.

    Args:
        metric: Metrics of answers that the model generates (in training at each validation), separated by commas:
            exact_match, choice, number, regex:PATTERN, json_valid, rouge_l, check:COMMAND, reward:FOLDER (of a reward
            model), or MODULE:FUNCTION. See tutorials/metric.md.
        metric_data: Prompts and references for metric: a .json, .jsonl, .csv or .parquet file with rows as in --data
            JSON. Default: the held-out rows of instruction data.
        metric_rows: Maximum number of prompts, evenly spaced in the data, and of questions per task; null uses all.
        metric_new_tokens: Maximum number of tokens of an answer.
        metric_timeout: Seconds that a metric's function may take per call, once per validation.
    """

    metric: str | list[str] | None = None
    metric_data: str | None = None
    metric_rows: int | None = 100
    metric_new_tokens: int = 256
    metric_timeout: float = 300.0

    def __post_init__(self) -> None:
        require_positive("eval", self, "metric_rows", "metric_new_tokens", "metric_timeout")
        for name in ("metric_data", "metric_new_tokens", "metric_timeout"):
            self._require_user(name, "metric")
        self._require_user("metric_rows", "metric", "tasks")

    def _require_user(self, name: str, *users: str) -> None:
        """Raise UserError if an option is set, and none of the options that use it."""
        value, used = getattr(self, name), [user for user in users if hasattr(self, user)]
        is_used = value == getattr(type(self), name) or any(getattr(self, user) is not None for user in used)
        needed = " or ".join(f"--eval.{user}" for user in used)
        require_option(is_used, f"eval.{name}", value, f"has no effect without {needed}")
