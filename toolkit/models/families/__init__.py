"""Registry of model families: named configurations, and import from and export to Hugging Face.

A family is a module with ``CONFIGS``, ``ALIASES``, ``from_hf_config(config_json)``, ``to_hf_config(config)`` and
``weight_map(config)``. It also defines ``is_unused(name, config)`` if checkpoints contain extra weights,
``is_mtp(name, config)`` for those of multi-token prediction, which are kept, and ``normalize(config_json)`` if
``config.json`` has several forms. To add a family, add a file here and an entry in :data:`FAMILIES`.

A config can be exported if ``from_hf_config`` reads the same model from ``to_hf_config``'s values: what the family's
Hugging Face class does not support, ``from_hf_config`` must not read.

A family with a model of its own, such as Gemma 4, also defines ``MODEL``, the import path of a GPT subclass, and
``validate(config)``, which raises UserError for invalid ``ModelConfig.family_options``. Extensions can add families
(:mod:`toolkit.extension`), which may also define ``check(config)``, which replaces the comparison of the exported
model: it raises UserError for a config that cannot be exported.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from types import ModuleType
from typing import Any

from toolkit.dotted_paths import import_object
from toolkit.errors import UserError, did_you_mean, require_option
from toolkit.extension import Entry, load_registered, registered
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_keys
from toolkit.models.families.hf_heads import is_scored, read_head, write_head
from toolkit.models.families.tables import WeightMapping, one_to_one

DEFAULT_MODEL = "mini-llama"
FUNCTIONS = ("from_hf_config", "to_hf_config", "weight_map")
"""Functions that each family module defines."""

# Modules by Hugging Face's model_type; a run imports the one of its model
FAMILIES: dict[str, str] = {
    model_type: f"{__name__}.{module}"
    for module, model_types in {
        "llama": ("llama",), "smollm3": ("smollm3",), "mistral": ("mistral", "ministral", "ministral3"),
        "mixtral": ("mixtral",),
        "qwen2": ("qwen2",), "qwen3": ("qwen3",), "qwen_moe": ("qwen2_moe", "qwen3_moe"),
        "gemma": ("gemma", "gemma2", "gemma3_text"), "gemma4": ("gemma4_text",), "phi": ("phi",), "phi3": ("phi3",),
        "gpt_neox": ("gpt_neox",), "gpt2": ("gpt2",), "falcon": ("falcon",), "olmo": ("olmo", "olmo2", "olmo3"),
        "stablelm": ("stablelm",),
        "granite": ("granite", "granitemoe"), "starcoder2": ("starcoder2",), "gpt_oss": ("gpt_oss",),
        "deepseek": ("deepseek_v2", "deepseek_v3"), "glm": ("glm", "glm4"), "glm4_moe": ("glm4_moe", "glm4_moe_lite"),
        "seed_oss": ("seed_oss",),
        "cohere2": ("cohere2",), "olmoe": ("olmoe",), "hunyuan": ("hunyuan_v1_dense",), "exaone4": ("exaone4",),
        "ernie4_5": ("ernie4_5", "ernie4_5_moe"), "apertus": ("apertus",),
        "qwen_next": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    }.items()
    for model_type in model_types
}  # fmt: skip

# model_type of multimodal models -> model types of their text model, which is read from text_config
MULTIMODAL = {
    "gemma3": ("gemma3_text",), "gemma4": ("gemma4_text",), "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",),
}  # fmt: skip
# Weights of a multimodal model outside its text model: vision, audio, and what projects them to the text's embeddings.
_OTHER_MODALITIES = (
    "vision_tower.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
)
# What this version does not compute, by names that a config.json then has: of fields, of kinds of layers, or its type.
_NOT_COMPUTED = {
    "an encoder": "is_encoder_decoder",
    "state space layers": "mamba|ssm_|time_step|state_size",
    "linear attention of another kind": "linear_attention|linear_attn|lightning",
    "sparse attention": "indexed_attention|index_topk|sparse_attention|compress_ratio|lsh_attn",
    "convolutions": "(?<!linear_)conv",
    "recurrent layers": "lru_width|rwkv|xlstm",
    "chunked attention": "chunked_attention",
}


def families() -> dict[str, str | Entry]:
    """Return where each family is defined: :data:`FAMILIES` and the families from extensions."""
    return {**FAMILIES, **registered("families", FAMILIES)}


def _load_family(name: str) -> ModuleType:
    """Import a family; validate it if it is an extension's."""
    entry = families()[name]
    if isinstance(entry, str):
        return import_object(entry)
    module, extension = load_registered("families", name), f"extension {entry.origin}: family {name}"
    for part in ("CONFIGS", *FUNCTIONS):
        if not hasattr(module, part):
            raise UserError(f"{extension}: {entry.path} has no {part}")
    if not all(isinstance(config, ModelConfig) for config in module.CONFIGS):
        raise UserError(f"{extension}: CONFIGS of {entry.path}: must be a list of ModelConfig")
    if taken := [name for name in _names_of(module) if name.lower() in _core_names()]:
        raise UserError(f"{extension}: toolkit has a configuration {taken[0]}; rename it")
    entries = registered("families")
    for config in module.CONFIGS:
        family = config.family
        named = load_registered("families", family) if family in entries else FAMILIES.get(family)
        named = import_object(named) if isinstance(named, str) else named
        if named is not module and not _only_adds_configs(module, named):
            raise UserError(
                f"{extension}: {config.name} of {entry.path} has family={config.family!r}, with other weight names or "
                f"another model; add family={name!r}"
            )
    return module


