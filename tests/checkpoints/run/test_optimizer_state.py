"""An optimizer's state back from disk: bit for bit, in one copy, and nothing that is not what was saved."""

import copy
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from helpers.groups import free_port, start_ranks
from helpers.peak_memory import with_path
from helpers.saving import save_sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import full_state, sharded_state
from toolkit.checkpoints.weights import load_state, save_state
from toolkit.distributed.mesh import Layout, data_mesh
from toolkit.distributed.shards import add_shards, give_gradients, shard_of
from toolkit.errors import UserError


class Growing(torch.optim.Optimizer):
    """Finds its step size in the groups, as Prodigy does, from what this rank holds; ``momentum`` adds state."""

    def __init__(self, params, lr=0.1, momentum=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "d": 1e-3, "k": 0, "history": []})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            grown = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["d"] = max(group["d"], 1e-2 * grown / (1 + group["k"]))
            group["k"] += 1
            group["history"] = [*group["history"], group["d"]]  # grows during training
            group["d_max"] = max(group.get("d_max", 0.0), group["d"])  # not there before the first step
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if group["momentum"]:
                    state = self.state[p]
                    if not state:
                        zeros = torch.tensor(0.0)
                        state.update(start=p.flatten().clone() if p.any() else zeros, mean=torch.zeros_like(p), n=0)
                    state["n"] += 1
                    update = state["mean"].mul_(group["momentum"]).add_(p.grad)
                    update = (
                        update + 0.1 * (p - state["start"].view(p.shape if state["start"].dim() else ())) / state["n"]
                    )
                p.sub_(update, alpha=group["lr"] * group["d"])


MAKERS = {
    "groups alone": lambda params: Growing(params),
    "groups and state": lambda params: Growing(params, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
}
OTHERS = {
    name: lambda params, name=name: getattr(torch.optim, name)(params, lr=0.01)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
}


def build(name: str, mesh=None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    if mesh is None:
        nn.init.zeros_(model[2].bias)
    else:
        # a vector, as under mixed precision; not of an optimizer whose steps differ by rank
        fully_shard(model, mesh=mesh, ignored_params={model[2].bias} if name in ("AdamW", "SGD") else None)
        add_shards(model)
    params = list(map(shard_of, model.parameters()))
    return model, (MAKERS | OTHERS)[name]([{"params": params[::2]}, {"params": params[1::2]}])


def train(model, optimizer, steps) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=draw)).square().sum().backward()
        give_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def save(model, optimizer, kind, folder):
    """Write the state, as a run does, and return the weights."""
    weights, _ = full_state(model, optimizer, {})
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    if kind == "full":
        saved = full_state(model, optimizer, {})[1]
    else:
        _, tensors, saved = sharded_state(model, optimizer, {})
        save_sharded(tensors, folder / "optimizer")
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_state({"optimizer": saved}, folder / "state.pth")
    if dist.is_initialized():
        dist.barrier()
    return weights


def load(model, optimizer, folder, change=None) -> None:
    saved = load_state(folder / "state.pth")["optimizer"]
    if change is not None:
        saved = copy.deepcopy(saved)
        saved = change(saved) or saved
    load_optimizer(model, optimizer, saved, folder / "state.pth", folder / "optimizer", may_be_empty=False)


