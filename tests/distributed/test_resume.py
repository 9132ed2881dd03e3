"""S2 across ranks: resume on the same ranks is bit-equal, on others it goes on with the same global sample."""

import shutil

import pytest
import torch
from groups import Case, losses, run_group, run_whole_and_killed_twice

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
    """Each layout trains 20 steps in each format; then each goes on from step 7 of each other."""
    folder = tmp_path_factory.mktemp("resume")
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = {(p["source"], p["target"]) for p in selected if "target" in p}
    sources = {source for source, _ in pairs}
    for size in (1, 2, 4):
        layouts = [(name, nodes) for name, (ranks, nodes) in SIZES.items() if ranks == size and name in sources]
        first = [Case(f"{name}-{kind}", flags(kind), nodes) for name, nodes in layouts for kind in FORMATS]
        run_group(folder, size, first, shared_flags)
    for size in (1, 2, 4):
        layouts = [(name, nodes) for name, (ranks, nodes) in SIZES.items() if ranks == size]
        second = []
        for name, nodes in layouts:
            for source in (a for a, b in sorted(pairs) if b == name):
                for kind in FORMATS:
                    out = f"{source}-{kind}-on-{name}"
                    shutil.copytree(folder / f"{source}-{kind}", folder / out)
                    for later in ("step-00000014", "final"):
                        shutil.rmtree(folder / out / later)
                    second.append(Case(out, [*flags(kind), "--resume", "auto"], nodes))
        run_group(folder, size, second, shared_flags)
    return folder


ALWAYS = [("2", "1"), ("2", "2"), ("2x2", "2x2")]
PAIRS = [
    pytest.param(a, b, marks=[] if (a, b) in ALWAYS else [pytest.mark.slow], id=f"{a}-on-{b}")
    for a in SIZES
    for b in SIZES
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_s2_resume(resumed, source, target, kind):
    whole, parts = resumed / f"{source}-{kind}", resumed / f"{source}-{kind}-on-{target}"
    assert (parts / KEPT / "lit_model.pth").is_dir() == (kind == "sharded")
    if source == target:
        assert losses(parts) == losses(whole)
        assert same_weights(parts / "final", whole / "final")
    else:
        assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    mine, theirs = load_weights(parts / "final"), load_weights(whole / "final")
    for name in theirs:
        assert (mine[name] - theirs[name]).norm() <= 2e-4 * theirs[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_s2_two_sigkills_on_two_ranks_leave_no_trace(corpus, tmp_path, kind, shared_flags):
    run_whole_and_killed_twice(["pretrain", *shared_flags, *flags(kind), "--devices", "2"], tmp_path)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "killed" / "final", tmp_path / "whole" / "final")
