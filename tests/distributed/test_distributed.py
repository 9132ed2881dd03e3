import os
import signal
import subprocess
import sys

import pytest
import torch

from toolkit.distributed import ranks, signals
from toolkit.distributed.device import pick_accelerator, pick_precision
from toolkit.distributed.signals import SignalWatch, restore_handlers_on_exit
from toolkit.errors import UserError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_s3_first_signal_is_recorded_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with SignalWatch() as watch:
        assert watch.received == 0
        for sent in (number, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):  # schedulers repeat signals
            os.kill(os.getpid(), sent)
            assert watch.received == number
    if before != signal.SIG_DFL or number == signal.SIGTERM:
        assert signal.getsignal(number) == before


def test_s3_after_training_signals_that_ask_for_a_checkpoint_have_no_effect():
    with restore_handlers_on_exit():
        for number in (signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with SignalWatch():
            pass
        for number in (signal.SIGUSR1, signal.SIGHUP):
            assert signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)  # processes would inherit SIG_IGN
            os.kill(os.getpid(), number)


def test_s3_second_ctrl_c_interrupts_after_the_debounce_time(monkeypatch):
    with pytest.raises(KeyboardInterrupt), SignalWatch() as watch:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.received == signal.SIGINT
        monkeypatch.setattr(signals, "DEBOUNCE_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)


def test_all_reduce_sum_on_one_process_returns_its_input():
    assert ranks.all_reduce_sum(tokens=3, stop=0) == {"tokens": 3, "stop": 0}


def test_default_precision_depends_on_the_device():
    assert pick_precision("auto", "cpu") == "32-true"
    assert pick_precision("bf16-mixed", "cpu") == "bf16-mixed"
    with pytest.raises(UserError, match="--precision 16-mixed"):
        pick_precision("16-mixed", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_emulated_bf16_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_precision("auto", "cuda") == "16-mixed"
    with pytest.raises(UserError, match="--precision bf16-true"):
        pick_precision("bf16-true", "cuda")


def test_missing_accelerator_is_an_error():
    with pytest.raises(UserError, match="--accelerator cuda"):
        pick_accelerator("cuda")


def test_gomp_spincount_default_and_user_setting():
    show = "import toolkit, os; print(os.environ['GOMP_SPINCOUNT'])"
    for wanted, given in (("10000", {}), ("7", {"GOMP_SPINCOUNT": "7"})):
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | given
        output = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True).stdout
        assert output.strip() == wanted
