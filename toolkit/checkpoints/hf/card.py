"""Write the model card of an export: base model, data, figures, and the settings that repeat the run."""

import math
import re
from pathlib import Path, PurePath
from typing import Any

from toolkit.checkpoints.find import HYPERPARAMETERS, read_settings
from toolkit.checkpoints.hf.origin import hf_origin
from toolkit.escape import markdown_code, markdown_text, to_yaml
from toolkit.io.paths import is_path_option, is_url, mask_url
from toolkit.io.safe_parse import read_json_object
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.hf_heads import task_of
from toolkit.models.gpt import model_on_meta
from toolkit.ui.energy import energy_of_run
from toolkit.ui.loggers import read_metrics
from toolkit.ui.progress import format_metric, metric_label, metric_names

_POSITIONAL = ("checkpoint_dir", "model_name")
# Options that only matter where the run was made.
_LOCAL = ("out_dir", "resume", "staging_dir", "log", "logger_name", "profile", "profiler", "cache_dir", *_POSITIONAL)
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)  # of an architecture, or of a model on the hub
_FOLDERS = re.compile(r"(?<![^\s:=,;'\"(\[])~?/(?:[^\s/]+/)*(?=[^\s/])")  # of a path in a text


def write_model_card(
    path: Path,
    config: ModelConfig,
    checkpoint_dir: Path,
    has_tokenizer: bool,
    is_adapter: bool = False,
    quantization: str = "",
) -> None:
    """Write README.md for a Hugging Face or peft folder that was exported from ``checkpoint_dir``.

    The card may be published, and the settings of a checkpoint are not verified. Text from them is escaped, paths are
    reduced to their last part, and commands of metrics are left out.
    """
    settings = read_settings(checkpoint_dir, HYPERPARAMETERS)
    settings = settings if isinstance(settings.get("data"), dict) else {}
    trained_from = settings.get("checkpoint_dir") or settings.get("initial_checkpoint_dir")
    base, is_on_hub = _base_model(str(trained_from) if trained_from else None if settings else checkpoint_dir)
    metadata = {
        "library_name": "peft" if is_adapter else "transformers" if family_of(config).is_in_transformers else "toolkit",
        "pipeline_tag": task_of(config).pipeline,
    } | ({"base_model": base} if is_on_hub else {})
    parameters = sum(p.numel() for p in model_on_meta(config).parameters())
    rows = {
        "Parameters": f"{parameters:,} ({config.n_layer} layers, width {config.n_embd})",
        "Quantization": quantization,
        "Context": f"{config.block_size:,} tokens",
        "Base model": base,
        **_describe_run(checkpoint_dir, settings),
    }
    cells = {markdown_text(name): markdown_text(value) for name, value in rows.items() if value}
    if is_on_hub:
        cells["Base model"] = f"[{base}](https://huggingface.co/{base})"
    table = "".join(f"| {name} | {value} |\n" for name, value in cells.items())
    kind = f"model with a {config.head} head" if config.head else "causal language model"
    what = "LoRA adapters" if is_adapter else f"A {kind}"
    path.write_text(
        f"---\n{to_yaml(metadata)}---\n\n# {markdown_text(config.name or 'A language model')}\n\n"
        f"{what}, exported with `toolkit`.\n\n| | |\n|---|---|\n{table}\n"
        f"{_describe_usage(config, has_tokenizer, is_adapter)}{_describe_settings(settings, base)}",
        encoding="utf-8",
    )


def auto_class(config: ModelConfig) -> str:
    """Return transformers' class that loads an export of this model."""
    return f"AutoModel{task_of(config).suffix}"


def _base_model(source: Any) -> tuple[str, bool]:
    """Return the name of a model folder's origin, and whether it is on the hub."""
    if source is None or is_url(source):
        return "" if source is None else mask_url(str(source)), False
    folder = Path(source) if Path(source).is_dir() else Path("checkpoints", source)
    name, _ = hf_origin(folder) or (str(source), None)
    is_on_hub = bool("/" in name and _NAME.fullmatch(name)) and not Path(name).is_dir()
    return (name if is_on_hub else PurePath(name).name), is_on_hub


