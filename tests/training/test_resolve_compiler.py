"""`--compiler auto`: compiles only if torch.compile works on the device."""

from collections.abc import Callable

import pytest
import torch
from toolkit_plan.rows import unprepared_rows

from toolkit.commands import pretrain
from toolkit.config.command import parse_object
from toolkit.planning.auto import resolve_auto
from toolkit.planning.data import complete
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.training_options import run_args
from toolkit.training.hyperparameters import resolved_hyperparameters
from toolkit.training.resolve_compiler import compile_error, resolve_compiler

CPU = torch.device("cpu")


def missing(function: Callable) -> Callable:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


def wrong(function: Callable) -> Callable:
    return lambda x: function(x) * 1.01


def test_a_missing_or_wrong_compiler_never_breaks_an_auto_run(monkeypatch):
    given = {"model_name": "pythia-14m", "train": {"max_steps": 10**5}, "model_config": {"vocab_size": 256}}
    config = resolve_auto(run_args(**parse_object(pretrain.setup, given)), DeviceSpec("cuda", 1, 1, 80e9))
    config = complete(config, unprepared_rows(config.args, config.max_seq_length))

    def chosen(compiler: Callable) -> tuple[str, str]:
        monkeypatch.setattr(torch, "compile", compiler)
        found = resolve_compiler(config, CPU)
        assert resolved_hyperparameters(found)["compiler"] == found.args.compiler
        return found.args.compiler, found.reasons["compiler"]

    on_cpu = resolve_auto(config.args, DeviceSpec("cpu", 1, 1, 80e9))
    found = resolve_compiler(on_cpu, CPU)
    assert (found.args.compiler, resolved_hyperparameters(found)["compiler"]) == ("none", "auto")  # a GPU may compile
    name, reason = chosen(lambda function: function)
    assert name == "torch" and reason.startswith("auto: compilation takes about ")
    name, reason = chosen(missing)
    assert name == "none" and reason.endswith(
        "torch.compile fails: RuntimeError: Failed to find C compiler. Please specify via CC"
    )
    assert chosen(wrong) == ("none", "auto: torch.compile fails: its results are wrong")


@pytest.mark.slow
def test_the_compiler_of_this_machine(monkeypatch):
    assert compile_error(CPU) == ""
    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/missing",))
    with torch._inductor.utils.fresh_cache():
        assert "InvalidCxxCompiler" in compile_error(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_compiler_of_a_gpu():
    assert compile_error(torch.device("cuda")) == ""
