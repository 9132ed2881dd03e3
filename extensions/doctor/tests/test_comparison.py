"""N3 on the user's run: differences, tolerances, the verdict, and models that one process cannot hold."""

import math

import pytest
from toolkit_doctor import verify
from toolkit_doctor.comparison import Difference, choose_splits, choose_tolerance, compare
from toolkit_doctor.gradients import StepRecord
from toolkit_doctor.verify import find_failure, format_step, require_memory_of_one_process
from toolkit_plan.plan import run_args_of

from toolkit.cli.parser import parse
from toolkit.config import TrainArgs
from toolkit.errors import UserError


def record(loss=4.0, logged_norm=1.0, **gradients) -> StepRecord:
    return StepRecord(loss, logged_norm, {"a": 0.8, "b": 0.6} | gradients)


def test_differences_are_relative_and_those_of_parameters_to_the_complete_gradient():
    found = compare(record(4.4, 1.25, a=0.0, b=0.7), record())
    assert found.parameter == "a" and found[:4] == pytest.approx((0.1, 0.3, 0.8, 0.25))
    assert compare(record(), record())[:4] == (0, 0, 0, 0)
    assert compare(record(b=1e-9), record(b=2e-9)).gradient < 2e-9  # zero but for rounding
    skipped = record(logged_norm=math.inf, a=math.inf)  # by an fp16 scaler
    assert compare(skipped, skipped)[:4] == (0, 0, 0, 0)
    assert math.isnan(compare(record(math.nan), record()).loss)


def test_tolerance_of_fp32_is_fixed_and_that_of_16_bits_measured():
    assert choose_tolerance([record()], [])[:4] == (1e-5, 1e-5, 1e-5, 0.05)
    splits = [[record(), record(4.004)], [record(), record(4.002, a=0.8016)]]
    found = choose_tolerance([record(), record()], splits)
    assert found[:4] == pytest.approx((2e-3, 2.5605e-3, 3.2e-3, 0.05), rel=1e-3)
    assert choose_tolerance([record()], [[record()]])[:3] == (1e-5, 1e-5, 1e-5)


def test_first_step_beyond_the_tolerance_is_named():
    tolerance, fine = Difference(1e-5, 1e-5, 1e-5, 0.05), Difference(1e-6, 1e-6, 1e-6, 0.01, "a")
    assert find_failure([fine, fine], tolerance) == ""
    failure = find_failure([fine, fine._replace(gradient=0.5, parameter="b"), fine._replace(loss=1.0)], tolerance)
    assert failure == (
        "step 2: differs from one process in a parameter's gradient by 5.0e-01 (tolerance 1.0e-05); the gradient "
        "differs most in b"
    )
    assert find_failure([fine._replace(loss=math.nan)], tolerance).startswith("step 1: ")
    assert "in the logged gradient norm by 2.9e-01" in find_failure([fine._replace(logged_norm=0.29)], tolerance)


def test_splits_are_smaller_where_there_are_any():
    assert choose_splits(8, 4) == [2, 1]
    assert choose_splits(8, 2) == [1, 4]
    assert choose_splits(6, 1) == [2, 3]
    assert choose_splits(2, 1) == [2]


def test_rows_are_aligned():
    first, second = (format_step(step, record(), record(4.4), Difference(0.1, 0, 0)) for step in (1, 10))
    assert len(first) == len(second) and first.split()[:3] == ["1", "4", "4.4"]


def test_model_too_large_for_one_process_is_compared_with_fewer_layers(monkeypatch):
    monkeypatch.setattr(verify, "device_memory", lambda device: 24e9)
    flags = ["--devices", "8", "--train.micro_batch_size", "1", "--train.max_seq_length", "512"]

    argv = ["Llama-2-7b-hf", "--model_config.vocab_size", "32000", *flags]
    with run_args_of(**parse("pretrain", argv)) as args:
        with pytest.raises(UserError) as caught:
            require_memory_of_one_process(args, "cuda")
    message = str(caught.value)
    assert message.startswith("--devices 8: Llama-2-7b-hf does not fit on one process for comparison: it needs about 1")
    assert "24.0 GB are there; compare fewer layers: `toolkit verify_parallel pretrain Llama-2-7b-hf --" in message


def test_a_model_that_fits_is_accepted():
    arguments = parse("pretrain", ["pico-llama", "--devices", "2"])
    with run_args_of(**arguments) as args:
        require_memory_of_one_process(args, "cpu")
        assert args.train == TrainArgs(64)
