"""Optimizers on sharded weights: the same training as one process, and state that resumes on any layout."""

from pathlib import Path

import pytest
import torch
from benchmark_checkpointing import LiveBytes
from helpers.cases import check_each, n_steps
from helpers.compare_runs import copy_without, losses, relative
from helpers.groups import Case, free_port, run_group, start_ranks
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.optimizer import optimizer_bytes, update_bytes
from toolkit_plan.measure.parameters import stored_parameters
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import full_state
from toolkit.checkpoints.weights import load_weights
from toolkit.distributed import ranks
from toolkit.distributed.mesh import Layout, data_mesh
from toolkit.distributed.replicas import require_equal_replicas
from toolkit.distributed.shards import add_shards, give_gradients, shard_of
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.optim.adafactor import ShardedAdafactor
from toolkit.optim.classes import build_optimizer
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.optim.hybrid import Muon

WIDE = ["--model_config.n_embd", "256", "--model_config.head_size", "64", "--model_config.intermediate_size", "512"]
OPTIMIZERS = {
    "muon": ["--optimizer.name", "Muon"],
    "adafactor": ["--optimizer.name", "Adafactor", "--train.learning_rate", "0.1"],
    "moments": ["--optimizer.state_dtype", "bf16"],
    "muon-moments": ["--optimizer.name", "Muon", "--optimizer.state_dtype", "bf16"],
    "8bit": ["--optimizer.name", "AdamW8bit", *WIDE],
}
LAYOUTS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2), "ddp": (2, 1)}  # ranks, nodes
MORE = {
    "": [],
    "accumulate": ["--fsdp.accumulate", "sharded"],
    "grad-op": ["--fsdp.sharding_strategy", "SHARD_GRAD_OP"],
    "sharded-state": ["--fsdp.state_dict_type", "sharded"],
    "offload": ["--fsdp.cpu_offload", "true"],
}
SAME = [(name, layout, "") for name in OPTIMIZERS for layout in ("2", "4", "2x2")]
SAME += [(name, "2", more) for name in ("muon", "adafactor") for more in MORE if more]
RESUMED = [(name, source) for name in OPTIMIZERS for source in ("1", "2", "2-sharded-state")]
ALWAYS = [("muon", "2", "")]


def case_of(name: str, layout: str, more: str = "", source: str = "") -> Case:
    strategy = ["--strategy", {"1": "auto", "ddp": "ddp"}.get(layout, "fsdp")]
    flags = [*OPTIMIZERS[name], *strategy, *MORE[more], "--train.save_interval", "10", "--train.keep_last", "0"]
    flags += ["--resume", "auto"] if source else []
    fault = "offload on a CPU" if more == "offload" else None
    return Case("-".join(filter(None, (name, source, layout, more))), flags, LAYOUTS[layout][1], fault)


def run_all(folder, cases: list[tuple[str, ...]], shared: list[str]) -> None:
    for size in (1, 2, 4):
        run_group(folder, size, [case_of(*case) for case in cases if LAYOUTS[case[1]][0] == size], shared)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared_flags, request):
    """Run the cases of the selected tests and the runs on one process that they are compared with."""
    folder = tmp_path_factory.mktemp("sharded-optimizers")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted, resumed = set(), []
    for values in (item.callspec.params for item in items):
        if "source" in values:
            wanted.add((values["name"], *values["source"].partition("-")[::2]))
            resumed += [(values["name"], layout, "", values["source"]) for layout in LAYOUTS]
        else:
            wanted |= {(values["name"], values["layout"], values["more"]), (values["name"], "1", "")}
    flags = [*shared_flags, "--train.max_steps", str(n_steps(request)), "--train.micro_batch_size", "2"]
    run_all(folder, [tuple(part.lstrip("-") for part in case) for case in sorted(wanted)], flags)
    for name, layout, _, source in resumed:
        copy = folder / case_of(name, layout, source=source).name
        copy_without(folder / case_of(name, *source.partition("-")[::2]).name, copy, "step-00000020", "final")
    run_all(folder, resumed, flags)
    return folder


def losses_differ(a, b) -> float:
    return relative(losses(a), losses(b))


def weights_differ(a, b) -> float:
    first, second = load_weights(a / "final"), load_weights(b / "final")
    assert first.keys() ^ second.keys() <= {"lm_head.weight"}  # tied, and not in sharded checkpoints
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in first.keys() & second)


def losses_allowed(name: str) -> float:
    return 5e-5 if "moments" in name else 1e-5


def weights_allowed(name: str) -> float:
    """bf16 moments round by random numbers that depend on the layout, and Muon orthogonalizes the difference.

    8 bits amplify the rounding of gradients: 4.8e-4 with ddp, too.
    """
    return {"moments": 5e-3, "muon-moments": 3e-2, "8bit": 2e-3}.get(name, 1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "more"), [pytest.param(*v, marks=[] if v in ALWAYS else [pytest.mark.slow]) for v in SAME]
)
def test_n3_shards_are_updated_as_on_one_process(folder, name, layout, more):
    case, one = folder / case_of(name, layout, more).name, folder / case_of(name, "1").name
    assert losses_differ(case, one) < losses_allowed(name)
    assert weights_differ(case, one) <= weights_allowed(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), RESUMED)
def test_s2_state_of_sharded_optimizers_resumes_on_any_layout(folder, name, source):
    uninterrupted = folder / case_of(name, *source.partition("-")[::2]).name

    def check(layout: str) -> None:
        resumed = folder / case_of(name, layout, source=source).name
        difference = losses_differ(resumed, uninterrupted), weights_differ(resumed, uninterrupted)
        if layout == source[0]:
            assert difference == (0, 0)
        assert difference[0] < losses_allowed(name) and difference[1] <= weights_allowed(name), difference

    check_each(check, LAYOUTS)