def _describe_run(checkpoint_dir: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return rows of the table: the data, and the last figures of metrics.csv up to the checkpoint's step."""
    if not settings:
        return {}
    data = _portable(settings["data"])
    source = [_option(data, "init_args", name) for name in ("repo_id", "json_path", "path")]
    step = read_json_object(checkpoint_dir / "trainer" / "meta.json", optional=True).get("step", math.inf)
    last: dict[str, float] = {}
    for row in read_metrics(checkpoint_dir.parent / "logs" / "metrics.csv"):
        if row["step"] <= step:
            last |= {name: value for name, value in row.items() if not math.isnan(value)}
    names = {"loss": "Training loss (last step)", "val_loss": "Validation loss", "val_ppl": "Validation perplexity"}
    return {
        "Data": " ".join(map(str, filter(None, [data.get("class_path"), *source]))),
        "Trained": f"{last['step']:,.0f} steps, {last['tokens']:,.0f} tokens" if last else "",
        "Energy": energy_of_run(checkpoint_dir.parent),
        **{label: f"{last[name]:.4g}" for name, label in names.items() if name in last},
        **{f"Validation {metric_label(name)}": format_metric(name, last) for name in metric_names(last)},
    }


def _describe_usage(config: ModelConfig, has_tokenizer: bool, is_adapter: bool) -> str:
    if is_adapter:
        name, options = auto_class(config).replace("Auto", "AutoPeft"), ""
        if config.head is not None:
            options = f", num_labels={config.n_labels}"
        return f"""```python
from peft import {name}

model = {name}.from_pretrained("path/to/this/folder"{options})
```
"""
    if not family_of(config).is_in_transformers:
        return f"""transformers has no class for `{config.family}`; this reads the folder:

```bash
toolkit convert_from_hf path/to/this/folder path/to/checkpoint
```
"""
    classes, tokenizer = auto_class(config), ""
    if has_tokenizer:
        classes += ", AutoTokenizer"
        tokenizer = '\ntokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")'
    return f"""```python
from transformers import {classes}

model = {auto_class(config)}.from_pretrained("path/to/this/folder"){tokenizer}
```
"""


def _describe_settings(settings: dict[str, Any], base: str) -> str:
    if not settings:
        return ""
    command, model = "pretrain", str(settings.get("model_name"))
    if "checkpoint_dir" in settings:
        command, model = "finetune_lora" if "lora_r" in settings else "finetune_full", base
    # a command only for settings of toolkit alone: others may name other code, and metrics are left out
    has_code = settings.get("extensions") or settings.get("callbacks") or _option(settings, "eval", "metric")
    groups = {"data": "class_path", "objective": "class_path", "optimizer": "name"}
    classes = [_option(settings, group, name) for group, name in groups.items()]
    line = "The settings of the run:"
    if _NAME.fullmatch(model) and not has_code and all(c is None or str(c).isidentifier() for c in classes):
        words = f"toolkit {command} {model} --config settings.yaml"
        line = f"`{words}` repeats the run, with the paths in `settings.yaml` corrected:"
    return f"""
## Training

{line}

<details><summary>settings.yaml</summary>

{markdown_code(to_yaml(_portable(settings)), "yaml")}</details>
"""


def _option(settings: dict[str, Any], group: str, name: str) -> Any:
    """Return an option of a group; the value of a group that is none."""
    return values.get(name) if isinstance(values := settings.get(group), dict) else values


def _portable(value: Any, name: str = "") -> Any:
    """Return options without local ones, and with only the last part of paths."""
    if isinstance(value, dict):
        return {
            key: _portable(inner, str(key))
            for key, inner in value.items()
            if key not in _LOCAL and not str(key).startswith("metric")  # may be a command
        }
    if isinstance(value, list):
        return [_portable(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    is_path = is_path_option(name) or is_url(value) or value.startswith(("/", "~", "."))
    return PurePath(value).name if is_path else _FOLDERS.sub("", value)
