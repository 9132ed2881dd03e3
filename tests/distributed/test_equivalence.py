"""N3: the same training on 1, 2 and 4 ranks under every strategy, in one group of real gloo processes each."""

import math

import pytest
import torch
from helpers.cases import n_steps
from helpers.compare_runs import losses, relative, require_close
from helpers.groups import Case, run_group

SHARDINGS = ["HYBRID_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
ACCUMULATED = SHARDINGS[:3]  # with sharded gradients between the micro-batches
PRECISIONS = ["32-true", "bf16-mixed"]
WRAPPED = {
    "wrap-class": ["--fsdp.auto_wrap", "class", "--fsdp.wrap_classes", "[Block, CausalSelfAttention]"],
    "wrap-size": ["--fsdp.auto_wrap", "size", "--fsdp.min_num_params", "20000"],
    "wrap-nothing": ["--fsdp.auto_wrap", "size"],
}


def cases(size: int) -> list[Case]:
    found = []
    for precision in PRECISIONS:
        same = ["--precision", precision]
        if size > 1:
            found.append(Case(f"{size}-ddp-{precision}", [*same, "--strategy", "ddp"], look_at="collectives"))
        else:
            found.append(Case(f"1-single-{precision}", same))
            for micro in (8, 4):  # other micro-batch splits: the tolerance of bf16
                found.append(Case(f"split-{micro}-{precision}", [*same, "--train.micro_batch_size", str(micro)]))
        for sharding in SHARDINGS if size > 1 else ():
            flags = [*same, "--strategy", "fsdp", "--fsdp.sharding_strategy", sharding]
            is_hybrid = size == 4 and sharding == "HYBRID_SHARD"
            found.append(Case(f"{size}-{sharding}-{precision}", flags, look_at="collectives"))
            if is_hybrid:
                found.append(Case(f"2x2-{sharding}-{precision}", flags, nodes=2, look_at="collectives"))
            if sharding in ACCUMULATED:
                layout, nodes = ("2x2", 2) if is_hybrid else (size, 1)
                sharded = [*flags, "--fsdp.accumulate", "sharded"]
                name = f"{layout}-{sharding}-accumulate-{precision}"
                found.append(Case(name, sharded, nodes=nodes, look_at="collectives"))
        fsdp = [*same, "--strategy", "fsdp"]
        if size < 4:
            offloaded = [*fsdp, "--fsdp.cpu_offload", "true"]
            found.append(Case(f"{size}-offload-{precision}", offloaded, fault="offload on a CPU"))
        if size == 2:
            accumulated = [*offloaded, "--fsdp.accumulate", "sharded"]
            found.append(Case(f"2-offload-accumulate-{precision}", accumulated, fault="offload on a CPU"))
            for name, options in WRAPPED.items():
                found.append(Case(f"2-{name}-{precision}", [*fsdp, *options], look_at="collectives"))
        if size == 4:  # shard groups that are not a node, and one device per node
            found.append(Case(f"4-groups-{precision}", [*fsdp, "--fsdp.shard_size", "2"], look_at="collectives"))
            found.append(Case(f"4x1-{precision}", fsdp, nodes=4, look_at="collectives"))
    if size < 4:
        for precision in PRECISIONS:  # head and embedding are units
            untied = ["--train.tie_embeddings", "false", "--precision", precision]
            untied += ["--strategy", "fsdp"] if size == 2 else []
            found.append(Case(f"{size}-untied-{precision}", untied, look_at="collectives"))
        if size == 2:
            found.append(
                Case("2-untied-accumulate-32-true", [*untied, "--precision", "32-true", "--fsdp.accumulate", "sharded"])
            )
        scaled = ["--strategy", "fsdp"] if size == 2 else []
        found.append(Case(f"{size}-16-mixed", scaled, fault="16-mixed on a CPU"))
    if size == 2:
        fsdp = ["--precision", "32-true", "--strategy", "fsdp"]
        compiled = [*fsdp, "--compiler", "torch"]
        full, selective = (["--train.activation_checkpointing", name] for name in ("full", "selective"))
        for name, flags in {
            "compiled": compiled,
            "full-fsdp": [*fsdp, *full],
            "selective-fsdp": [*fsdp, *selective],
            "full-accumulate": [*fsdp, "--fsdp.accumulate", "sharded", *full],
            "wrap-size-full": [*fsdp, *full, *WRAPPED["wrap-size"]],
            "wrap-class-compiled": [*compiled, *WRAPPED["wrap-class"]],
            "selective-compiled": [*compiled, *selective],
            "forward-prefetch": [*fsdp, "--fsdp.forward_prefetch", "true"],
            "no-prefetch": [*fsdp, "--fsdp.backward_prefetch", "none"],
        }.items():
            found.append(Case(f"2-{name}-32-true", flags))
    if size == 2:
        for name in ("full", "selective"):
            recompute = ["--train.activation_checkpointing", name, "--strategy", "ddp", "--precision", "32-true"]
            found.append(Case(f"2-{name}-ddp-32-true", recompute))
    if size == 4:
        recompute = ["--train.activation_checkpointing", "full", "--precision", "32-true"]
        found.append(Case("2x2-full-hybrid-32-true", recompute, nodes=2))
    return found


def reference_of(name: str) -> str:
    """Return the run on one process that a case is compared with."""
    return (
        f"1-{'untied' if 'untied' in name else 'single'}-{'bf16-mixed' if name.endswith('bf16-mixed') else '32-true'}"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_flags, request):
    """Run the cases of the selected tests and what they are compared with."""
    folder = tmp_path_factory.mktemp("equivalence")
    selected = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in selected if hasattr(item, "callspec")}
    if any(item.originalname == "test_n3_fp16" for item in selected):
        wanted |= {"1-16-mixed", "2-16-mixed"}
    wanted |= {SAME[name] for name in wanted & SAME.keys()} | {"1-single-32-true"} | set(map(reference_of, wanted))
    if any(name.endswith("bf16-mixed") for name in wanted):
        wanted |= {f"{name}-bf16-mixed" for name in ("1-single", "split-8", "split-4")}
    if any(item.originalname == "test_units_are_those_of_the_wrap_plan" for item in selected):
        wanted |= {f"2-{name}-32-true" for name in WRAPPED}
    seen, steps = {}, ["--train.max_steps", str(n_steps(request, fast=6))]
    for size in (1, 2, 4):
        selected = [case for case in cases(size) if case.name in wanted]
        seen |= run_group(folder, size, selected, [*shared_flags, *steps])
    assert all(rank["exit"] == 0 for ranks in seen.values() for rank in ranks)  # also of cases with a fault
    return folder, seen


