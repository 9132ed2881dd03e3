"""Write litgpt_parameters.json: fields of LitGPT's named configurations, for comparison with toolkit's.

Run where the `litgpt` package is installed: ``python tests/models/write_litgpt_parameters.py``. Parameters are counted
on LitGPT's own model, on the meta device. It never ties head and embedding.
"""

import importlib.metadata
import json
from pathlib import Path

import torch
from litgpt.config import Config, configs
from litgpt.model import GPT

FIELDS = (
    "padded_vocab_size", "block_size", "n_layer", "n_embd", "n_head", "n_query_groups", "head_size",
    "intermediate_size", "rotary_percentage", "rope_base", "norm_eps", "sliding_window_size", "attention_scores_scalar",
    "n_expert", "n_expert_per_token", "moe_intermediate_size",
)  # fmt: skip


def describe(values: dict) -> list:
    """Return the parameter count, the RoPE scaling factor, and FIELDS."""
    config = Config(**values)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config).parameters())
    factor = (config.rope_adjustments or {}).get("factor", config.rope_condense_ratio)
    return [parameters, factor, *(getattr(config, field) for field in FIELDS)]


if __name__ == "__main__":
    models = {values["name"]: describe(values) for values in configs}
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in models.items())
    fields = json.dumps(["parameters", "rope_factor", *FIELDS])
    version = importlib.metadata.version("litgpt")
    text = f'{{\n  "litgpt": "{version}",\n  "fields": {fields},\n  "models": {{\n{rows}\n  }}\n}}\n'
    Path(__file__).with_name("litgpt_parameters.json").write_text(text)
