"""A GPT has one Execution; no module of toolkit assigns another object's class, forward or config."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from helpers.initialize import initialize
from torch import nn

import toolkit
from toolkit.distributed.model_parts import cuts_of
from toolkit.distributed.tensor_parallel import split_model
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta
from toolkit.models.lora_config import LoRAConfig

PACKAGE = Path(toolkit.__file__).parent
CONFIG = ModelConfig(block_size=16, vocab_size=60, n_layer=2, n_head=4, n_query_groups=2, n_embd=32)
NAMES = ("forward", "__class__", "config")
MAYBE = rf"\.({'|'.join(NAMES)})\b[^(\n]*=[^=]|for \w+\.\w+ in|setattr"  # parsing all files takes seconds
EXEMPT = {
    "models/activation_checkpointing.py part.forward",  # a user-provided module's blocks have nothing else to change
    "training/build.py launch.config",  # of a run, not of a model
}


def assigned_on_others(source: str) -> set[str]:
    """Return the attributes in NAMES that a module assigns on another object than self."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in NAMES:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            found |= {
                f"{ast.unparse(node.args[0])}.{name}" for name in NAMES if repr(name) == ast.unparse(node.args[1])
            }
    return {name for name in found if not name.startswith("self.") or name.count(".") > 1}


def test_nobody_assigns_the_class_forward_or_config_of_another_object():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        names = assigned_on_others(source) if re.search(MAYBE, source) else ()
        found |= {f"{file.relative_to(PACKAGE).as_posix()} {name}" for name in names}
    assert not found - EXEMPT, "put another module in its place, or add a field to Execution"


@pytest.mark.parametrize(
    "code",
    ["m.forward = f", "self.model.config, x = y", "for m.config in (1, 2): pass", "setattr(m, '__class__', C)"],
)
def test_assignments_on_other_objects_are_detected(code):
    assert assigned_on_others(code) and re.search(MAYBE, code)
    assert not assigned_on_others("self.config = c; forward = m.forward; setattr(m, name, m.config)")


def test_forward_has_seven_arguments_and_two_return_shapes():
    parameters = [p for p in inspect.signature(GPT.forward).parameters.values() if p.name != "self"]
    assert len(parameters) <= 7 and all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    assert inspect.signature(GPT.forward).return_annotation == torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def test_an_execution_changes_by_name():
    model = GPT(CONFIG, seed=3)
    before = model.execution
    model.execute_with(uniform_length=16)
    assert (model.execution.uniform_length, before.uniform_length, model.seed) == (16, 0, 3)
    with pytest.raises(TypeError, match="uniform_lenght"):
        model.execute_with(uniform_lenght=16)
    for name in ("seed", "uses_kernels", "cuts", "row_loss"):  # without effect, if they were set on the model
        with pytest.raises(AttributeError, match=f"{name}: use execute_with"):
            setattr(model, name, 4)


@pytest.mark.parametrize("lora", [None, LoRAConfig(projection=True, mlp=True, head=True)], ids=["plain", "lora"])
def test_a_divided_model_keeps_its_config_and_names(lora):
    whole, part = adapted_on_meta(CONFIG, lora), adapted_on_meta(CONFIG, lora)
    split_model(part, 2)
    assert part.config == CONFIG
    assert list(part.state_dict()) == list(whole.state_dict())
    assert [type(m).__mro__[-3] for m in part.modules()] == [type(m).__mro__[-3] for m in whole.modules()]
    trained = [[name for name, p in model.named_parameters() if p.requires_grad] for model in (part, whole)]
    assert trained[0] == trained[1]
    for name, parameter in part.named_parameters():
        cut = cuts_of(part).get(name)
        assert whole.get_parameter(name).shape == (parameter.shape if cut is None else cut.shape)
    assert part.make_cache(3, 5)[0].keys.shape == (3, 1, 5, 8) and whole.make_cache(3, 5)[0].keys.shape == (3, 2, 5, 8)
    with pytest.raises(UserError, match="--tensor_parallel_size: this objective's loss needs all logits"):
        part.cross_entropy(torch.zeros(1, 2, 32), torch.zeros(1, 2, dtype=torch.int64), lambda *_: None)


class Earlier(GPT):
    """As a model of an extension was written for 0.1.0."""

    def forward(
        self, input_ids, labels=None, *, positions=None, documents=None, kv_cache=None, sequence_length=None,
        logits_to_keep=0, sample_keys=None,
    ):  # fmt: skip
        options = {"positions": positions, "documents": documents, "kv_cache": kv_cache}
        x, inputs = self.embed(input_ids, labels, sequence_length=sequence_length, **options)
        x, _ = self.run_blocks(x, range(self.config.n_layer), inputs)
        if labels is None:
            return self.logits(x[:, -logits_to_keep:])
        return self.cross_entropy(x, labels) + 0 * self.seed, (labels != -100).sum()


@torch.no_grad()
def test_a_model_and_an_objective_of_an_earlier_extension_run():
    earlier, model = Earlier(CONFIG).eval(), GPT(CONFIG).eval()
    initialize(earlier, 1)
    model.load_state_dict(earlier.state_dict())
    ids = torch.randint(60, (2, 9))
    assert torch.equal(earlier(ids, ids)[0], model(ids, ids)[0])
    cache = earlier.make_cache(2, 9)
    cached = [earlier(piece, kv_cache=cache, logits_to_keep=1) for piece in ids.split(4, dim=1)]
    torch.testing.assert_close(cached[-1], model(ids, logits_to_keep=1))
    log_probs, balancing_loss = model(input_ids=ids, labels=ids, log_probs=True)
    expected = nn.functional.cross_entropy(model(ids).mT, ids, reduction="none")
    torch.testing.assert_close(-log_probs, expected)
    assert balancing_loss == 0
