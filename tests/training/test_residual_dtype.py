"""--train.residual_dtype on a CPU: the curve, what a checkpoint says, and what a resumed run may not change."""

import json

import pytest
from helpers.compare_runs import assert_same_weights, losses, relative

from tests.training.test_run import arguments
from toolkit.errors import UserError
from toolkit.training.engine import run_training

KINDS = ("auto", "bf16")


def options(corpus, out, kind: str, **others):
    train = {"max_steps": 4, "save_interval": 2, "residual_dtype": kind}
    return arguments(corpus, out, train=train, precision="bf16-mixed", **others)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Runs of 4 steps, with a checkpoint of the second, by --train.residual_dtype."""
    folder = tmp_path_factory.mktemp("residual")
    for kind in KINDS:
        run_training(options(corpus, folder / kind, kind))
    return folder


def test_the_curve_is_another_one_within_the_tolerance_of_bf16(runs):
    assert 0 < relative(losses(runs / "bf16"), losses(runs / "auto")) < 2e-3


def test_s2_a_resumed_run_has_the_same_bits_and_the_same_dtype(runs, corpus, tmp_path):
    for kind, other in (KINDS, KINDS[::-1]):
        checkpoint = runs / kind / "step-00000002"
        run_training(options(corpus, tmp_path / kind, kind, resume=str(checkpoint)))
        assert_same_weights(tmp_path / kind / "final", runs / kind / "final")
        with pytest.raises(UserError, match=r"^--precision bf16-mixed.*: .* was trained with --precision bf16-mixed"):
            run_training(options(corpus, tmp_path / f"{kind}-{other}", other, resume=str(checkpoint)))


def test_a_checkpoint_without_the_option_is_one_of_an_older_version(runs):
    """Its identity has no word about the residual stream, so a version with another default resumes it in fp32."""
    metas = [json.loads((runs / kind / "final" / "trainer" / "meta.json").read_text()) for kind in KINDS]
    assert [m["identity"]["precision"] for m in metas] == ["bf16-mixed", "bf16-mixed --train.residual_dtype bf16"]
