"""tutorials/models.md from the registry of families and the configurations of the parity tests.

python scripts/models_table.py              # names and parts; figures stay as they are
python scripts/models_table.py --measure    # and the figures anew, with transformers, in a minute
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tutorials" / "models.md"
sys.path.insert(0, str(ROOT))

from toolkit.models.config import ModelConfig  # noqa: E402
from toolkit.models.families import FAMILIES, config_from_hf, get_config, list_aliases, list_names  # noqa: E402

HEAD = """\
# Models

Which models come in from Hugging Face and go back. The architecture is read from `config.json`, so that a folder of any
name works; the names at the end of this page are for training from scratch (`toolkit pretrain NAME`) and for plans
(`toolkit plan NAME`). Of a Gemma 3 that sees images, too, (`model_type` gemma3) the text model comes in. To add a
family: [extend.md](extend.md). Variants of them that are refused: [convert.md](convert.md#from-a-folder).

Every model type below is tested on random weights in both directions: logits equal to transformers' in fp32 and bf16,
weights back bit for bit, a step of full finetuning and one of adapters with the export after each. The second column
says what such a model has beside, or instead of, a Llama's parts; the third what the tests have in some shapes and not
in others. The error is the largest difference of the logits from transformers' own in fp32, as a share of the largest
logit, over all shapes tested.

In training, the loss of a model with experts has a part that grows the less evenly they are used:
`--model_config.router_aux_loss_coef` times the balance loss (0 turns it off). The training loss that is printed and
logged includes it; the validation loss does not.

| `model_type` | what it computes | tested with and without | names | shapes | error |
|---|---|---|---:|---:|---:|
"""
END = """
This page is written by `python scripts/models_table.py`; errors measured with torch {torch} and transformers
{transformers} on the CPU.

## Names

"""
FURTHER = """\
## Further names

Models of the same architecture as one of those, behind its name: each works wherever that does.

"""


def parts(config: ModelConfig) -> list[str]:
    """What a model has that a Llama of equal queries, keys and values has not, in words."""
    windows = config.sliding_window_size is not None
    rotated = {config.rope_index(i) for i in range(config.n_layer)}
    scaled = {"linear": "linear", "llama3": "Llama 3's", "yarn": "YaRN", "longrope": "LongRoPE", None: None}
    has = {
        "learned positions": config.position_embedding == "learned",
        "LayerNorm": config.norm_class_name == "LayerNorm",
        "norms of weight 1 + w": config.norm_offset,
        "norms without weights": not config.norm_affine,
        "norms behind attention and MLP": config.post_attention_norm and config.norm_1,
        "norms only behind attention and MLP": config.post_attention_norm and not config.norm_1,
        "queries and keys normalised": config.norm_qk,
        "weights of these norms per head": config.norm_qk_type == "per_head",
        "latent attention": config.latent_attention is not None,
        "attention sinks": config.attention_sinks,
        "attention and MLP side by side": config.parallel_residual,
        "one norm for both": config.shared_attention_norm,
        "MLP of two layers": config.mlp_class_name == "GptNeoxMLP",
        "gated gelu": config.mlp_class_name == "GemmaMLP",
        "experts": config.mlp_class_name == "LLaMAMoE",
        "sigmoid scores of experts": config.router_scores == "sigmoid",
        "experts in groups": config.n_expert_groups is not None,
        "clamped products in experts": config.swiglu_limit is not None,
        "a shared expert": getattr(config, "shared_expert_intermediate_size", None) is not None,
        "grouped queries": config.n_query_groups < config.n_head,
        "heads of their own width": config.head_size * config.n_head != config.n_embd,
        "biases": config.bias,
        "biases of queries, keys, values": config.attn_bias and not config.bias,
        "a bias of the head": config.lm_head_bias,
        "a part of each head rotated": config.position_embedding == "rope" and config.rotary_percentage < 1,
        "layers without rotation": -1 in rotated,
        "another base in layers with a window": 1 in rotated,
        f"{scaled[config.rope_kind]} scaling of rotation": config.rope_kind is not None,
        "windows": windows and all(config.window(i) is not None for i in range(config.n_layer)),
        "windows in some layers": windows and any(config.window(i) is None for i in range(config.n_layer)),
        "capped scores": config.attention_logit_softcapping is not None,
        "capped logits": config.final_logit_softcapping is not None,
        "clamped queries, keys, values": config.clip_qkv is not None,
        "scaled embedding": config.scale_embeddings or config.embedding_multiplier != 1,
        "scaled residuals and logits": config.residual_multiplier != 1 or config.logits_scaling != 1,
        "tied head": config.tie_embeddings,
    }  # fmt: skip
    return [words for words, yes in has.items() if yes]


def our_config(facts: dict) -> ModelConfig:
    return ModelConfig(**{"block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64} | facts)


def tested() -> dict[str, list[ModelConfig]]:
    """The configurations of the parity tests, by model type."""
    from tests.models.test_parity import HF_CONFIGS, OUR_CONFIGS

    found = defaultdict(list)
    for make in HF_CONFIGS.values():
        config = make()
        found[config.model_type].append(config_from_hf(config.to_dict()))
    for facts in OUR_CONFIGS.values():
        config = our_config(facts)
        found[config.family].append(config)
    return found


def measure() -> dict[str, float]:
    """The largest relative error of the logits, by model type."""
    import torch
    import transformers

    from tests.models import test_parity as parity
    from toolkit.models.gpt import GPT

    errors: dict[str, float] = defaultdict(float)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, make in parity.HF_CONFIGS.items():
            theirs = transformers.AutoModelForCausalLM.from_config(make()).eval()
            parity.randomize(theirs, seed=0)
            theirs.save_pretrained(Path(folder) / name)
            ours, ids = parity.from_folder(Path(folder) / name), parity.token_ids()
            kind = theirs.config.model_type
            errors[kind] = max(errors[kind], parity.relative_error(ours(ids), theirs(ids).logits))
        for name, facts in parity.OUR_CONFIGS.items():
            ours = GPT(our_config(facts)).eval()
            parity.randomize(ours, seed=2)
            parity.to_folder(ours, Path(folder) / f"{name}-back")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / f"{name}-back").eval()
            kind, ids = ours.config.family, parity.token_ids() % 90
            errors[kind] = max(errors[kind], parity.relative_error(ours(ids), theirs(ids).logits))
    return errors


def written(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """The errors, by model type, and the versions that a page says."""
    errors = dict(re.findall(r"^\| `(\w+)` \|.* ([\d.e+-]+) \|$", page, re.M))
    versions = re.search(r"with torch (\S+) and transformers\s+(\S+) on", page)
    return errors, dict(zip(("torch", "transformers"), versions.groups() if versions else ("", ""), strict=True))


def render(errors: dict[str, str], versions: dict[str, str]) -> str:
    """The page."""
    names, shapes = defaultdict(list), tested()
    for name in list_names():
        names[get_config(name).family].append(name)
    page = HEAD
    for kind in FAMILIES:
        found = [parts(config) for config in shapes[kind]]
        always = [words for words in found[0] if all(words in f for f in found)]
        some = dict.fromkeys(words for f in found for words in f if words not in always)
        page += f"| `{kind}` | {', '.join(always) or 'a Llama'} | {', '.join(some)} | {len(names[kind])} "
        page += f"| {len(found)} | {errors.get(kind, '')} |\n"
    page += END.format(**versions)
    for kind in filter(names.get, FAMILIES):
        listed = ", ".join(f"`{name}`" for name in names[kind])
        page += textwrap.fill(f"**{kind}**: {listed}", 120, break_on_hyphens=False, break_long_words=False) + "\n\n"
    page += FURTHER
    for kind in filter(names.get, FAMILIES):
        same = {name: [a for a in list_aliases() if get_config(a).name == name] for name in names[kind]}
        listed = "; ".join(
            f"`{name}`: " + ", ".join(f"`{alias}`" for alias in aliases) for name, aliases in same.items() if aliases
        )
        if listed:
            page += textwrap.fill(f"**{kind}** {listed}", 120, break_on_hyphens=False, break_long_words=False) + "\n\n"
    return page.rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    errors, versions = written(PAGE.read_text() if PAGE.exists() else "")
    if parser.parse_args().measure:
        import torch
        import transformers

        errors = {kind: f"{error:.0e}" if error else "0" for kind, error in measure().items()}
        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    PAGE.write_text(render(errors, versions))


if __name__ == "__main__":
    main()
