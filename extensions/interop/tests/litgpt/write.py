"""Write the models of this folder with LitGPT: see README.md.

python extensions/interop/tests/litgpt/write.py extensions/interop/tests/litgpt
"""

import sys
from pathlib import Path

import lightning
import torch
from litgpt.config import Config
from litgpt.finetune.full import get_lr_scheduler
from litgpt.model import GPT
from litgpt.utils import incremental_save, save_config

SIZES = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "intermediate_size": 16, "block_size": 32,
    "vocab_size": 30, "padded_vocab_size": 32,
}  # fmt: skip
GROUPED = {"n_query_groups": 2}
WINDOW = {"sliding_window_size": 8}
ALTERNATING = WINDOW | {"sliding_window_indices": [1, 0]}
LOCAL = {"rope_base": 1000, "rope_local_base_freq": 100, "rope_indices": [1, 0]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}

# folder: (the name in LitGPT's list, whose architecture the model has, and what is smaller here)
MODELS = {
    "llama3": ("Llama-3.1-8B", GROUPED | {"rope_adjustments": LLAMA3, "rope_base": 500}),
    "llama-condensed": ("LLaMA-2-7B-32K", {"n_layer": 1}),
    "mistral": ("Mistral-7B-v0.1", GROUPED | WINDOW),
    "qwen2": ("Qwen2.5-0.5B", GROUPED | {"n_layer": 1}),
    "qwen3": ("Qwen3-0.6B", GROUPED | {"head_size": 12}),
    "gemma": ("Gemma-2b", {"n_query_groups": 1, "head_size": 12}),
    "gemma2": ("Gemma-2-2b", GROUPED | ALTERNATING | {"attention_scores_scalar": 12}),
    "gemma3": ("Gemma-3-4b-it", GROUPED | ALTERNATING | LOCAL | {"attention_scores_scalar": 12}),
    "phi": ("phi-2", {"n_layer": 1, "rotary_percentage": 0.5}),
    "phi3": ("Phi-4-mini-instruct", GROUPED | WINDOW),
    "pythia": ("pythia-14m", {}),
    "falcon-one-group": ("falcon-7b", {"n_layer": 1, "n_query_groups": 1}),
    "falcon-groups": ("falcon-40b", GROUPED),
    "olmo": ("OLMo-1B-hf", {"n_layer": 1}),
    "olmo2": ("OLMo-2-1124-7B", {}),
    "stablelm": ("stablelm-3b-4e1t", {"n_layer": 1}),
    "mixtral": ("Mixtral-8x7B-v0.1", GROUPED | {"n_layer": 1, "n_expert": 4}),
    "qwen3-experts": (
        "Qwen3-30B-A3B",
        GROUPED | {"n_layer": 1, "n_expert": 6, "n_expert_per_token": 3, "moe_intermediate_size": 8},
    ),
}
AS_MERGED, AS_FINETUNED, IN_A_RUN = {"mistral", "olmo2", "phi"}, {"pythia", "gemma2"}, {"llama-condensed"}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights so large that attention is far from uniform, none of them a 0 or 1 that hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.25, generator=generator)
            if weight.dim() == 1 and name.endswith("weight") and "Gemma" not in model.config.name:
                weight.add_(1.0)


def save(model: GPT, folder: Path) -> None:
    """As LitGPT's commands do: convert_to_litgpt, unless the model is in one of the sets above."""
    path = folder / "lit_model.pth"
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    if folder.name in AS_MERGED:  # by finetune_lora and merge_lora
        torch.save(model.state_dict(), path)
    elif folder.name in AS_FINETUNED:  # by finetune_full at its end
        fabric.save(path, {"model": model})
    elif folder.name in IN_A_RUN:  # by finetune_full in between
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = get_lr_scheduler(optimizer, warmup_steps=2, max_steps=10)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "iter_num": 7, "step_count": 3}
        fabric.save(path, state)
    else:
        with incremental_save(path) as saver:
            saver.save({name: saver.store_early(weight) for name, weight in model.state_dict().items()})
    save_config(model.config, folder)


def main(out: Path) -> None:
    for seed, (name, (known, smaller)) in enumerate(MODELS.items()):
        sizes = SIZES | {"n_query_groups": SIZES["n_head"]} | smaller
        model = GPT(Config.from_name(known, **sizes)).eval()
        randomize(model, seed)
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        save(model.bfloat16(), folder)
        ids = torch.randint(30, (1, 20), generator=torch.Generator().manual_seed(seed))
        model = model.float()
        model.reset_parameters()  # the rotation again, in float32
        with torch.no_grad():
            torch.save({"input_ids": ids, "logits": model(ids)}, folder / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
