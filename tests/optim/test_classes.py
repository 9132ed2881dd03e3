import pytest
import torch
from toolkit_plan.measure.optimizer import state_bytes
from torch import nn

from toolkit.config import PRETRAIN, OptimizerArgs
from toolkit.errors import UserError, require_option
from toolkit.optim import TORCH_OPTIMIZERS
from toolkit.optim.classes import build_optimizer, resolve_optimizer
from toolkit.optim.groups import no_decay_params, parameter_groups


class Small(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("tied", [False, True])
def test_n5_biases_norms_and_embeddings_do_not_decay(tied):
    model = Small(tied)
    groups = parameter_groups(model, 0.1, no_decay_params(model))
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert names == ({"proj.weight"} if tied else {"proj.weight", "lm_head.weight"})
    grouped = [p for g in parameter_groups(model, 0.1, no_decay_params(model)) for p in g["params"]]
    assert len(grouped) == len(list(model.parameters()))


def test_frozen_parameters_are_in_no_group():
    model = Small()
    model.wte.requires_grad_(False)
    groups = parameter_groups(model, 0.1, no_decay_params(model))
    assert all(p is not model.wte.weight for g in groups for p in g["params"])


def build(precision="32-true", **options):
    resolved = resolve_optimizer(OptimizerArgs(**options), PRETRAIN)
    model = Small()
    return build_optimizer(model, resolved, 1e-3, precision, no_decay_params(model))


def test_not_fused_under_fp16_mixed_precision():
    assert not build("16-mixed").param_groups[0]["fused"]


def test_adamw_has_the_command_defaults_and_is_fused():
    optimizer = build()
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["fused"]) == (1e-3, 0.1, (0.9, 0.95), True)


@pytest.mark.parametrize("name", ["SGD", "sgd", "NAdam", "RMSprop", "Adafactor", "Lion"])
def test_any_class_by_name(name):
    if name == "Lion":
        with pytest.raises(UserError, match="--optimizer.name Lion"):
            build(name=name)
    else:
        assert type(build(name=name)).__name__.lower() == name.lower()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "AdmaW"}, "did you mean.*AdamW"),
        ({"name": "LBFGS"}, "--optimizer.name LBFGS"),
        ({"name": "SGD", "betas": (0.9, 0.99)}, "--optimizer.betas"),
        ({"options": {"momentun": 0.9}}, "--optimizer.options momentun"),
        ({"eps": 0.5, "options": {"eps": 1e-8}}, "--optimizer.eps 0.5: is also in --optimizer.options; remove one"),
    ],
)
def test_errors_name_the_flag(options, message):
    with pytest.raises(UserError, match=message) as error:
        build(**options)
    assert "\n" not in str(error.value)


def test_options_are_passed_to_the_class():
    assert build(name="SGD", options={"momentum": 0.9, "nesterov": True}).param_groups[0]["momentum"] == 0.9


def test_the_names_for_checks_without_torch_are_those_of_torch():
    classes = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    assert {*TORCH_OPTIMIZERS} == classes - {"Muon", "Optimizer"}  # Muon is ours


def test_messages_have_booleans_as_on_the_command_line():
    args = OptimizerArgs(name="Adafactor", options={"amsgrad": True})
    with pytest.raises(UserError, match="^--optimizer.options amsgrad true: Adafactor takes no such option"):
        resolve_optimizer(args, PRETRAIN)
    with pytest.raises(UserError, match="^--profiler.with_stack true: has no effect"):
        require_option(False, "profiler.with_stack", True, "has no effect")


def test_values_that_a_class_refuses_are_one_line():
    pytest.importorskip("pytorch_optimizer")
    for name, options, reason in (
        ("SOAP", {"precondition_frequency": 0}, "precondition_frequency"),
        ("AdamW", {"eps": -1}, "Invalid epsilon value: -1"),
        ("SGD", {"momentum": -1}, "Invalid momentum value: -1"),
    ):
        resolved = resolve_optimizer(OptimizerArgs(name=name, options=options), PRETRAIN)
        line = f"^--optimizer.name {name}: .*{reason}.*; correct --optimizer.options$"
        with pytest.raises(UserError, match=line):  # where a run measures its memory, before it builds its optimizer
            state_bytes(resolved, torch.float32, (4, 4))
        with pytest.raises(UserError, match=line):
            build_optimizer(nn.Linear(4, 4), resolved, 1e-3, "32-true", frozenset())
