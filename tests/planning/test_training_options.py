"""The options of a training command become the arguments of the run; none is dropped."""

from dataclasses import dataclass, fields

import pytest

from toolkit.config import RunOptions, TrainArgs
from toolkit.models.lora_config import LoRAConfig, LoRAOptions
from toolkit.objectives import NextToken
from toolkit.planning import training_options
from toolkit.planning.training_options import OPTIONS, PretrainOptions, run_args


@pytest.mark.parametrize("cls", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_a_command_reaches_the_run(cls, tmp_path, monkeypatch):
    (tmp_path / "model_config.yaml").touch()
    lora = object()
    monkeypatch.setattr(training_options, "read_lora", lambda options: lora)
    for check in ("check_options", "use_frozen_vocabulary", "use_own_tokenizer"):
        monkeypatch.setattr(training_options, check, lambda args: args)
    values = {field.name: object() for field in fields(cls)}
    values |= {"train": TrainArgs(), "objective": NextToken(), "shared": RunOptions(seed=7, compiler="torch")}
    values |= {"checkpoint_dir": str(tmp_path), "head": None} if "checkpoint_dir" in values else {}
    values |= (
        {"adapters": LoRAOptions(**{f.name: object() for f in fields(LoRAOptions)})} if "adapters" in values else {}
    )
    args = run_args(cls(**values)).requested
    nested = [vars(values.pop(name)) for name in ("shared", "adapters") if name in values]
    expected = {name: value for group in (values, *nested) for name, value in group.items()}
    if cls is not PretrainOptions:
        expected["initial_checkpoint_dir"] = expected.pop("checkpoint_dir")
        del expected["head"]  # the objective has it
    of_adapters = {f"lora_{field.name}" for field in fields(LoRAConfig)}
    assert args.lora is (lora if of_adapters & expected.keys() else None)
    assert not {name for name in expected.keys() - of_adapters if getattr(args, name) is not expected[name]}
    assert args.command == cls.command


def test_an_option_that_the_run_does_not_know_is_an_error():
    @dataclass(frozen=True)
    class MoreOptions(RunOptions):
        further: int = 0

    with pytest.raises(TypeError, match="further"):
        run_args(PretrainOptions(shared=MoreOptions()))
