"""``--optimizer.in_backward``: the weights, state and metrics of the ordinary step, with one gradient at a time."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights, rows_of
from helpers.steps import one_step

from tests.training.test_run import arguments
from toolkit.checkpoints.weights import load_state
from toolkit.config import OptimizerArgs
from toolkit.data.batch import Batch
from toolkit.errors import GuardError, UserError
from toolkit.models.lora_config import LoRAConfig
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.training.callbacks import Callback
from toolkit.training.engine import run_training

TRAIN = {"micro_batch_size": 8, "max_norm": 0.0, "max_steps": 6, "save_interval": 3, "tie_embeddings": True}


def optimizer_state(folder):
    return load_state(folder / "trainer" / "state.pth")["optimizer"]["state"]


@pytest.mark.parametrize("name", slow_except(["AdamW"], ["AdamW", "AdamW bf16", "Adagrad"]))
def test_s2_run_and_resume_are_bit_equal_to_the_ordinary_step(corpus, tmp_path, name):
    ordinary = OptimizerArgs(name.split()[0], state_dtype="bf16" if "bf16" in name else "auto")
    in_backward = replace(ordinary, in_backward=True)
    runs = {"plain": (ordinary, False), "ours": (in_backward, False)}
    runs["resumed"] = (ordinary, str(tmp_path / "ours" / "step-00000003"))
    for out, (optimizer, resume) in runs.items():
        train = TRAIN | {"activation_checkpointing": "full" if name == "Adagrad" else "none"}
        run_training(arguments(corpus, tmp_path / out, train=train, optimizer=optimizer, resume=resume))
    plain = optimizer_state(tmp_path / "plain" / "final")
    for out in ("ours", "resumed"):
        assert_same_weights(tmp_path / "plain" / "final", tmp_path / out / "final")
        state = optimizer_state(tmp_path / out / "final")
        assert plain.keys() == state.keys()
        for parameter, values in plain.items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[parameter][key])), (parameter, key)
    for expected, row in zip(rows_of(tmp_path / "plain"), rows_of(tmp_path / "ours"), strict=True):
        assert all(row[column] == expected[column] for column in ("loss", "grad_norm", "val_loss"))


def step(fabric, model, optimizer):
    ids = torch.arange(32).view(2, 16)
    return one_step(fabric, model, optimizer, [Batch(ids, ids, [0, 1], 32, 32)], 1e-3, in_backward=True)


def test_one_gradient_is_in_memory_at_a_time(fabric, pico):
    model, optimizer = fabric.setup(pico, torch.optim.AdamW(pico.parameters()))
    most = []
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: most.append(sum(p.grad.numel() for p in pico.parameters() if p.grad is not None))
    )
    step(fabric, model, optimizer)
    assert sorted(most) == sorted(p.numel() for p in pico.parameters())
    assert all(p.grad is None for p in pico.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_n7_nonfinite_gradients_never_reach_the_weights(fabric, pico, value):
    with torch.no_grad():
        pico.transformer.h[0].norm_1.weight.register_hook(lambda gradient: gradient * value)
    model, optimizer = fabric.setup(pico, torch.optim.AdamW(pico.parameters()))
    with pytest.raises(GuardError, match="gradient norm (nan|inf), loss"):
        step(fabric, model, optimizer)
    assert all(p.isfinite().all() for p in pico.parameters())
    moments = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    assert moments and all(t.isfinite().all() for t in moments)


def test_options_that_need_all_gradients_at_once_are_refused(corpus, tmp_path):
    valid = arguments(corpus, tmp_path, train=TRAIN, optimizer=OptimizerArgs(in_backward=True))
    resolve_auto(valid, DeviceSpec("cpu", 1, 1))

    def refused(changes, reason, spec):
        with pytest.raises(UserError, match=f"--optimizer.in_backward true .* with .*{reason}"):
            resolve_auto(replace(valid, **changes), spec)

    one = DeviceSpec("cpu", 1, 1)
    check_each(refused, [
        ({"train": replace(valid.train, max_norm=1.0)}, "use --train.max_norm 0", one),
        ({"train": replace(valid.train, micro_batch_size=2)}, "accumulation .* x 4 accumulated", one),
        ({"train": replace(valid.train, micro_batch_size=4)}, "2 devices", DeviceSpec("cpu", 2, 1)),
        ({"lora": LoRAConfig(), "train": replace(valid.train, tie_embeddings=None)}, "adapters are small", one),
        ({"optimizer_class": torch.optim.AdamW}, "a user-provided or extension optimizer", one),
        ({"precision": "16-mixed"}, "use bf16-mixed", DeviceSpec("cuda", 1, 1)),
    ])  # fmt: skip


def test_a_callback_that_reads_gradients_is_refused(corpus, tmp_path):
    class Reads(Callback):
        def on_before_optimizer_step(self, trainer):
            pass

    args = arguments(corpus, tmp_path / "out", train=TRAIN, optimizer=OptimizerArgs(in_backward=True))
    with pytest.raises(UserError, match="Reads.on_before_optimizer_step would see no gradients"):
        run_training(args, [Reads()])
    assert not (tmp_path / "out").exists()
