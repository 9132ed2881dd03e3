"""Greedy text of every family's random model: with KV cache, without, and in transformers."""

import pytest
import torch
from helpers.cases import slow_except
from helpers.tiny_configs import HF_CONFIGS

from tests.inference.conftest import greedy_without_cache
from toolkit.checkpoints.folder import load_model
from toolkit.inference import decode as module
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY

transformers = pytest.importorskip("transformers")
# one of each kind of cache and position; the others with the slow tests
FAST = ("llama-grouped-tied", "llama-yarn", "mistral-window", "qwen3-moe", "gpt-oss", "gemma3", "falcon-one-group",
        "deepseek-v2", "neox", "gpt2")  # fmt: skip
PROMPT = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(6))


def most_likely(logits: torch.Tensor) -> list[int]:
    """Return the most likely token after the prompt and after each further one."""
    return logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(FAST, HF_CONFIGS))
def test_text_is_equal_with_cache_without_and_in_transformers(name, tiny_models, monkeypatch):
    """Prompts of 20 tokens, longer than the windows of 16, in chunks of 7."""
    tiny = tiny_models[name]
    native, hf = load_model(tiny.native).eval(), transformers.AutoModelForCausalLM.from_pretrained(tiny.hf).eval()
    monkeypatch.setattr(module, "PREFILL", 7)
    text = list(generate(native, PROMPT, max_new_tokens=24, sampling=GREEDY))
    # repetitive text would not be a test; tied models tend to repeat, and their families have other shapes here
    assert len(set(text)) > 2 or native.config.tie_embeddings
    row = torch.cat([PROMPT, torch.tensor(text)])[None]
    assert text == most_likely(hf(row).logits) == most_likely(native(row))
    assert greedy_without_cache(native, PROMPT, 8) == text[:8]