def _only_adds_configs(module: ModuleType, family: ModuleType | None) -> bool:
    """Whether a module only adds configurations: same functions as ``family`` and no model class."""
    same = all(getattr(module, name) is getattr(family, name, None) for name in FUNCTIONS)
    return same and not hasattr(module, "MODEL")


@cache
def _core_names() -> set[str]:
    return {name.lower() for path in set(FAMILIES.values()) for name in _names_of(import_object(path))}


def _names_of(family: ModuleType) -> list[str]:
    """Return the configuration names and aliases of a family."""
    return [*(config.name for config in family.CONFIGS), *getattr(family, "ALIASES", {})]


def _modules() -> Iterator[ModuleType]:
    """Yield the unique family modules; a module may implement several model types. Imports one at a time."""
    added = [_load_family(name) for name in registered("families", FAMILIES)]  # their mistakes first
    yield from map(import_object, dict.fromkeys(FAMILIES.values()))
    yield from dict.fromkeys(added)


def extension_of(name: str | None) -> str | None:
    """Return the extension that defines this configuration; None if no extension does."""
    for family, entry in registered("families").items():
        if _short_name(name or DEFAULT_MODEL) in map(str.lower, _names_of(_load_family(family))):
            return entry.origin
    return None


def _short_name(name: str) -> str:
    """Return the name in lower case without the organization."""
    return name.rpartition("/")[2].lower()


def list_names() -> list[str]:
    """Return the names of all configurations, the default first."""
    return [config.name for family in _modules() for config in family.CONFIGS]


def list_names_by_family() -> dict[str, list[str]]:
    """Return all configuration names by family, without empty families. Families from extensions use the model_type."""
    modules = {path.rpartition(".")[2]: import_object(path) for path in FAMILIES.values()}
    modules |= {name: _load_family(name) for name in registered("families")}
    return {name: [c.name for c in family.CONFIGS] for name, family in modules.items() if family.CONFIGS}


def list_aliases() -> list[str]:
    """Return configuration aliases: other models with the same architecture."""
    return [alias for family in _modules() for alias in getattr(family, "ALIASES", {})]


def get_config(name: str) -> ModelConfig:
    """Return the configuration with this name. Case and the organization prefix are ignored."""
    short_name = _short_name(name)
    for family in _modules():
        aliases = {alias.lower(): config for alias, config in getattr(family, "ALIASES", {}).items()}
        if short_name in aliases:
            return get_config(aliases[short_name])
        for config in family.CONFIGS:
            if config.name.lower() == short_name:
                return config
    raise UserError(f"model_name {name!r}: no such configuration{suggest_names(name)}")


def suggest_names(name: str) -> str:
    """Return a hint for an unknown name: the closest names, or how to list all names."""
    nearest = did_you_mean(name.rpartition("/")[2], [*list_names(), *list_aliases()])
    return nearest or "; `toolkit pretrain list` lists all names"


