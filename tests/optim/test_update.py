"""Clipping and the check for NaN inside torch's fused update: equal to clipping first, and one wait per step."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cases import check_each, slow_except
from helpers.ragged import RaggedRows
from helpers.steps import one_step
from lightning.fabric import Fabric
from toolkit_plan.measure.operators import _NO_KERNEL
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.test_step import PackedRows
from toolkit.config import PRETRAIN, OptimizerArgs
from toolkit.data.batch import Batch, Padding, collate
from toolkit.distributed.fabric import single_device_fabric
from toolkit.errors import GuardError
from toolkit.models import attention_dispatch, attention_kernels, loss
from toolkit.models.block import Block
from toolkit.models.families import config_from_hf, get_config
from toolkit.models.gpt import GPT, build_model
from toolkit.models.lora import add_lora
from toolkit.models.lora_config import LoRAConfig
from toolkit.optim.classes import build_optimizer, resolve_optimizer
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.optim.update import FusedUpdate

ROOT = Path(__file__).resolve().parents[2]

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "equal"}
READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"}


def batch(seed: int = 0, vocab_size: int = 96) -> Batch:
    ids = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, ids, [0, 1], ids.numel(), ids.numel())


def step(fabric, model, optimizer, seed=0, max_norm=1.0, **options):
    return one_step(fabric, model, optimizer, [batch(seed), batch(seed + 50)], 1e-2, max_norm=max_norm, **options)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"fused": True, "weight_decay": 0.1} | options)


def tensors(model, optimizer) -> list[torch.Tensor]:
    states = [optimizer.optimizer.state[p] for p in model.parameters()]
    return [*model.parameters(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step"))]


@pytest.mark.parametrize("max_norm", [0.0, 1e6, 0.1])
def test_update_equals_clipping_first(fabric, pico, max_norm):
    """Bit for bit: a callback that looks at the gradients, maybe on one rank only, changes nothing."""
    found = []
    for options in ({}, {"before_update": lambda: None}):
        model = copy.deepcopy(pico)
        wrapped, optimizer = fabric.setup(model, adamw(model))
        assert FusedUpdate.supports(fabric, optimizer)
        results = [step(fabric, wrapped, optimizer, seed, max_norm, **options) for seed in range(6)]
        found.append((results, tensors(model, optimizer)))
        assert not hasattr(optimizer.optimizer, "found_inf") and not hasattr(optimizer.optimizer, "grad_scale")
    (ours, updated), (expected, reference) = found
    assert min(result.grad_norm for result in expected) > 0.1
    assert ours == expected and all(map(torch.equal, updated, reference))


def test_norm_of_bf16_gradients_is_not_rounded_to_bf16(fabric, pico):
    """Also with an optimizer that cannot check gradients itself."""
    model, exact = copy.deepcopy(pico).bfloat16(), []
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))

    def look() -> None:
        exact.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters())))

    found = [step(fabric, wrapped, optimizer, seed, max_norm=0.0, before_update=look).grad_norm for seed in range(3)]
    assert found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_n7_nonfinite_step_moves_nothing(fabric, pico, value):
    """Neither weights nor moments nor step counters, and the report matches a step that was checked first."""
    messages = []
    for options in ({}, {"before_update": lambda: None}):
        model = copy.deepcopy(pico)
        wrapped, optimizer = fabric.setup(model, adamw(model))
        step(fabric, wrapped, optimizer)
        before = [tensor.clone() for tensor in tensors(model, optimizer)]
        model.transformer.h[0].norm_1.weight.register_hook(lambda gradient: gradient * value)
        with pytest.raises(GuardError, match="gradient norm (nan|inf), loss [0-9.]+ on rank 0, its samples") as error:
            step(fabric, wrapped, optimizer, seed=1, **options)
        assert all(map(torch.equal, before, tensors(model, optimizer)))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_other_optimizers_are_updated_after_the_check(fabric, pico):
    class Mine(torch.optim.AdamW):
        """Its step might ignore the scale."""

    made = [
        ("fused", True, adamw),
        ("not fused", False, lambda m: adamw(m, fused=False)),
        ("subclass", False, lambda m: Mine(m.parameters(), fused=True)),
        ("SGD", False, lambda m: torch.optim.SGD(m.parameters(), fused=True)),
    ]

    def check(_, expected, make):
        model = copy.deepcopy(pico)
        wrapped, optimizer = fabric.setup(model, make(model))
        before, seen = [p.detach().clone() for p in model.parameters()], []
        step(
            fabric, wrapped, optimizer,
            overlap=lambda: seen.append(all(map(torch.equal, before, model.parameters()))),
        )  # fmt: skip
        assert FusedUpdate.supports(fabric, optimizer) == expected and seen == [not expected]
        assert not all(map(torch.equal, before, model.parameters()))

    check_each(check, made)
    scaled = Fabric(accelerator="cpu", devices=1)
    scaled.strategy.precision.scaler = object()
    assert not FusedUpdate.supports(scaled, scaled.setup_optimizers(adamw(pico)))


class Waits(TorchDispatchMode):
    """Counts the operators for which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        if name in WAITS or any(t is not None and t.dtype == torch.bool for t in indices):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts the calls that read a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("every", slow_except([False], [False, True]))
