"""A residual stream in bf16 (--train.residual_dtype) on a CPU: what blocks read, and what autograd saves of gpt2."""

from dataclasses import replace

import pytest
import torch
from helpers.cases import check_each
from helpers.tiny_configs import NATIVE_CONFIGS

from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.gpt import build_model

IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def run(config: ModelConfig, autocasts: bool) -> tuple[set[torch.dtype], int]:
    """Return the dtypes that blocks and the last norm read, and the bytes that autograd saves, without weights."""
    model, dtypes, saved = build_model(config), set(), {}
    model.execute_with(autocasts_residual=autocasts)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for reader in (*model.blocks, model.transformer.ln_f):
        reader.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(IDS, IDS)
    loss.backward()
    return dtypes, sum(storage.nbytes() for storage in saved.values())


def test_blocks_and_the_last_norm_read_bf16():
    def check(name: str) -> None:
        config = ModelConfig(block_size=64, n_layer=2, n_embd=64, n_head=4, **NATIVE_CONFIGS[name])
        assert run(config, autocasts=True)[0] == {torch.bfloat16}

    check_each(check, NATIVE_CONFIGS)


def test_both_norms_of_a_gpt2_block_save_their_input_in_bf16():
    """Two bytes less per element and norm; the statistics are small."""
    config = replace(get_config("gpt2"), n_embd=32, n_head=4, head_size=8, intermediate_size=64, n_query_groups=4)
    saved = {}
    for n_layer in (2, 3):
        config = replace(config, n_layer=n_layer, vocab_size=64, padded_vocab_size=64)
        saved[n_layer] = [run(config, autocasts)[1] for autocasts in (False, True)]
    per_block = [b - a for a, b in zip(saved[2], saved[3], strict=True)]
    x = IDS.numel() * config.n_embd
    assert per_block[0] - per_block[1] == pytest.approx(2 * (4 - 2) * x, rel=0.02)