NAMES = [case.name for size in (1, 2, 4) for case in cases(size) if not case.name.startswith("split")]


ALWAYS = ["1-single-32-true", "2-ddp-32-true", "2-FULL_SHARD-32-true"]


def named(names: list[str]):
    """Parametrize by name; names not in ALWAYS are marked slow."""
    marks = [[] if name in ALWAYS else [pytest.mark.slow] for name in names]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in zip(names, marks, strict=True)])


@named([name for name in NAMES if name.endswith("32-true")])
def test_n3_fp32(runs, name):
    folder, seen = runs
    one = reference_of(name)
    for rank in seen[name]:
        assert rank["initial"] == seen[one][0]["initial"]  # bit-equal, by two sums of each weight
    require_close(folder / name, folder / one)


SAME = {
    "2-full-fsdp-32-true": "2-FULL_SHARD-32-true",
    "2-selective-ddp-32-true": "2-ddp-32-true",
    "2-wrap-size-full-32-true": "2-wrap-size-32-true",
    "2-forward-prefetch-32-true": "2-FULL_SHARD-32-true",
    "2-no-prefetch-32-true": "2-FULL_SHARD-32-true",
}


@named(list(SAME))
def test_checkpointed_activations_and_prefetching_change_no_bit(runs, name):
    folder, _ = runs
    assert losses(folder / name) == losses(folder / SAME[name])


@named([name for name in NAMES if name.endswith("bf16-mixed")])
def test_n3_bf16(runs, name):
    folder, seen = runs
    one = losses(folder / reference_of(name))
    allowed = 2 * max(
        relative(losses(folder / f"split-{micro}-bf16-mixed"), losses(folder / "1-single-bf16-mixed"))
        for micro in (8, 4)
    )
    assert 0 < allowed < 2e-3
    for rank in seen[name]:
        assert rank["initial"] == seen[reference_of(name)][0]["initial"] and rank["dtypes"] == ["torch.float32"]
    assert relative(losses(folder / name), one) <= allowed