def test_host_waits_once_per_step_for_every_family(fabric, monkeypatch, every):
    """On a CPU, with the loss as on an accelerator."""
    pytest.importorskip("transformers")
    from helpers.tiny_configs import HF_CONFIGS

    monkeypatch.setattr(loss, "_supervised_rows", lambda targets: (None, targets == -100))
    monkeypatch.setattr(loss, "_replace_inexact", lambda *_: None)

    def check(name):
        model = build_model(config_from_hf(json.loads(HF_CONFIGS[name]().to_json_string())))
        if name == "llama":
            add_lora(model, LoRAConfig(dora=True))
        wrapped, optimizer = fabric.setup(model, adamw(model))
        step(fabric, wrapped, optimizer)  # the first step fills tables and makes the optimizer's state
        with Waits() as waits, Reads() as reads:
            step(fabric, wrapped, optimizer, seed=1)
        assert not waits.found and reads.found == {"tolist": 1}, (waits.found, reads.found)

    check_each(check, HF_CONFIGS if every else ["llama", "gemma2", "gpt-oss", "qwen3-moe", "deepseek-v3"])


class Kernels(Waits):
    """Counts the operators that are kernels on CUDA, too."""

    n_kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        self.n_kernels += not (function.is_view or "empty" in name or name in _NO_KERNEL)
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_a_step_of_the_first_run_has_few_kernels_and_one_read(fabric, monkeypatch):
    """Of config_hub/pretrain/default.yaml, whose kernels take less time than their launches on a GPU."""
    monkeypatch.setattr(loss, "_supervised_rows", lambda targets: (None, targets == -100))
    monkeypatch.setattr(loss, "_replace_inexact", lambda *_: None)
    options = yaml.safe_load((ROOT / "config_hub/pretrain/default.yaml").read_text())
    config = replace(get_config(options["model_name"]), **options["model_config"]).with_vocab_size(4096)
    model, resolved = GPT(config), resolve_optimizer(OptimizerArgs(name="Muon"), PRETRAIN)
    inside = block_params(model, (Block,))
    muon = build_optimizer(model, resolved, 1e-3, "32-true", no_decay_params(model), in_blocks=inside)
    wrapped, optimizer = fabric.setup(model, muon)
    step(fabric, wrapped, optimizer)
    with Kernels() as kernels, Reads() as reads:
        one_step(fabric, wrapped, optimizer, [batch(1)], 1e-2, max_norm=1.0)
    assert not kernels.found and reads.found == {"tolist": 1}, (kernels.found, reads.found)
    assert kernels.n_kernels < 500


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_of_lora_on_uneven_rows_reads_once(fabric, pico, monkeypatch, is_packed):
    """With the loss and, for packed rows, the attention kernel of CUDA, which here computes nothing."""
    monkeypatch.setattr(loss, "_supervised_rows", lambda targets: (None, targets == -100))
    monkeypatch.setattr(loss, "_replace_inexact", lambda *_: None)
    monkeypatch.setattr(attention_dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention_dispatch, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_dispatch, "_passes", lambda case: True)

    def kernel(q, *_, **__):
        return q.clone(), q.new_zeros(q.shape[1::-1])

    monkeypatch.setattr(attention_kernels, "FLASH_FORWARD", kernel)
    monkeypatch.setattr(attention_kernels, "FLASH_BACKWARD", lambda grad, q, k, v, *_, **__: (q, k, v))
    add_lora(pico, LoRAConfig(dropout=0.1))
    wrapped, optimizer = fabric.setup(pico, adamw(pico))
    rows = PackedRows(RaggedRows(10)) if is_packed else RaggedRows(10)
    batches = [
        collate([rows[i], rows[i + 1], None], [i, i + 1, -1], [i, i + 1, -1], 0, Padding(64, None)) for i in range(4)
    ]
    one_step(fabric, wrapped, optimizer, batches[:1], 1e-2)
    with Waits() as waits, Reads() as reads:
        one_step(fabric, wrapped, optimizer, batches, 1e-2, max_norm=1.0)
    assert not waits.found and reads.found == {"tolist": 1}, (waits.found, reads.found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_device_is_waited_for_only_after_the_update(pico):
    fabric = single_device_fabric("cuda", "bf16-mixed")
    wrapped, optimizer = fabric.setup(pico, adamw(pico))
    for seed in range(2):
        step(fabric, wrapped, optimizer, seed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:  # forward, backward and update do not wait; overlap is called before the one wait
        step(fabric, wrapped, optimizer, 2, overlap=lambda: torch.cuda.set_sync_debug_mode("default"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
