"""N3 under tensor parallelism: the same training as on one process, in real gloo processes."""

from dataclasses import replace

import pytest
import torch
from helpers.cases import check_each, n_steps, slow_except
from helpers.groups import Case, losses, run_group
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.memory import Memory, plan_memory

from toolkit.checkpoints.weights import load_weights
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.tensor_parallel import require_divisible
from toolkit.errors import UserError
from toolkit.models.families import get_config

NEOX = {
    "family": "gpt_neox", "bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP",
    "parallel_residual": True, "rotary_percentage": 0.25, "n_query_groups": 4, "tie_embeddings": False,
}  # fmt: skip
GEMMA = {
    "family": "gemma2", "norm_offset": True, "scale_embeddings": True, "post_attention_norm": True,
    "post_mlp_norm": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "sliding_window_size": 12,
    "sliding_window_indices": [1, 0], "attention_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
}  # fmt: skip
MODELS = {
    "llama": {"tie_embeddings": False}, "tied": {"tie_embeddings": True}, "neox": NEOX, "gemma": GEMMA,
    "qk-norm": {"family": "qwen3", "norm_qk": True}, "odd": {"tie_embeddings": True, "padded_vocab_size": 524},
}  # fmt: skip
TENSOR = ["--tensor_parallel_size", "2"]
CHECKPOINTING = "--train.activation_checkpointing"
SHARDED = ["--fsdp.state_dict_type", "sharded"]
PADDED = "padding on a CPU"
# name: (model, flags, ranks, nodes)
LAYOUTS = {name: (name, [], 2, 1) for name in MODELS} | {
    "2x2": ("llama", [], 4, 1),
    "2x2-tied-wrapped": ("tied", ["--fsdp.auto_wrap", "class", "--fsdp.wrap_classes", "CausalSelfAttention"], 4, 1),
    "2-nodes": ("neox", [], 4, 2),
    "2x2-accumulate": ("qk-norm", ["--fsdp.accumulate", "sharded"], 4, 1),
    "full": ("llama", [CHECKPOINTING, "full"], 2, 1),
    "selective": ("neox", [CHECKPOINTING, "selective"], 2, 1),
    "compiled": ("gemma", ["--compiler", "torch"], 2, 1),
    "2x2-odd": ("odd", [], 4, 1),
}


def flags(options: dict) -> list[str]:
    words = [word for name, value in options.items() for word in (f"--model_config.{name}", str(value))]
    return ["--precision", "32-true", *words]


def selected(request, test: str) -> list[str]:
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if item.originalname == test]
    return names + ["llama"] * any(item.originalname.startswith(("test_collectives", "test_plan")) for item in items)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_flags, request):
    """Run the layouts of the selected tests, and their models on one process."""
    folder, seen = tmp_path_factory.mktemp("tensor"), {}
    wanted = {name: LAYOUTS[name] for name in selected(request, "test_n3")}
    models = sorted({model for model, *_ in wanted.values()})
    groups = {1: [Case(f"{name}-1", flags(MODELS[name]), look_at="gradients") for name in models], 2: [], 4: []}
    for name, (model, options, size, nodes) in wanted.items():
        words = [*flags(MODELS[model]), *TENSOR, *options]
        fault = PADDED if model == "odd" else None
        groups[size].append(Case(name, words, nodes=nodes, fault=fault, look_at="gradients collectives"))
    flags_of_all = [*shared_flags, "--train.max_steps", str(n_steps(request))]
    for size, cases in groups.items():
        seen |= run_group(folder, size, cases, flags_of_all)
    return folder, seen


@pytest.mark.parametrize("name", slow_except(["llama"], LAYOUTS))
def test_n3(runs, name):
    folder, seen = runs
    one = f"{LAYOUTS[name][0]}-1"
    for rank in seen[name]:
        assert rank["initial"] == seen[one][0]["initial"]  # bit-equal, by two sums of each weight
    assert losses(folder / name) == pytest.approx(losses(folder / one), rel=1e-5)
    gradients, reference = (torch.load(folder / f"{run}.gradients") for run in (name, one))
    assert gradients.keys() == reference.keys()
    total = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for key in reference:  # key biases have a gradient of zero
        assert (gradients[key] - reference[key]).norm() <= 1e-6 * max(reference[key].norm(), 1e-3 * total), key
    weights, known = load_weights(folder / name / "final"), load_weights(folder / one / "final")
    assert {key: value.shape for key, value in weights.items()} == {key: value.shape for key, value in known.items()}


def test_collectives_of_a_step_are_counted(runs):
    """Per micro-batch on the tensor dimension: the output and the gradient of the input of each attention and MLP, the
    embedding, the gradient of the head's input, and two of the chunk of logits. Per step: the gradients of the norms,
    and the squares of the gradients; over the shards the same squares; over all ranks the norm and the loss."""
    _, seen = runs
    (counts,) = {tuple(sorted(rank["collectives"].items())) for rank in seen["llama"]}
    assert dict(counts) == {"gloo:all_reduce": 8 * (2 * 4 + 1 + 1 + 2) + 2 + 1 + 2}


def test_plan_has_the_part_of_each_rank(runs):
    """Counted in the middle of a step. Activations inside attention and MLP halve, the residual stream does not."""
    _, seen = runs
    config = replace(get_config("pico-llama"), tie_embeddings=False).with_vocab_size(300)

    def plan(tensor: int) -> Memory:
        strategy = StrategyPlan("fsdp", "NO_SHARD", Layout(tensor=tensor), "")
        return plan_memory(MemoryInputs(config, "32-true", strategy, 1, 8, 32, {"name": "AdamW"}, "cpu"))

    half, complete = plan(2), plan(1)
    for rank in seen["llama"]:
        assert half.weights == rank["parameters"] and half.gradients == rank["gradients"]
        assert half.optimizer == pytest.approx(rank["moments"], rel=0.01)
    assert complete.weights == seen["llama-1"][0]["parameters"]
    assert complete.activations / 2 < half.activations < 0.8 * complete.activations
    assert half.logits < 0.7 * complete.logits


def test_sizes_that_do_not_divide_are_one_line():
    def check(name: str, size: int, message: str) -> None:
        with pytest.raises(UserError) as error:
            require_divisible(get_config(name), size)
        assert str(error.value) == f"--tensor_parallel_size {size}: does not divide the {message}"

    check_each(check, [
        ("Llama-3.2-1B", 16, "8 key/value heads of Llama-3.2-1B; use one of 1, 2, 4, 8"),
        ("pythia-160m", 8, "12 attention heads of pythia-160m; use one of 1, 2, 3, 4, 6, 12"),
        ("gpt2", 2, "50257 rows of the embedding of gpt2; use 1, or set --model_config.padded_vocab_size 50258"),
        ("falcon-7b", 2, "71 attention heads of falcon-7b; use 1"),
    ])  # fmt: skip