@pytest.mark.slow
def test_n3_fp16(runs):
    """Overflows skip the same updates: the scale is found from all ranks."""
    folder, _ = runs
    one = losses(folder / "1-16-mixed")
    assert relative(losses(folder / "2-16-mixed"), one) < 2e-3
    assert one[0] == pytest.approx(losses(folder / "1-single-32-true")[0], rel=1e-3)


SHARDED = [name for name in NAMES if "SHARD" in name and name[0] != "1" and "NO_SHARD" not in name]


@named(SHARDED)
def test_each_rank_holds_its_shard(runs, name):
    _, seen = runs
    shards = 2 if name.startswith("2") else 4
    unsharded = seen["1-single-32-true"][0]
    replicated = 5 * 64 * 4 if "bf16" in name else 0  # norms, in fp32 on every rank
    for rank in seen[name]:
        for what, copies in (("parameters", 1), ("gradients", 1), ("moments", 2)):
            share = (unsharded[what] - copies * replicated) / shards + copies * replicated
            assert rank[what] == pytest.approx(share, rel=0.02), what
        expected = rank["gradients"] if "accumulate" in name else unsharded["gradients"]
        assert rank["waiting"] == pytest.approx(expected, rel=0.02)
    for what in ("parameters", "gradients", "moments"):
        total = sum(rank[what] for rank in seen[name][:shards])
        assert total >= unsharded[what]


UNITS = 3  # two blocks and the root
# Four micro-batches per rank on 2 ranks, two on 4. The loss; the gradients; with FSDP the norm; under mixed precision
# the vectors; with HYBRID_SHARD the all-reduce of each shard and the maximum of the norms.
REDUCTIONS = {
    "2-ddp-32-true": 2,
    "2-FULL_SHARD-32-true": UNITS + 2,
    "2-FULL_SHARD-bf16-mixed": UNITS + 3,
    "2-FULL_SHARD-accumulate-32-true": 4 * UNITS + 2,
    "2-FULL_SHARD-accumulate-bf16-mixed": 4 * UNITS + 3,
    "2x2-HYBRID_SHARD-32-true": 2 * UNITS + 3,
    "2x2-HYBRID_SHARD-accumulate-32-true": 2 * UNITS + UNITS + 3,
    "4-groups-32-true": 2 * UNITS + 3,
    "2-untied-32-true": UNITS + 2 + 2,  # also head and embedding
    "2-untied-bf16-mixed": UNITS + 2 - 1 + 3,  # the root's norm is a vector
    "2-NO_SHARD-32-true": UNITS + 3,
    "2-wrap-class-32-true": UNITS + 2 + 2,  # an attention inside each block
    "2-wrap-size-32-true": UNITS + 2,
    "2-wrap-nothing-32-true": 1 + 2,
}


@named(list(REDUCTIONS))
def test_gradients_are_reduced_once_per_step_or_micro_batch(runs, name):
    _, seen = runs
    counts = seen[name][0]["collectives"]
    assert sum(n for kind, n in counts.items() if "reduce" in kind) == REDUCTIONS[name], counts


# Per micro-batch, blocks are gathered for the forward and for the backward pass, the others once.
GATHERS = {
    "2-FULL_SHARD-32-true": 4 * (2 * 2 + 1),
    "2-untied-32-true": 4 * (2 * 2 + 3),
    "2-SHARD_GRAD_OP-32-true": UNITS,
    "2-NO_SHARD-32-true": 0,
}


@named(list(GATHERS))
def test_weights_are_gathered_no_more_than_needed(runs, name):
    _, seen = runs
    counts = seen[name][0]["collectives"]
    assert counts.get("gloo:all_gather", 0) == GATHERS[name], counts


@pytest.mark.slow
def test_units_are_those_of_the_wrap_plan(runs):
    _, seen = runs
    found = {name: seen[f"2-{name}-32-true"][0]["options"]["units"] for name in WRAPPED}
    assert found == {
        "wrap-class": ["Block", "CausalSelfAttention"] * 2, "wrap-size": ["LLaMAMLP"] * 2, "wrap-nothing": []
    }  # fmt: skip


def test_loss_decreases(runs):
    folder, _ = runs
    one = losses(folder / "1-single-32-true")
    assert one[-1] < one[0] - (0.3 if len(one) == 20 else 0.1) and all(map(math.isfinite, one))
    assert torch.tensor(one).isfinite().all()