class Matrices(nn.Module):
    """Rows that four ranks cannot share equally, fewer rows than ranks, a stack of matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = ((19, 6), (3, 18), (5, 3, 4), (10,))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return sum((w * torch.randn(w.shape, generator=generator)).sin().sum() for w in self.weights)  # type: ignore


def updated(model: nn.Module, kind: str) -> list[torch.Tensor]:
    """Return the parameters after three steps."""
    parameters = [shard_of(p) for p in model.parameters()]
    qkv, small, *others = parameters
    groups = [{"params": [qkv], "rows": (11, 4, 4)}, {"params": [small], "rows": ()}, {"params": others, "main": False}]
    if kind == "adafactor":
        cls = ShardedAdafactor if isinstance(model, FSDPModule) else torch.optim.Adafactor
        optimizer: torch.optim.Optimizer = cls(parameters, lr=0.5, weight_decay=0.1)
    else:
        optimizer = Muon(groups, lr=0.1)
    for _ in range(3):
        model().backward()
        give_gradients(model)
        optimizer.step()
        model.zero_grad()
    return list(model.parameters())


def uneven_rows_main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for layout in (Layout(shard=4), Layout(replicate=2, shard=2)):
        ranks.set_layout(layout)
        for kind in ("muon", "adafactor"):
            model = Matrices()
            fully_shard(model, mesh=data_mesh(layout, "cpu"))
            add_shards(model)
            found = updated(model, kind)
            for weight, reference in zip(found, updated(Matrices(), kind), strict=True):
                torch.testing.assert_close(weight.full_tensor(), reference, rtol=1e-5, atol=1e-6)
            require_equal_replicas(
                {str(i): p for i, p in enumerate(found)}, {str(i): p.numel() for i, p in enumerate(found)}
            )
    dist.destroy_process_group()


def test_uneven_and_empty_shards_are_updated_as_the_unsharded_matrix():
    start_ranks(uneven_rows_main, (free_port(),), 4)


def resumed_rows_main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks.set_layout(Layout(shard=2))
    for cls in (torch.optim.AdamW, ShardedAdafactor):
        states: list[dict] = []
        for count in (3, 0):  # the second run saves before its first step
            model = OneRow()
            fully_shard(model, mesh=data_mesh(ranks.layout(), "cpu"))
            add_shards(model)
            weight = shard_of(model.weight)
            assert weight.numel() == (0 if rank else 6)
            optimizer = cls([weight], lr=0.1)
            if states:
                load_optimizer(model, optimizer, states[0], Path("state.pth"), Path("optimizer"), may_be_empty=False)
            for _ in range(count):
                model().backward()
                give_gradients(model)
                optimizer.step()
                model.zero_grad()
            states.append(full_state(model, optimizer, {})[1])
            assert int(optimizer.state[weight]["step"]) == 3
        first, second = (state["state"]["weight"] for state in states)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    dist.destroy_process_group()


class OneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 6))

    def forward(self) -> torch.Tensor:
        return self.weight.sin().sum()


def test_s2_a_rank_without_rows_resumes_as_the_others():
    start_ranks(resumed_rows_main, (free_port(),), 2)


PLANNED = [{"name": "Muon"}, {"name": "Muon", "state_dtype": "bf16"}, {"name": "Adafactor"}]


def memory_main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    plan = StrategyPlan("fsdp", "FULL_SHARD", Layout(shard=2), "")
    config = ModelConfig(
        vocab_size=512, block_size=128, n_layer=4, n_embd=128, n_head=4, n_query_groups=2, intermediate_size=320
    )
    for options in PLANNED:
        setup = MemoryInputs(config, "32-true", plan, 1, 1, 32, options, device="cpu")
        model = GPT(config)
        no_decay, inside = no_decay_params(model), block_params(model, (Block,))
        stored = stored_parameters(setup, model)
        planned_state, planned_update = optimizer_bytes(setup, stored), update_bytes(setup, stored)
        fully_shard(model, mesh=data_mesh(plan.layout, "cpu"))
        add_shards(model)
        optimizer = build_optimizer(model, options, 1e-3, "32-true", no_decay, in_blocks=inside)
        shards = [shard_of(p) for p in model.parameters()]
        for shard in shards:
            shard.grad = torch.randn_like(shard)
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        assert sum(v.nbytes for v in state) == pytest.approx(planned_state, rel=1e-3)
        with LiveBytes([*shards, *(p.grad for p in shards if p.grad is not None), *state]) as live:
            optimizer.step()
        assert 0.75 * planned_update <= live.peak <= 1.05 * planned_update + 4000, (options, live.peak, planned_update)
    dist.destroy_process_group()


@pytest.mark.slow
def test_memory_of_sharded_optimizers_is_that_of_the_plan():
    start_ranks(memory_main, (free_port(),), 2)


def eight_bit_main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    fully_shard(model, mesh=data_mesh(Layout(shard=2), "cpu"))
    add_shards(model)
    with pytest.raises(UserError, match="the quantized blocks of a 64 x 96 matrix do not align with its"):
        build_optimizer(model, {"name": "AdamW8bit"}, 1e-3, "32-true", frozenset())
    dist.destroy_process_group()


@pytest.mark.slow
def test_8_bit_shards_whose_blocks_differ_from_one_process_are_refused():
    start_ranks(eight_bit_main, (free_port(),), 2)
