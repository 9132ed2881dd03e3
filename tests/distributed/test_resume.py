"""S2 across ranks: resume on the same ranks is bit-equal; on others it continues at the same global sample."""

import pytest
from helpers.cases import n_steps, slow_except
from helpers.compare_runs import copy_without, require_close, require_same
from helpers.groups import Case, run_group

TENSOR = ["--tensor_parallel_size", "2"]
LAYOUTS = {  # ranks, nodes, flags
    "1": (1, 1, []), "2": (2, 1, []), "4": (4, 1, []), "2x2": (4, 2, []),
    "auto": (1, 1, ["--strategy", "auto"]), "fsdp2": (2, 1, ["--strategy", "fsdp2"]),
    "ddp": (2, 1, ["--strategy", "ddp"]), "tensor": (2, 1, TENSOR), "tensor-2": (4, 1, TENSOR),
}  # fmt: skip
PLAIN, OTHERS = ("1", "2", "4", "2x2"), ("auto", "fsdp2", "tensor", "tensor-2")
PAIRS = [
    *((a, b) for a in PLAIN for b in PLAIN),
    *((a, b) for a in OTHERS for b in OTHERS if "tensor" in a + b),
    ("2", "ddp"), ("ddp", "2"), ("ddp", "ddp"),  # --strategy auto may choose ddp on one machine, and fsdp on the next
]  # fmt: skip
FORMATS = ["full", "sharded"]
KEPT = "step-00000007"


def case_of(name: str, layout: str, kind: str, *flags: str) -> Case:
    saving = ["--fsdp.state_dict_type", kind, "--train.save_interval", "7", "--train.keep_last", "0"]
    return Case(name, [*saving, *LAYOUTS[layout][2], *flags], LAYOUTS[layout][1])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, shared_flags, request):
    """Layouts train in each format; then others resume from step 7. Only what the selected tests compare."""
    folder = tmp_path_factory.mktemp("resume")
    shared = [*shared_flags, "--train.max_steps", str(n_steps(request, fast=8))]
    items = [item for item in request.session.items if item.path == request.path]
    wanted = sorted(item.callspec.params["case"] for item in items)
    for size in (1, 2, 4):
        sources = sorted({(source, kind) for source, _, kind in wanted if LAYOUTS[source][0] == size})
        run_group(folder, size, [case_of(f"{source}-{kind}", source, kind) for source, kind in sources], shared)
    for size in (1, 2, 4):
        again = []
        for source, target, kind in wanted:
            if LAYOUTS[target][0] == size:
                out = f"{source}-{kind}-on-{target}"
                copy_without(folder / f"{source}-{kind}", folder / out, "step-00000014", "final")
                again.append(case_of(out, target, kind, "--resume", "auto"))
        run_group(folder, size, again, shared)
    return folder


CASES = [(*pair, kind) for pair in PAIRS for kind in FORMATS]


@pytest.mark.parametrize("case", slow_except([("2", "2", "sharded")], CASES), ids="-".join)
def test_s2_resume(resumed, case):
    source, target, kind = case
    uninterrupted, continued = resumed / f"{source}-{kind}", resumed / f"{source}-{kind}-on-{target}"
    assert (continued / KEPT / "lit_model.pth").is_dir() == (kind == "sharded")
    if source == target:
        require_same(continued, uninterrupted)
    require_close(continued, uninterrupted)
