"""Each family's layers, divided over two ranks: the loss and the gradients of the complete model."""

import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.cases import check_each
from helpers.groups import free_port, start_ranks
from helpers.initialize import add_lora
from helpers.tiny_configs import HF_CONFIGS
from helpers.tiny_models import randomize
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.distributed.mesh import Layout
from toolkit.distributed.model_parts import cuts_of, reduce_gradients, require_divisible
from toolkit.distributed.tensor_parallel import split_model
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf
from toolkit.models.gpt import GPT
from toolkit.models.init import Materializer
from toolkit.models.lora import adapted_on_meta
from toolkit.models.lora_config import LoRAConfig

ADAPTERS = {
    "lora": LoRAConfig(r=4, key=True, projection=True, mlp=True, head=True, dropout=0.0),
    "dora": LoRAConfig(r=4, key=True, projection=True, mlp=True, dropout=0.0, dora=True),
}


def is_dense(config: ModelConfig) -> bool:
    return not (config.n_moe_layer or config.latent_attention or (config.norm_qk and config.norm_qk_type == "olmo2"))


def configs() -> dict[str, ModelConfig]:
    found = {name: config_from_hf(make().to_dict()) for name, make in HF_CONFIGS.items()}
    found["llama-sinks"] = replace(found["llama"], attention_sinks=True)
    return {name: config for name, config in found.items() if is_dense(config)}


def step(model: GPT, log_probs: bool = False) -> torch.Tensor:
    """Return the loss of two rows, packed and partly without labels, and compute the gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 96, (2, 32), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(2, 32, generator=generator) < 0.3, -100)
    documents = torch.arange(32).ge(13).long().expand(2, 32)
    loss, _ = model(ids, labels, documents=documents, log_probs=log_probs)
    loss = -(loss * torch.arange(64.0).view(2, 32)).sum() if log_probs else loss
    loss.backward()
    return loss.detach()


def split(config: ModelConfig, weights: dict[str, torch.Tensor], lora: LoRAConfig | None) -> GPT:
    model = adapted_on_meta(config, lora)
    part_of = split_model(model, 2, dist.get_rank(), ranks.group("tensor"))
    assert model.config == config and model.make_cache(1, 1)[0].keys.size(1) == config.n_query_groups // 2
    fill = Materializer(model, part_of(lambda name, shape: weights[name]))
    for module in model.modules():
        fill(module)
    return model


def differences(config: ModelConfig, lora: LoRAConfig | None = None, log_probs: bool = False) -> dict[str, float]:
    """Return the differences from the complete model: of the loss, of the logits, and the largest of a gradient."""
    whole = GPT(config)
    if lora is not None:
        add_lora(whole, lora)
    randomize(whole, seed=0)
    weights = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    part = split(config, weights, lora)
    expected, found = step(whole, log_probs), step(part, log_probs)
    reduce_gradients(part, torch.device("cpu"))
    cuts, total, largest = cuts_of(part), torch.zeros(()), torch.zeros(())
    gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in whole.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        reference = whole.get_parameter(name).grad
        total += reference.square().sum()
        difference = gradient - (cuts[name].take(reference) if name in cuts else reference)
        largest = torch.maximum(largest, difference.norm())
    with torch.no_grad():
        ids = torch.arange(6)[None]
        logits = float((part(ids) - whole(ids)).norm() / whole(ids).norm())
    return {"loss": float(abs(found / expected - 1)), "logits": logits, "gradients": float(largest / total.sqrt())}


def rank_main(rank: int, port: int, folder: Path, cases: dict[str, ModelConfig]) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    ranks.set_layout(Layout(tensor=2))
    found = {name: differences(config) for name, config in cases.items()}
    for name, lora in ADAPTERS.items():
        for base in ("llama-biases", "phi-grouped"):
            found[f"{name}-{base}"] = differences(cases[base], lora)
    found["log-probs"] = differences(cases["gemma2"], log_probs=True)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # otherwise gloo's threads may free tensors during interpreter exit


@pytest.mark.slow
def test_n3_each_dense_family_and_its_adapters(tmp_path):
    known, divisible = configs(), {}
    for name, config in known.items():
        try:
            require_divisible(config, 2)
            divisible[name] = config
        except UserError as error:
            assert config.n_query_groups == 1 and "key/value heads" in str(error), name
    assert len(divisible) > 30
    start_ranks(rank_main, (free_port(), tmp_path, divisible), 2)

    def check(name: str, found: dict[str, float]) -> None:
        assert all(value < 1e-5 for value in found.values()), found

    check_each(check, json.loads((tmp_path / "found.json").read_text()).items())