@dataclass(frozen=True)
class Family:
    """Wraps a family module. Checks a config before exporting it."""

    module: ModuleType

    def validate(self, config: ModelConfig) -> None:
        """Check ``ModelConfig.family_options``."""
        if hasattr(self.module, "validate"):
            self.module.validate(config)

    def model_class(self) -> Any:
        """Return the family's GPT subclass; None for plain GPT."""
        path = getattr(self.module, "MODEL", None)
        return None if path is None else import_object(path)

    def to_hf_config(self, config: ModelConfig) -> Fields:
        """Return the content of ``config.json`` without special token ids."""
        values = self._write_config(config.without_head())
        return values if config.head is None else write_head(config, values)

    def _write_config(self, config: ModelConfig) -> Fields:
        """Return ``config.json``. Raise UserError if the model that it describes is another one."""
        if hasattr(self.module, "check"):
            self.module.check(config)
            return self.module.to_hf_config(config)
        values = self.module.to_hf_config(config)
        try:
            exported = self.from_hf_config(values)
        except UserError as error:
            reason = str(error).removeprefix("config.json: ")
            raise UserError(
                f"--model_config.family {config.family}: this model cannot be exported: {reason}"
            ) from error
        hf_config.require_same(config, exported)
        return values

    def from_hf_config(self, config_json: Fields) -> ModelConfig:
        """Return the configuration of a language model in ``config.json``."""
        if hasattr(self.module, "normalize"):
            config_json = self.module.normalize(config_json)
        hf_keys.require_types(config_json)
        hf_config.require_hf(config_json, is_causal=(True,), per_layer_config=(None,))
        return self.module.from_hf_config(config_json)

    def weight_map(self, config: ModelConfig) -> list[WeightMapping]:
        """Return the mapping between native and Hugging Face tensors."""
        language_model = config.without_head()
        self._write_config(language_model)
        maps = self.module.weight_map(language_model)
        if config.head is None:
            return maps
        blocks = [entry for entry in maps if not entry.native[0].startswith("lm_head.")]
        return [*blocks, one_to_one("score.weight", "score.weight")]

    @property
    def is_in_transformers(self) -> bool:
        """Whether transformers supports this family. False if the module sets ``IN_TRANSFORMERS = False``."""
        return getattr(self.module, "IN_TRANSFORMERS", True)

    def is_unused(self, name: str, config: ModelConfig) -> bool:
        """Whether the Hugging Face weight ``name`` has no counterpart in toolkit's model."""
        is_other = name.removeprefix("model.").startswith(_OTHER_MODALITIES)
        if is_other and config.family in itertools.chain(*MULTIMODAL.values()):
            return True
        return hasattr(self.module, "is_unused") and self.module.is_unused(name, config)

    def is_mtp(self, name: str, config: ModelConfig) -> bool:
        """Whether the Hugging Face weight ``name`` belongs to multi-token prediction, which is not trained here."""
        return hasattr(self.module, "is_mtp") and self.module.is_mtp(name, config)


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration."""
    names, name = families(), config.family
    require_option(name in names, "model_config.family", name, f"must be one of {', '.join(names)}")
    return Family(_load_family(name))


def is_extension_model(config: ModelConfig) -> bool:
    """Whether an extension computes the model."""
    return config.family in registered("families") and family_of(config).model_class() is not None


def export_error(config: ModelConfig) -> str | None:
    """Return why this model cannot be exported to Hugging Face, or None if it can."""
    try:
        family_of(config).to_hf_config(config)
        family_of(config).weight_map(config)
    except UserError as error:
        return str(error)
    return None


def config_from_hf(config_json: Fields) -> ModelConfig:
    """Create a configuration from a parsed Hugging Face ``config.json``.

    For a multimodal model, this is the configuration of the text model.
    """
    config_json = _text_config(config_json)
    model_type = config_json.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        raise UserError(_unsupported_message(config_json))
    family = Family(_load_family(model_type))
    try:
        config = family.from_hf_config(config_json)
        config = read_head(config, config_json) if is_scored(config_json) else config
        family.to_hf_config(config)  # fail early if the config is not supported
    except UserError as error:
        raise UserError(hf_keys.translate_fields(config_json, str(error))) from error
    except KeyError as error:
        raise UserError(f"config.json: {error.args[0]} is missing; a {model_type!r} model needs it") from error
    except (TypeError, AttributeError, ValueError, ArithmeticError, IndexError) as error:
        raise UserError(f"config.json: not a valid {model_type!r} config: {error}") from error
    return config


def _text_config(config_json: Fields) -> Fields:
    """Return the text model's config from a :data:`MULTIMODAL` config; other configs unchanged."""
    kind, text = config_json.get("model_type"), config_json.get("text_config")
    if not isinstance(kind, str) or kind not in MULTIMODAL or not isinstance(text, dict):
        return config_json
    inner = text.get("model_type", MULTIMODAL[kind][0])
    if inner not in MULTIMODAL[kind]:
        return config_json
    outer = {key: config_json[key] for key in ("tie_word_embeddings", "is_causal") if key in config_json}
    return text | outer | {"model_type": inner}


def _unsupported_message(config_json: Fields) -> str:
    """Return the error message for an unsupported ``config.json``."""
    model_type, text, names = config_json.get("model_type"), config_json.get("text_config"), families()
    message = f"config.json: model_type {model_type!r} is not supported"
    if isinstance(text, dict):
        if (inner := str(text.get("model_type"))) in names:
            return f"{message}: it is multimodal; save its text model (model_type {inner!r}) separately"
        return f"{message}: it is multimodal, and its text model's {_unsupported_message(text).partition(': ')[2]}"
    if "vision_config" in config_json:
        return f"{message}: it is multimodal; use a text-only model"
    kind, layers = str(model_type), (config_json.get(name) for name in ("layer_types", "layers_block_type"))
    words = " ".join(map(str, [kind, *(key for key, value in config_json.items() if value), *layers]))
    has = next((f": it has {part}" for part, pattern in _NOT_COMPUTED.items() if re.search(pattern, words)), "")
    same = [name for name in names if re.split("[^a-z]", name)[0] == re.split("[^a-z]", kind)[0]]
    near = max(same, key=lambda name: (len(commonprefix([name, kind]).rstrip("_")), -len(name), name), default="")
    closest = f"the closest that is: {near!r}" if near else f"only {', '.join([*names, *MULTIMODAL])}"
    return f"{message}{has}; {closest}"
