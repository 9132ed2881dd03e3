"""Convert score layers between ``config.json`` of transformers' classes ForSequenceClassification and ModelConfig."""

from dataclasses import replace
from typing import Any, get_args

from toolkit.errors import UserError
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import ProblemType
from toolkit.models.families.hf_keys import is_integer, require_key

_CLASS = "ForSequenceClassification"
# Model types without such a class in transformers 5.
_WITHOUT = ("apertus", "cohere2", "ernie4_5", "ernie4_5_moe", "granite", "granitemoe", "olmoe")
_SINGLE = "single_label_classification"


def is_scored(config_json: Fields) -> bool:
    """Whether the weights of a Hugging Face folder have a score layer."""
    names = config_json.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_CLASS) for name in names)


def write_head(config: ModelConfig, values: Fields) -> Fields:
    """Return the language model's ``config.json`` with the head. A reward model has no problem type."""
    if config.family in _WITHOUT:
        raise UserError(
            f"head {config.head}: transformers has no class {_CLASS} for the model type {config.family!r}; this model "
            "cannot be exported"
        )
    (name,) = values["architectures"]
    name = name.replace("LMHeadModel", "ForCausalLM").replace("ForCausalLM", _CLASS)
    if config.family == "gemma3_text":
        name = f"Gemma3Text{_CLASS}"
    labels = config.labels or ["LABEL_0"]
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return values | {"architectures": [name], "problem_type": config.problem_type} | names


def read_head(config: ModelConfig, config_json: Fields) -> ModelConfig:
    """Return the config with the head of ``config.json``. A single score without a problem type is a reward."""
    names = config_json.get("id2label")
    problem: Any = config_json.get("problem_type")
    require_key(problem in (None, *get_args(ProblemType)), "problem_type", problem, "is not supported")
    if isinstance(names, dict):
        labels: Any = [names.get(str(i)) for i in range(len(names))]
        require_key(all(isinstance(label, str) for label in labels), "id2label", names, "must name each id from 0")
    else:  # transformers' default
        n = config_json.get("num_labels", 2)
        require_key(is_integer(n, 1), "num_labels", n, "must be an integer, 1 or greater")
        labels = [f"LABEL_{i}" for i in range(n)]
    if problem is None and len(labels) == 1:
        return replace(config.with_head("reward"), labels=labels)
    kind: Any = problem or _SINGLE
    return replace(config.with_head("classification"), labels=labels, problem_type=kind)
