"""Convert score layers between ModelConfig and ``config.json`` of transformers' classes: ForSequenceClassification, and
for a reward of each token, ForTokenClassification."""

from dataclasses import replace
from typing import Any, NamedTuple, get_args

from toolkit.errors import UserError
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import ProblemType
from toolkit.models.families.hf_keys import is_integer, require_key


class Task(NamedTuple):
    """What a model is for, in the libraries of Hugging Face.

    Args:
        suffix: End of the name of transformers' classes.
        pipeline: Pipeline tag of the hub.
        peft_type: Task type of peft.
        missing_types: Model types without such a class in transformers 5, or whose class has another score layer.
    """

    suffix: str
    pipeline: str
    peft_type: str
    missing_types: tuple[str, ...] = ()


_WITHOUT = (
    "cohere2", "ernie4_5", "ernie4_5_moe", "gemma4_text", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe", "olmoe",
    "qwen3_5_moe_text",
)  # fmt: skip
# Start of the class names, where they are not the language model's.
_TEXT_CLASSES = {"gemma3_text": "Gemma3Text", "qwen3_5_text": "Qwen3_5Text"}
_LANGUAGE_MODEL = Task("ForCausalLM", "text-generation", "CAUSAL_LM")
_SEQUENCE = Task("ForSequenceClassification", "text-classification", "SEQ_CLS", (*_WITHOUT, "apertus"))
_ONLY_SEQUENCES = (
    "deepseek_v2", "falcon", "gemma3_text", "gpt2", "gpt_neox", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3",
    "qwen3_5_text",
)  # fmt: skip
_TOKEN = Task("ForTokenClassification", "token-classification", "TOKEN_CLS", (*_WITHOUT, *_ONLY_SEQUENCES))
_BIAS = "token_classification_bias"
_SINGLE = "single_label_classification"


def is_scored(config_json: Fields) -> bool:
    """Whether the weights of a Hugging Face folder have a score layer."""
    names = config_json.get("architectures")
    return isinstance(names, list) and any(str(name).endswith((_SEQUENCE.suffix, _TOKEN.suffix)) for name in names)


def task_of(config: ModelConfig) -> Task:
    """Return the task of a model."""
    return _LANGUAGE_MODEL if config.head is None else _TOKEN if config.head == "token_reward" else _SEQUENCE


def write_head(config: ModelConfig, values: Fields) -> Fields:
    """Return the language model's ``config.json`` with the head. A reward model has no problem type."""
    task = task_of(config)
    if config.family in task.missing_types:
        raise UserError(
            f"head {config.head}: transformers has no class {task.suffix} for the model type {config.family!r}; this "
            "model cannot be exported"
        )
    (name,) = values["architectures"]
    name = name.replace("LMHeadModel", "ForCausalLM").replace("ForCausalLM", task.suffix)
    if config.family in _TEXT_CLASSES:
        name = _TEXT_CLASSES[config.family] + task.suffix
    labels = config.labels or ["LABEL_0"]
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    names |= {_BIAS: False} if task is _TOKEN else {"problem_type": config.problem_type}
    return values | {"architectures": [name]} | names


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
    if any(str(name).endswith(_TOKEN.suffix) for name in config_json["architectures"]):
        require_key(len(labels) == 1, "id2label", names, "must have one label")
        bias = config_json.get(_BIAS, True)
        require_key(bias is False, _BIAS, bias, "must be false")
        return replace(config.with_head("token_reward"), labels=labels)
    if problem is None and len(labels) == 1:
        return replace(config.with_head("reward"), labels=labels)
    kind: Any = problem or _SINGLE
    return replace(config.with_head("classification"), labels=labels, problem_type=kind)
