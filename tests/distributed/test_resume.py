"""S2 across ranks: resume on the same ranks is bit-equal; on others it continues at the same global sample."""

import shutil

import pytest
import torch
from helpers.cases import n_steps
from helpers.groups import Case, losses, run_group, run_uninterrupted_and_killed_twice

from toolkit.checkpoints.weights import load_weights

SIZES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2)}  # layout: ranks, nodes
FORMATS = ["full", "sharded"]
KEPT = "step-00000007"


def flags(kind: str) -> list[str]:
    return ["--fsdp.state_dict_type", kind, "--train.save_interval", "7", "--train.keep_last", "0"]


def same_weights(a, b) -> bool:
    first, second = load_weights(a), load_weights(b)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, shared_flags, request):
    """Layouts train in each format; then others resume from step 7. Only what the selected tests compare."""
    folder = tmp_path_factory.mktemp("resume")
    shared = [*shared_flags, "--train.max_steps", str(n_steps(request, fast=8))]
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params for item in items if item.originalname == "test_s2_resume"]
    wanted = sorted({(p["source"], p["target"], p["kind"]) for p in selected})
    for size in (1, 2, 4):
        sources = sorted({(source, kind) for source, _, kind in wanted if SIZES[source][0] == size})
        first = [Case(f"{source}-{kind}", flags(kind), SIZES[source][1]) for source, kind in sources]
        run_group(folder, size, first, shared)
    for size in (1, 2, 4):
        second = []
        for source, target, kind in wanted:
            if SIZES[target][0] == size:
                out = f"{source}-{kind}-on-{target}"
                shutil.copytree(folder / f"{source}-{kind}", folder / out)
                for later in ("step-00000014", "final"):
                    shutil.rmtree(folder / out / later, ignore_errors=True)
                second.append(Case(out, [*flags(kind), "--resume", "auto"], SIZES[target][1]))
        run_group(folder, size, second, shared)
    return folder


ALWAYS = [("2", "2", "sharded")]
RESUMES = [
    pytest.param(a, b, kind, marks=[] if (a, b, kind) in ALWAYS else [pytest.mark.slow], id=f"{a}-on-{b}-{kind}")
    for a in SIZES
    for b in SIZES
    for kind in FORMATS
]


@pytest.mark.parametrize(("source", "target", "kind"), RESUMES)
def test_s2_resume(resumed, source, target, kind):
    uninterrupted, continued = resumed / f"{source}-{kind}", resumed / f"{source}-{kind}-on-{target}"
    assert (continued / KEPT / "lit_model.pth").is_dir() == (kind == "sharded")
    if source == target:
        assert losses(continued) == losses(uninterrupted)
        assert same_weights(continued / "final", uninterrupted / "final")
    else:
        assert losses(continued) == pytest.approx(losses(uninterrupted), rel=1e-5)
    weights, reference = load_weights(continued / "final"), load_weights(uninterrupted / "final")
    for name in reference:
        assert (weights[name] - reference[name]).norm() <= 2e-4 * reference[name].norm(), name


@pytest.mark.slow
def test_s2_resume_under_the_other_strategy(tmp_path, shared_flags):
    """--strategy auto may choose ddp on one machine, and fsdp on the next."""
    under = {name: ["--strategy", name] for name in ("fsdp", "ddp")}
    names = [(source, kind) for source in under for kind in FORMATS]
    run_group(tmp_path, 2, [Case(f"{s}-{kind}", [*flags(kind), *under[s]]) for s, kind in names], shared_flags)
    again = []
    for source, kind, target in [(*name, target) for name in names for target in under]:
        out = f"{source}-{kind}-on-{target}"
        shutil.copytree(tmp_path / f"{source}-{kind}", tmp_path / out)
        for later in ("step-00000014", "final"):
            shutil.rmtree(tmp_path / out / later)
        again.append(Case(out, [*flags(kind), *under[target], "--resume", "auto"]))
    run_group(tmp_path, 2, again, shared_flags)
    for case in again:
        name, _, target = case.name.partition("-on-")
        first, continued = tmp_path / name, tmp_path / case.name
        if name.startswith(f"{target}-"):
            assert losses(continued) == losses(first) and same_weights(continued / "final", first / "final")
        assert losses(continued) == pytest.approx(losses(first), rel=1e-5)
        weights, reference = load_weights(continued / "final"), load_weights(first / "final")
        for name in reference:
            assert (weights[name] - reference[name]).norm() <= 2e-4 * reference[name].norm(), name


LESS_MEMORY = ["--train.activation_checkpointing", "selective", "--fsdp.accumulate", "sharded"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [flags("full"), flags("sharded"), [*flags("sharded"), *LESS_MEMORY]],
    ids=[*FORMATS, "less-memory"],
)
def test_s2_run_after_two_sigkills_on_two_ranks_is_bit_equal(corpus, tmp_path, options, shared_flags):
    run_uninterrupted_and_killed_twice(["pretrain", *shared_flags, *options, "--devices", "2"], tmp_path)
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    assert same_weights(tmp_path / "killed" / "final", tmp_path / "uninterrupted" / "final")
