"""`toolkit plan`: it understands every flag of the run, decides as the run would, and its advice holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import check_each, slow_except
from toolkit_plan import advice
from toolkit_plan.plan import run_args_of

from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.errors import UserError
from toolkit.planning.resolve import DeviceSpec, device_spec_of


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A plan for GPUs is the same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def plan(capsys, *argv: str, host_gb: int = 64) -> dict:
    assert main(["plan", *argv, "--format", "json", "--host_memory_gb", str(host_gb)]) == 0
    return json.loads(capsys.readouterr().out)


def mistake(capsys, *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    message = re.sub(r"--.* given 2 times; .*\n", "", capsys.readouterr().err)
    assert message.count("\n") == 1
    return message


def test_batch_arithmetic_and_parameters(capsys):
    planned = plan(capsys, "pretrain", "pythia-160m", "--train.micro_batch_size", "4", "--devices", "4", "--num_nodes",
                 "1", "--train.global_batch_size", "256", "--train.max_seq_length", "1024")  # fmt: skip
    assert planned["gradient_accumulation_steps"] == 256 // (4 * 4)
    assert planned["tokens_per_step"] == 262_144
    assert planned["parameters"] == {"total": 162_322_944, "trained": 162_322_944, "matmul": 123_568_128}
    assert planned["fits"] is None and planned["advice"] == []


def test_learning_rates(capsys):
    options = ["pretrain", "pythia-160m", "--train.lr_warmup_steps", "50", "--train.max_steps"]
    rates = plan(capsys, *options, "1000")["learning_rate"]
    assert rates["by_step"] == {"1": pytest.approx(8e-6), "50": pytest.approx(4e-4), "1000": pytest.approx(4e-5)}
    assert len(rates["curve"]) == 20 and rates["curve"][-1] == pytest.approx(4e-5)
    assert main(["plan", *options, "1000"]) == 0
    line = "LR         cosine, 8.0e-06 at step 1, 4.0e-04 at step 50, 4.0e-05 at step 1,000  ▁█"
    assert f"\n{line}" in capsys.readouterr().out
    # rows may be shorter than assumed: the run may have more steps than the plan knows
    assert plan(capsys, *options[:-1], "--train.max_tokens", "1e6")["learning_rate"] is None


def test_quantized_weights_are_named(capsys):
    options = ["pretrain", "pico-llama", "--accelerator", "cpu"]
    note = "linear layers compute with int4 weights in groups of 32"
    assert plan(capsys, *options)["note"] is None
    assert plan(capsys, *options, "--qat.weights", "int4")["note"] == note
    assert main(["plan", *options, "--qat.weights", "int4"]) == 0
    assert f"\n           {note}\nDevices " in capsys.readouterr().out


def test_70b_model_takes_140_gb_in_16_bits(capsys):
    planned = plan(capsys, "finetune_lora", "meta-llama/Llama-2-70b-hf", "--train.max_seq_length", "512")
    assert planned["memory_gb"]["weights"] == pytest.approx(138, abs=2)


def test_plans_for_gpus_that_are_not_present(capsys):
    planned = plan(capsys, "pretrain", "pythia-160m", "--devices", "8", "--num_nodes", "2")
    assert (planned["device"], planned["precision"], planned["devices"]) == ("cuda", "bf16-mixed", 8)
    assert planned["strategy"].startswith("fsdp HYBRID_SHARD")
    assert plan(capsys, "pretrain", "pico-llama", "--accelerator", "cpu")["precision"] == "32-true"
    assert plan(capsys, "finetune_lora", "meta-llama/Llama-2-7b-hf")["precision"] == "bf16-true"


def test_tf32_is_named_where_it_would_be_faster(capsys):
    fp32 = ["--precision", "32-true"]
    t4 = [*fp32, "--train.micro_batch_size", "4", "--speed", "T4"]  # has no TF32
    cases = [([], False), (fp32, True), (t4, False), (["--accelerator", "cpu"], False)]
    for flags, expected in cases:
        assert main(["plan", "pretrain", "pico-llama", *flags]) == 0
        assert ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in capsys.readouterr().out) == expected, flags


def test_flags_and_yaml_are_those_of_the_run(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lora_mlp: true\ntrain:\n  micro_batch_size: 2\n  max_seq_length: 256\n")
    base = ["finetune_lora", "meta-llama/Llama-3.2-1B", "--config", str(file)]
    planned = plan(capsys, *base, "--train.micro_batch_size", "4", "--lora_r", "32")
    assert (planned["micro_batch_size"], planned["max_seq_length"]) == (4, 256)
    assert planned["parameters"]["trained"] == 4 * plan(capsys, *base)["parameters"]["trained"]  # 32 / 8


def test_errors_match_those_of_the_run(capsys):
    assert "--train.micro_batch_siz" in mistake(capsys, "pretrain", "--train.micro_batch_siz", "4")
    assert "not a multiple of 6 " in mistake(capsys, "pretrain", "pythia-160m", "--devices", "6")
    assert "'pretrain'" in mistake(capsys, "pretain")
    assert "must come first" in mistake(capsys, "--devices", "8", "pretrain")
    assert mistake(capsys, "compat").endswith("finetune_lora, compatibility; did you mean 'compatibility'?\n")
    assert "must be given" in mistake(capsys)
    assert "no such folder" in mistake(capsys, "finetune_full", "meta-llama/Lama-9b")
    near = mistake(capsys, "finetune_full", "meta-llama/Llama-3.1-8B-Instuct")
    assert "no such folder" in near and "did you mean 'Llama-3.1-8B-Instruct'" in near
    assert "toolkit pretrain list" in mistake(capsys, "finetune_full", "zzz")
    assert "must be greater than zero" in mistake(capsys, "pretrain", "pythia-160m", "--device_memory_gb", "0")
    assert "--devices 0" in mistake(capsys, "pretrain", "pythia-160m", "--devices", "0")


def test_local_checkpoint_defines_the_architecture(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints" / "meta-llama" / "Llama-2-7b-hf"
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(
        "name: mine\nfamily: llama\nn_layer: 2\nn_embd: 64\nn_head: 4\nvocab_size: 9\n"
    )
    assert plan(capsys, "finetune_full", "meta-llama/Llama-2-7b-hf")["model"] == "mine"


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        pytest.param("pretrain pythia-160m --train.micro_batch_size 64 --device_memory_gb 24",
                     "--train.micro_batch_size 16", marks=pytest.mark.slow),
        pytest.param("finetune_full meta-llama/Llama-2-7b-hf --train.max_seq_length 512 --device_memory_gb 24",
                     "toolkit finetune_lora", marks=pytest.mark.slow),
        ("pretrain pythia-1b --devices 2 --num_nodes 4 --train.micro_batch_size 1 --train.global_batch_size 8"
         " --device_memory_gb 10", "--fsdp.sharding_strategy FULL_SHARD"),
        ("pretrain pythia-1b --train.micro_batch_size 1 --train.max_seq_length 512 --device_memory_gb 17",
         "--optimizer.state_dtype bf16"),
    ],
)  # fmt: skip
def test_advice_is_short_and_correct(capsys, argv, first):
    planned = plan(capsys, *argv.split())
    assert planned["fits"] is False
    (advice,) = planned["advice"]
    assert advice["change"] == first and advice["fits"]
    words = argv.split()
    if first.startswith("toolkit"):
        words[0] = first.split()[1]
    else:
        words += first.split()
    again = plan(capsys, *words)
    assert again["fits"] is True
    assert again["memory_gb"]["total"] == pytest.approx(advice["memory_gb"], abs=0.002)


@pytest.mark.slow
def test_gradients_accumulate_sharded_where_only_that_fits(capsys):
    run = ["pretrain", "pythia-1b", "--devices", "8", "--train.micro_batch_size", "1"]
    unsharded, sharded = (plan(capsys, *run, "--fsdp.accumulate", how) for how in ("unsharded", "sharded"))
    totals = [found["memory_gb"]["total"] for found in (unsharded, sharded)]
    assert totals[0] > totals[1] + 2
    for memory, choice in ((totals[0] + 0.1, "unsharded"), (totals[1] + 0.1, "sharded"), (1, "sharded")):
        planned = plan(capsys, *run, "--device_memory_gb", str(memory))
        assert planned["accumulate"] == choice and planned["fits"] is (memory > 1)
    planned = plan(capsys, *run, "--fsdp.accumulate", "unsharded", "--device_memory_gb", str(totals[1] + 0.1))
    assert [advice["change"] for advice in planned["advice"]] == ["--fsdp.accumulate sharded"]
    assert main(["plan", *run, "--fsdp.accumulate", "sharded"]) == 0
    assert "x 8 accumulated, their gradients sharded\n" in capsys.readouterr().out


def test_sharded_gradients_without_accumulation_are_refused(capsys):
    sharded = ("--devices", "2", "--fsdp.accumulate", "sharded")
    assert "nothing is accumulated" in mistake(
        capsys, "pretrain", "pythia-160m", *sharded, "--train.global_batch_size", "8"
    )
    assert "has no effect with one device" in mistake(capsys, "pretrain", "pythia-160m", "--fsdp.accumulate", "sharded")


@pytest.mark.slow
def test_the_wrap_plan_is_shown(capsys):
    run = ["pretrain", "pythia-160m", "--devices", "2"]
    assert plan(capsys, *run)["units"] == (
        "12 x Block, 7,087,872 parameters each; Embedding, 38,633,472; Head, 38,633,472; root, 1,536"
    )
    size = plan(capsys, *run, "--fsdp.auto_wrap", "size")
    assert size["strategy"].startswith("fsdp FULL_SHARD, units by size, 2 shards") and "wraps nothing" in size["units"]
    assert size["memory_gb"]["unsharded_unit"] > plan(capsys, *run)["memory_gb"]["unsharded_unit"]
    assert main(["plan", *run]) == 0 and "\nFSDP units 12 x Block, " in capsys.readouterr().out
    assert plan(capsys, "pretrain", "pythia-160m")["units"] is None
    assert plan(capsys, *run, "--fsdp.auto_wrap", "size", "--compiler", "torch")["compiler"] == "torch"


@pytest.mark.slow
def test_offload_and_steps_in_the_backward_pass_are_planned(capsys):
    run = ["finetune_full", "meta-llama/Llama-2-7b-hf", "--devices", "8", "--train.global_batch_size", "8"]
    planned = plan(capsys, *run, "--fsdp.cpu_offload", "true")
    assert planned["host_memory_gb"] == pytest.approx(4 * 26.95 / 8, rel=0.01)
    assert planned["memory_gb"]["optimizer"] < 0.01
    one = plan(capsys, "pretrain", "pythia-160m", "--fsdp.cpu_offload", "true")
    assert one["strategy"].startswith("fsdp FULL_SHARD") and one["memory_gb"]["optimizer"] < 0.01
    one = ["pretrain", "pythia-1b", "--train.global_batch_size", "1", "--train.micro_batch_size", "1"]
    one += ["--train.max_seq_length", "256", "--train.max_norm", "0", "--device_memory_gb", "16.5"]
    planned = plan(capsys, *one)
    assert planned["advice"][0]["change"] == "--optimizer.in_backward true"
    again = plan(capsys, *one, "--optimizer.in_backward", "true")
    assert again["fits"] and again["memory_gb"]["gradients"] < 0.5


def test_static_graph_with_accumulation_is_refused(capsys):
    run = ("pretrain", "pythia-160m", "--devices", "2", "--strategy", "ddp", "--ddp.static_graph", "true")
    assert "use --train.micro_batch_size 32\n" in mistake(capsys, *run)
    assert plan(capsys, *run, "--train.micro_batch_size", "32")["strategy"].startswith("ddp")


@pytest.mark.slow
def test_sequences_are_shortened_last(capsys):
    cases = {
        ("finetune_lora", "18"): [],
        ("finetune_lora", "10"): ["--quantize bnb.nf4"],
        ("finetune_full", "18"): ["toolkit finetune_lora"],
        ("finetune_full", "10"): ["--fsdp.cpu_offload true", "toolkit finetune_lora"],
    }
    for (command, memory), more in cases.items():
        planned = plan(capsys, command, "meta-llama/Llama-2-7b-hf", "--device_memory_gb", memory)
        changes = [advice["change"] for advice in planned["advice"]]
        assert planned["advice"][-1]["fits"] and changes == ["--train.activation_checkpointing full", *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        "pretrain Llama-3-70B --devices 8 --num_nodes 4 --train.micro_batch_size 2 --device_memory_gb 80",
        "finetune_lora meta-llama/Meta-Llama-3-8B --train.max_seq_length 4096 --device_memory_gb 24",
    ],
)
def test_large_models_fit_by_checkpointing(capsys, argv):
    planned = plan(capsys, *argv.split())
    assert planned["fits"] is False and planned["activation_checkpointing"] == "none"
    changes = [advice["change"] for advice in planned["advice"]]
    assert planned["advice"][-1]["fits"] and not any("max_seq_length" in change for change in changes)
    flags = " ".join(changes).split()
    assert "--train.activation_checkpointing" in flags
    again = plan(capsys, *argv.split(), *flags)
    assert again["fits"] is True and again["activation_checkpointing"] in ("selective", "full")
    assert again["memory_gb"]["total"] == pytest.approx(planned["advice"][-1]["memory_gb"], abs=0.002)


def test_the_scaled_learning_rate_is_shown(capsys):
    run = ["plan", "pretrain", "pythia-14m", "--train.lr_scaling", "sqrt", "--train.global_batch_size", "256"]
    assert main([*run, "--train.max_steps", "100"]) == 0
    assert "peak learning rate 0.0004 x 2 = 0.0008" in capsys.readouterr().out


def test_the_table_names_the_mode(capsys):
    assert main(["plan", "pretrain", "pythia-160m", "--train.activation_checkpointing", "full"]) == 0
    shown = capsys.readouterr().out
    assert "\nRecompute  all activations of a block except its input" in shown and "\n  recomputed_block " in shown


def test_the_cpu_memory_of_a_node_limits_what_is_offloaded(capsys):
    run = ["pretrain", "Llama-2-7b-hf", "--devices", "8", "--num_nodes", "4", "--train.global_batch_size", "32",
           "--train.micro_batch_size", "1", "--train.activation_checkpointing", "full"]  # fmt: skip
    planned = plan(capsys, *run, "--fsdp.cpu_offload", "true", "--device_memory_gb", "40", host_gb=100)
    assert planned["node"] == {"memory_gb": pytest.approx(16 * 6.738, rel=0.01), "limit_gb": 100}
    assert planned["fits"] is False and planned["memory_gb"]["total"] < 40
    (advice,) = planned["advice"]
    assert advice["change"] == "--fsdp.sharding_strategy FULL_SHARD" and advice["fits"]
    assert advice["node_memory_gb"] == pytest.approx(16 * 6.738 / 4, rel=0.01)
    # FULL_SHARD stays although offloading follows: otherwise a node would need four times as much
    for host_gb, is_sharded in ((200, False), (100, True)):
        run[2:] = ["--devices", "8", "--num_nodes", "4", "--train.global_batch_size", "32", "--train.micro_batch_size",
                   "1", "--device_memory_gb", "7"]  # fmt: skip
        planned = plan(capsys, *run, host_gb=host_gb)
        changes = [advice["change"] for advice in planned["advice"]]
        assert planned["advice"][-1]["fits"] and "--fsdp.cpu_offload true" in changes, planned["advice"]
        assert ("--fsdp.sharding_strategy FULL_SHARD" in changes) == is_sharded


@pytest.mark.slow
def test_insufficient_advice_is_reported_as_such(capsys):
    assert main(["plan", "pretrain", "pythia-160m", "--device_memory_gb", "0.1", "--accelerator", "cpu"]) == 0
    assert "These changes are not enough" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_part(capsys):
    run = ["pretrain", "pythia-160m", "--devices", "8", "--device_memory_gb", "80"]
    assert main(["plan", *run]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\nStrategy   fsdp FULL_SHARD, one unit per block, 8 shards \(", shown)
    assert "\n           micro batch auto: a device's share" in shown
    assert "\nCompiler   none (auto: compilation takes about " in shown
    assert re.search(r"\nData       PythonStdlib: about 1,\d\d\d training rows, not prepared yet\n", shown)
    assert re.search(
        r"\n           note: this data is a stand-in, 2\.\d+M .*pythia-160m wants 2\.47B, .*fineweb", shown
    )
    assert re.search(r"\nLength     about 7\d steps: 9,\d{3},\d{3} tokens, 4 epochs: 20 tokens per active para", shown)
    assert all(
        f"\n  {part} " in shown for part in ("weights", "gradients", "optimizer", "unsharded_unit", "activations")
    )
    assert "\n  adapters" not in shown and "Fits into 80 GB." in shown


def test_the_end_says_what_the_run_would_still_refuse(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    complete = ["pretrain", "pythia-160m", "--devices", "8", "--num_nodes", "2"]
    assert plan(capsys, *complete)["missing"] == []

    def check(words: str, *messages: str) -> None:
        # a short micro-batch, traced once: auto would trace another one for the compiler
        assert main(["plan", *words.split(), "--compiler", "none", "--train.max_seq_length", "512"]) == 0
        shown = capsys.readouterr().out.partition("\nNot yet complete: ")[2].splitlines()
        assert [line for line in shown if not line.startswith("Not yet complete: ")] == shown[:1]
        assert len(shown) == len(messages) and all(text in line for text, line in zip(messages, shown, strict=True)), (
            shown
        )

    base, rows = "meta-llama/Llama-3.2-1B", "--data.json_path missing.json"
    check_each(check, [
        (f"finetune_lora {base} {rows}", f"`toolkit download {base}`", "no such file"),
        (f"finetune_lora {base}", f"`toolkit download {base}`", f"`toolkit finetune_lora {base} --data JSON"),
        (f"pretrain --initial_checkpoint_dir {base}", "the run has no limit", f"initial_checkpoint_dir {base}"),
        ("pretrain tiny-llama-1.1b --data Alpaca2k", "`toolkit download TinyLlama/TinyLlama_v1.1 --tokenizer_only`"),
    ])  # fmt: skip


def test_oom_advice_uses_the_runs_values(monkeypatch):
    monkeypatch.setattr(advice, "device_memory", lambda device: 24e9)
    arguments = parse("pretrain", ["pythia-160m", "--train.micro_batch_size", "64"])
    with run_args_of(**arguments) as args:
        error = advice.out_of_memory(args, DeviceSpec("cuda", 1, 1))
    assert isinstance(error, UserError)
    assert str(error).startswith("--train.micro_batch_size 64: out of memory on cuda: this run needs about 50.7 GB")
    assert "activations 4" in str(error) and "use --train.micro_batch_size 16 (1" in str(error)


def test_oom_advice_goes_on_from_the_runs_checkpointing(monkeypatch):
    monkeypatch.setattr(advice, "device_memory", lambda device: 24e9)
    words = ["meta-llama/Meta-Llama-3-8B", "--train.max_seq_length", "8192"]
    words += ["--data.json_path", "x", "--train.activation_checkpointing", "selective"]
    with run_args_of(**parse("finetune_lora", words)) as args:
        error = str(advice.out_of_memory(args, DeviceSpec("cuda", 1, 1)))
    assert "use --train.activation_checkpointing full (" in error and "selective (" not in error


@pytest.mark.slow
def test_adapters_that_are_too_large_are_the_advice(capsys):
    words = ["HuggingFaceTB/SmolLM2-135M-Instruct", "--data.json_path", "x", "--lora_r", "999999"]
    assert main(["plan", "finetune_lora", *words, "--device_memory_gb", "80"]) == 0
    assert "use more --devices, --num_nodes, or a smaller model or --lora_r." in capsys.readouterr().out


def test_finetuning_arguments_match_the_command():
    arguments = parse("finetune_lora",
                      ["HuggingFaceTB/SmolLM2-135M-Instruct", "--lora_r", "4", "--data.json_path", "x"])  # fmt: skip
    with run_args_of(**arguments) as args:
        assert args.command == "finetune_lora" and args.lora.r == 4
        assert device_spec_of(args) == DeviceSpec("cuda", 1, 1)
    with run_args_of(**parse("pretrain", [])) as args:
        assert args.command == "pretrain"


def test_help_names_the_options_of_the_run(capsys):
    assert main(["plan", "finetune_lora", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--lora_r" in shown and "--device_memory_gb" in shown and "Rank of the adapters" in shown


@pytest.mark.slow
def test_a_plan_needs_no_lightning():
    words = ["plan", "pretrain", "pico-llama", "--accelerator", "cpu"]
    code = f"import sys; from toolkit.cli import main; sys.exit(main({words}) or 'lightning.fabric' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


PAGE = (Path(__file__).parents[3] / "tutorials" / "plans.md").read_text()
PLANS = [row.split("|") for row in re.findall(r"^\| ((?:tiny-llama|Llama-).*`.*) \|$", PAGE, re.M)]


@pytest.mark.parametrize("row", slow_except(PLANS[:1], PLANS), ids=lambda row: "".join(row[:2]))
def test_plans_of_the_page(row, capsys):
    model, gpus, length, tokens, flags, memory, _ = (cell.strip() for cell in row)
    layout = f"--devices 8 --num_nodes {int(gpus) // 8} --train.max_seq_length {length.replace(',', '')}"
    command = (
        f"plan pretrain {model} {layout} {flags.strip('`')} --device_memory_gb 80 --host_memory_gb 2000 --format json"
    )
    assert main(command.split()) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"]
    assert f"{planned['memory_gb']['total']:.1f}" == memory
    assert f"{planned['tokens_per_step'] / 1e6:.1f}" == tokens


@pytest.mark.slow
def test_changes_with_less_effect_on_the_result_are_advised(capsys):
    """Also --fsdp.cpu_offload with a smaller batch instead of FULL_SHARD would fit."""
    layout = "--devices 8 --num_nodes 128 --train.max_seq_length 8192"
    batch = "--train.global_batch_size 2048 --train.micro_batch_size 1"
    command = f"pretrain Llama-3.1-405B {layout} {batch} --device_memory_gb 80"
    assert [advice["change"] for advice in plan(capsys, *command.split(), host_gb=10)["advice"]] == [
        "--fsdp.sharding_strategy FULL_SHARD", "--train.activation_checkpointing full", "--precision bf16-true",
    ]  # fmt: skip
