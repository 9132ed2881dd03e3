"""--train.fp8 on a CPU, which emulates it: what is saved, resumed and refused, and how far the curve is from bf16."""

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from helpers.compare_runs import assert_same_weights, losses

from tests.training.test_run import arguments
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.errors import UserError
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.fp8 import convert_to_fp8, describe_fp8, fp8_layers, require_fp8
from toolkit.models.gpt import GPT
from toolkit.training.engine import run_training

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 16, "n_expert_per_token": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Runs of 4 steps, with a checkpoint of the second, by --train.fp8."""
    folder = tmp_path_factory.mktemp("fp8")
    for kind in ("none", "tensorwise", "rowwise"):
        train = {"max_steps": 4, "save_interval": 2, "fp8": kind}
        run_training(arguments(corpus, folder / kind, train=train, precision="bf16-mixed"))
    return folder


def test_a_checkpoint_has_the_names_dtypes_and_bytes_of_bf16(runs):
    plain = load_weights(runs / "none" / "final")
    for kind in ("tensorwise", "rowwise"):
        weights = load_weights(runs / kind / "final")
        assert {k: (t.dtype, t.shape) for k, t in weights.items()} == {k: (t.dtype, t.shape) for k, t in plain.items()}
        assert any(not torch.equal(weights[name], plain[name]) for name in plain)
        for path in (runs / "none" / "final").rglob("*.pth"):
            other = runs / kind / path.relative_to(runs / "none")
            assert other.stat().st_size == path.stat().st_size and load_state(other).keys() == load_state(path).keys()
        assert f"fp8: {kind}" in (runs / kind / "final" / "hyperparameters.yaml").read_text()


def test_s2_a_resumed_run_has_the_same_bits(runs, corpus, tmp_path):
    for kind in ("tensorwise", "rowwise"):
        checkpoint = str(runs / kind / "step-00000002")
        train = {"max_steps": 4, "fp8": kind}
        run_training(arguments(corpus, tmp_path / kind, train=train, precision="bf16-mixed", resume=checkpoint))
        assert_same_weights(tmp_path / kind / "final", runs / kind / "final")


def test_a_resumed_run_may_not_change_it(runs, corpus, tmp_path):
    checkpoint = str(runs / "none" / "step-00000002")
    train = {"max_steps": 4, "fp8": "rowwise"}
    with pytest.raises(
        UserError, match="^--precision bf16-mixed --train.fp8 rowwise: .* trained with --precision bf16-mixed;"
    ):
        run_training(arguments(corpus, tmp_path, train=train, precision="bf16-mixed", resume=checkpoint))


def test_refusals_are_one_line(monkeypatch):
    def refused(message: str, device: str) -> None:
        with pytest.raises(UserError) as error:
            require_fp8("tensorwise", device)
        assert str(error.value).startswith(f"--train.fp8 tensorwise: needs {message}") and "\n" not in str(error.value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        refused("a GPU of compute capability 8.9 or higher", "cuda")
    refused("a GPU of compute capability 8.9", "mps")
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        require_fp8("tensorwise", "cuda")
    require_fp8("tensorwise", "cpu")
    monkeypatch.setitem(sys.modules, "torchao", None)
    refused("torchao; run: pip install 'torchao>=", "cpu")


def test_which_layers_are_in_fp8():
    """The router has 16 rows, and one matrix has a size that is not a multiple of 16."""
    config = replace(get_config("pico-llama"), intermediate_size=168, n_layer=2, moe_indices=[0, 1], **EXPERTS)
    with torch.device("meta"):
        model = GPT(config.with_vocab_size(512))
    names = [f"transformer.h.{i}.attn.{name}" for i in range(2) for name in ("qkv", "proj")]
    others = [f"transformer.h.0.mlp.{name}" for name in ("fc_1", "fc_2", "proj")]
    assert fp8_layers(model) == dict.fromkeys(names, True) | dict.fromkeys(others, False)
    assert describe_fp8(model, "rowwise", "cpu") == (
        f"fp8: rowwise in 4 of 7 linear layers of the blocks; in bf16: {', '.join(others)}, experts; "
        "emulated on a CPU: slow"
    )
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    convert_to_fp8(model, "rowwise", "cuda")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"] == names
    small = replace(get_config("pico-llama"), n_embd=40, n_head=4, intermediate_size=40, head_size=10)
    with torch.device("meta"), pytest.raises(UserError, match="^--train.fp8 rowwise: no layer has sizes"):
        convert_to_fp8(GPT(small.with_vocab_size(512)), "rowwise", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_and_compiled_blocks_have_the_same_gradients(mode, pico):
    """On a CPU, a compiled block rounds differently; recomputation changes no bit."""
    ids = torch.arange(64).view(2, 32) % 50

    def gradients(mode: str, is_compiled: bool = False) -> list[torch.Tensor]:
        checkpoint_blocks(pico, (Block,), mode)
        for block in pico.blocks if is_compiled else ():
            block.compile(backend="aot_eager")
        pico.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pico(ids, ids)[0].backward()
        return [p.grad.clone() for p in pico.parameters()]

    convert_to_fp8(pico, "tensorwise", "cpu")
    plain = gradients("none")
    for is_compiled in (False, True):
        for a, b in zip(gradients(mode, is_compiled), plain, strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_the_curve_of_200_steps_is_as_near_to_bf16_as_bf16_to_fp32(corpus, tmp_path):
    """In both precisions, measured by how far bf16-true is from fp32.

    At every 20th step, fp8 is within the largest difference so far; on average over all steps, within half of it. At a
    single step, bf16-true may meet fp32 by chance.
    """
    curves = {}
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        for kind in ("none",) if precision == "32-true" else ("none", "tensorwise", "rowwise"):
            train = {"max_steps": 200, "micro_batch_size": 8, "save_interval": 0, "fp8": kind}
            out = tmp_path / f"{precision}-{kind}"
            run_training(arguments(corpus, out, train=train, evaluation={"interval": 0}, precision=precision))
            curves[precision, kind] = torch.tensor(losses(out))

    exact = curves["32-true", "none"]
    assert len(exact) == 200 and exact[-1] < exact[0] - 1
    allowed = (curves["bf16-true", "none"] - exact).abs()
    assert allowed.max() < 0.1 * exact[0]
    for precision in ("bf16-true", "bf16-mixed"):
        for kind in ("tensorwise", "rowwise"):
            found = (curves[precision, kind] - curves[precision, "none"]).abs()
            assert 0 < found.mean() <= allowed.mean() / 2, (precision, kind)
            assert (found <= allowed.cummax(0).values)[19::20].all(), (precision, kind)
