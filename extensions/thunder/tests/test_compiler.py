"""``--compiler thunder``: the same numbers, names and files as without it."""

import copy
import importlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from toolkit_thunder import ThunderDDPStrategy
from toolkit_thunder.compiler import compile_blocks
from toolkit_thunder.options import ThunderArgs

from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.ui.loggers import read_metrics

pytestmark = pytest.mark.skipif(find_spec("thunder") is None, reason="lightning-thunder is not installed")

SIZES = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 4, "head_size": 8, "intermediate_size": 48,
    "block_size": 32, "vocab_size": 64, "padded_vocab_size": 64,
}  # fmt: skip


YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16}


def test_strategies_have_litgpts_import(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    module = importlib.import_module("extensions.thunder.pretrain")
    module.ThunderFSDPStrategy(sharding_strategy="ZERO3", bucketing_strategy="BLOCK", state_dict_type="full", jit=False)
    assert module.ThunderDDPStrategy is ThunderDDPStrategy


def tiny(name: str, **changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(replace(get_config(name), **SIZES | changes))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.1
    return model


def compiled(model: GPT, **options) -> GPT:
    model = copy.deepcopy(model)
    compile_blocks(model, (Block,), 0, {"thunder": ThunderArgs(**options)})
    return model


def inputs(packed: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (2, 17), generator=generator)
    at = torch.arange(16)
    documents = {"documents": (at // 5).repeat(2, 1), "positions": (at % 5).repeat(2, 1)} if packed else {}
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], **documents}


def require_equal(eager: GPT, model: GPT, given: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare losses and gradients."""
    results = []
    for each in (eager, model):
        loss, n_tokens = each(**given)
        (loss / n_tokens).backward()
        results.append(loss.detach())
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=0)
    assert list(model.state_dict()) == list(eager.state_dict())
    for (name, own), (_, reference) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert (own.grad is None) == (reference.grad is None), name
        if reference.grad is not None:
            limit = tolerance * reference.grad.abs().max().item()
            torch.testing.assert_close(own.grad, reference.grad, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


def test_llama_forward_and_backward_equal_eager():
    eager = tiny("Llama-3.2-1B", n_query_groups=2)
    model = compiled(eager, executors="sdpa")
    assert len({id(block.forward._kernel) for block in model.blocks}) == 1  # compiled once
    require_equal(eager, model, inputs())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "packed"),
    [
        ("gpt2", {}, False),
        ("Llama-3.2-1B", {"n_query_groups": 2}, True),
        ("Gemma-2-2b", {"sliding_window_indices": [1, 0], "sliding_window_size": 4}, False),
        ("pythia-70m", {"rotary_percentage": 0.5}, False),
        ("Llama-3.2-1B", {"norm_qk": True}, False),
        ("Llama-3.2-1B", {"query_scaling_beta": 0.2, "rope_adjustments": YARN}, False),
    ],
)
def test_families_equal_eager(name, changes, packed):
    eager = tiny(name, **changes)
    model = compiled(eager)
    require_equal(eager, model, inputs(packed))
    with torch.no_grad():  # another compiled function, as in validation
        ids = inputs()["input_ids"]
        torch.testing.assert_close(model.eval()(ids), eager.eval()(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_mixed_precision_is_as_close_to_fp32_as_eager():
    eager = tiny("Llama-3.2-1B")
    losses = []
    for model, enabled in ((eager, False), (eager, True), (compiled(eager), True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(float(model(**inputs())[0].detach()))
    exact, reference, own = losses
    assert abs(own - exact) <= 2 * abs(reference - exact) + 1e-3 * exact


@pytest.mark.slow
def test_what_thunder_cannot_compile_is_one_line(capsys):
    experts = GPT(replace(get_config("Mixtral-8x7B-v0.1"), **SIZES, n_expert=4, n_expert_per_token=2))
    with pytest.raises(UserError, match="--compiler thunder: cannot compile expert routing"):
        compiled(experts)
    with pytest.raises(UserError, match="--thunder.executors nonsense: is not available; choose from .*sdpa"):
        compiled(tiny("gpt2"), executors="nonsense")


RUN = ["pretrain", "pico-llama", "--data", "SyntheticTokens", "--devices", "1", "--accelerator", "cpu"]
RUN += ["--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--train.max_steps", "3"]
RUN += ["--train.max_seq_length", "16", "--train.learning_rate", "1e-3", "--model_config.n_layer", "2"]


@pytest.mark.slow
def test_run_and_resume(tmp_path):
    run = [*RUN, "--compiler", "thunder", "--train.save_interval", "2"]
    assert main([*RUN, "--out_dir", str(tmp_path / "eager")]) == 0
    assert main([*run, "--out_dir", str(tmp_path / "a")]) == 0
    step = tmp_path / "a" / "step-00000002"
    assert main([*run, "--out_dir", str(tmp_path / "b"), "--resume", str(step)]) == 0
    eager, complete, resumed = (load_weights(tmp_path / name / "final") for name in ("eager", "a", "b"))
    assert complete.keys() == eager.keys()
    assert all(torch.equal(complete[name], resumed[name]) for name in complete)
    losses, expected = (
        [row["loss"] for row in read_metrics(tmp_path / name / "logs/metrics.csv")] for name in ("a", "eager")
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert "toolkit-thunder" in (step / "hyperparameters.yaml").read_text()