def resumes_bit_for_bit(name, kind, folder, mesh=None) -> bool:
    folder.mkdir(exist_ok=True)
    model, optimizer = build(name, mesh)
    train(model, optimizer, range(3))
    weights = save(model, optimizer, kind, folder)
    other, resumed = build(name, mesh)
    set_model_state_dict(other, weights, options=StateDictOptions(full_state_dict=True))
    load(other, resumed, folder)
    for pair in ((model, optimizer), (other, resumed)):
        train(*pair, range(3, 6))
    pairs = zip(map(shard_of, model.parameters()), map(shard_of, other.parameters()), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    plain = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return same and plain == [{k: v for k, v in group.items() if k != "params"} for group in resumed.param_groups]


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("name", MAKERS | OTHERS)
def test_s2_optimizers_resume_bit_for_bit(tmp_path, name, kind):
    assert resumes_bit_for_bit(name, kind, tmp_path / "run")


def rank_main(rank, port, folder) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = data_mesh(Layout(shard=2), "cpu")
    found = {}
    for name in MAKERS:
        for kind in ("full", "sharded"):
            found[f"{name}, {kind}"] = resumes_bit_for_bit(name, kind, folder / f"{name}-{kind}", mesh)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # or gloo's threads, about to free the last tensors, meet a Python that is going down


@pytest.mark.slow
def test_s2_optimizers_resume_bit_for_bit_on_two_ranks(tmp_path):
    start_ranks(rank_main, (free_port(), tmp_path), 2)
    expected = {f"{name}, {kind}": True for name in MAKERS for kind in ("full", "sharded")}
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [expected, expected]


# Prints by how many times the weights' bytes memory rose at its highest, and after, while a state was loaded.
MEASURE = """
import gc, sys, torch
from pathlib import Path
from helpers.peak_memory import rise
from torch import nn
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from helpers.saving import save_sharded
from toolkit.checkpoints.run.state_dicts import full_state, sharded_state
from toolkit.checkpoints.weights import load_state, save_state

torch.set_num_threads(1)
folder = Path(sys.argv[1])

def build():
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(24)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

def save(kind):
    model, optimizer = build()
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    if kind == "full":
        saved = full_state(model, optimizer, {})[1]
    else:
        _, tensors, saved = sharded_state(model, optimizer, {})
        save_sharded(tensors, folder / "optimizer")
    save_state({"optimizer": saved}, folder / "state.pth")

def load(model, optimizer):
    saved = load_state(folder / "state.pth")["optimizer"]
    load_optimizer(model, optimizer, saved, folder / "state.pth", folder / "optimizer", False)

for kind in sys.argv[2:]:
    save(kind)
    gc.collect()
    model, optimizer = build()
    peak, after, _ = rise(load, model, optimizer)
    size = sum(p.nbytes for p in model.parameters())
    print(kind, peak / size, after / size)
    del model, optimizer
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_m3_loading_holds_one_set_of_moments(tmp_path, kind):
    """Two times the weights' bytes, and a few tensors of the 24; a second set would make it four."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path), kind]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    print(measured.stdout)
    for line in measured.stdout.splitlines():
        peak, after = map(float, line.split()[1:])
        assert 1.9 < after <= peak < 2.6


# ---- files that are not what was saved


def edit(path, value):
    """Set or delete one entry, which the path leads to."""

    def change(saved):
        *way, last = path
        for key in way:
            saved = saved[key]
        if value is None:
            del saved[last]
        else:
            saved[last] = value

    return change


FULL = {
    "a list": (lambda saved: [1, 2], "optimizer: malformed"),
    "no state": (edit(["state"], None), "optimizer: malformed"),
    "state is a list": (edit(["state"], []), "optimizer: malformed"),
    "empty": (edit(["state"], {}), "missing optimizer state of 0.weight and 3 more"),
    "without any": (
        lambda saved: saved.update(state={}, without_state=["0.weight", "0.bias", "2.weight", "2.bias"]),
        "missing optimizer state of 0.weight",
    ),
    "one missing": (edit(["state", "2.weight"], None), "missing optimizer state of 2.weight"),
    "one unknown": (edit(["state", "4.weight"], {}), "optimizer state of '4.weight': the optimizer has no such"),
    "a name that is a number": (edit(["state", 0], {}), "optimizer: malformed"),
    "an entry that is a list": (edit(["state", "0.weight"], [1]), "optimizer: malformed"),
    "moment missing": (edit(["state", "0.weight", "exp_avg"], None), "state of 0.weight: exp_avg is missing"),
    "moment unknown": (edit(["state", "0.weight", "exp"], 3), "state of 0.weight: 'exp' is unknown to"),
    "transposed": (edit(["state", "0.weight", "exp_avg"], torch.zeros(6, 5)), r"exp_avg has shape \(6, 5\)"),
    "a number": (edit(["state", "0.weight", "exp_avg"], torch.tensor(0.0)), r"exp_avg has shape \(\)"),
    "a plain number": (edit(["state", "0.weight", "exp_avg"], 0.0), "'exp_avg' is 0.0, not a tensor"),
    "a string": (edit(["state", "0.weight", "step"], "3"), "'step' is '3', not a tensor"),
    "a vector of steps": (edit(["state", "0.weight", "step"], torch.zeros(30)), r"step has shape \(30,\)"),
    "other type": (edit(["state", "0.weight", "exp_avg"], torch.zeros(5, 6).double()), "exp_avg has dtype"),
    "sparse": (edit(["state", "0.weight", "exp_avg"], torch.zeros(5, 6).to_sparse()), "exp_avg' is a tensor"),
    "groups are a number": (edit(["param_groups"], 3), "optimizer: malformed"),
    "one group": (lambda saved: saved["param_groups"].pop() and None, "has 1 param_groups, this run 2; resume with"),
    "mixed groups": (
        lambda saved: saved["param_groups"][0]["params"].append(saved["param_groups"][1]["params"].pop()),
        "group 0 does not match the parameters",
    ),
    "group without names": (edit(["param_groups", 0, "params"], None), "optimizer: malformed"),
}  # fmt: skip


@pytest.mark.parametrize("case", FULL)
def test_mismatched_state_is_a_one_line_error(tmp_path, case):
    model, optimizer = build("AdamW")
    train(model, optimizer, range(2))
    save(model, optimizer, "full", tmp_path)
    change, message = FULL[case]
    with pytest.raises(UserError, match=message) as error:
        load(*build("AdamW"), tmp_path, change)
    assert str(error.value).startswith(f"{tmp_path / 'state.pth'}: ") and "\n" not in str(error.value)


def test_malformed_groups_and_other_shapes_are_a_one_line_error(tmp_path):
    model, optimizer = build("groups and state")
    train(model, optimizer, range(2))
    save(model, optimizer, "full", tmp_path)
    for path, value, message in (
        (["param_groups_by_rank"], [3], "optimizer: malformed"),
        (["state", "0.weight", "mean"], 3, r"0.weight: 'mean' is 3, not a tensor of shape \(5, 6\)"),
        (["state", "0.weight", "mean"], torch.zeros(6, 5), r"0.weight: mean has shape \(6, 5\)"),
    ):
        with pytest.raises(UserError, match=message):
            load(*build("groups and state"), tmp_path, edit(path, value))


SHARDED = {
    "empty": (lambda tensors: tensors.clear(), "missing optimizer state of 0.weight and 3 more"),
    "one missing": (lambda tensors: tensors.pop("0.weight|exp_avg"), "state of 0.weight: exp_avg is missing"),
    "one unknown": (lambda tensors: tensors.update({"5.bias|step": torch.ones(3)}), "state of '5.bias'"),
    "no key": (lambda tensors: tensors.update({"step": torch.ones(3)}), "state of ''"),
    "transposed": (lambda tensors: tensors.update({"0.weight|exp_avg": torch.ones(6, 5)}), r"exp_avg has shape"),
    "other type": (lambda tensors: tensors.update({"0.weight|exp_avg": torch.ones(5, 6).half()}), r"has dtype"),
}


@pytest.mark.parametrize("case", SHARDED)
def test_mismatched_shards_are_a_one_line_error(tmp_path, case):
    model, optimizer = build("AdamW")
    train(model, optimizer, range(2))
    _, tensors, saved = sharded_state(model, optimizer, {})
    SHARDED[case][0](tensors)
    save_sharded(tensors, tmp_path / "optimizer")
    with pytest.raises(UserError, match=SHARDED[case][1]) as error:
        load_optimizer(*build("AdamW"), saved, tmp_path / "state.pth", tmp_path / "optimizer", False)
    assert str(error.value).startswith(str(tmp_path / "optimizer"))
    values = saved | {"values": [3]}
    with pytest.raises(UserError, match="optimizer: malformed"):
        load_optimizer(*build("AdamW"), values, tmp_path / "state.pth", tmp_path / "optimizer", False)


def test_options_come_from_the_run(tmp_path):
    """Of torch's optimizers nothing in the groups is a result; the rate is the schedule's for all."""
    for name, changed in (("AdamW", {"lr": 7.0, "weight_decay": 9.0, "maximize": True}), ("groups alone", {"lr": 7.0})):
        model, optimizer = build(name)
        train(model, optimizer, range(2))
        save(model, optimizer, "full", tmp_path)
        resumed = build(name)
        before = [{k: group[k] for k in changed} for group in resumed[1].param_groups]
        load(*resumed, tmp_path, lambda saved, changed=changed: saved["param_groups"][0].update(changed))
        assert [{k: group[k] for k in changed} for group in resumed[1].param_groups] == before


def test_a_parameter_without_gradients_has_no_state(tmp_path):
    model, optimizer = build("AdamW")
    model[2].bias.requires_grad_(False)
    train(model, optimizer, range(2))
    for kind in ("full", "sharded"):
        (tmp_path / kind).mkdir()
        save(model, optimizer, kind, tmp_path / kind)
        other, resumed = build("AdamW")
        load(other, resumed, tmp_path / kind)
        assert len(resumed.state) == 3 and not resumed.state.get(other[2].bias)
