"""Pipeline parallelism trains what one process trains (N3), under every schedule and with FSDP2 inside the stages."""

import re

import pytest
import torch
from helpers.cases import n_steps, slow_except
from helpers.compare_runs import column, copy_without, losses, relative, require_close, require_same
from helpers.groups import Case, run_group
from helpers.processes import finish, flags_for, pretrain
from helpers.small_runs import text_data, write_base, write_rows

from toolkit.checkpoints.weights import load_state
from toolkit.distributed.stages import nearest_micro_batches

LAYERS = ["--model_config.n_layer", "4"]
UNTIED = [*LAYERS, "--train.tie_embeddings", "false"]
BF16 = [*UNTIED, "--precision", "bf16-mixed"]
BARE = ["--model_config.norm_affine", "false"]  # stages have other groups of parameters than the model
MUON = [*UNTIED, *BARE, "--optimizer.name", "Muon"]
NEOX = ["--model_name", "pythia-14m", *LAYERS]
PACKED = ["--data.packing", "best_fit", "--train.max_seq_length", "48"]
ADAPTED = ["--lora_key", "true", "--lora_mlp", "true", "--lora_dropout", "0"]
HEAD = [*ADAPTED, "--lora_head", "true"]
LINEAR = {
    "family": "qwen3_5_text", "norm_offset": True, "norm_qk": True, "attention_gate": True, "tie_embeddings": False,
    "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 16, "conv_size": 4},
    "linear_attention_indices": [1, 1, 1, 0],
}  # fmt: skip
LINEAR_ADAPTERS = ["--lora_linear_attention", "true", "--lora_dropout", "0"]
RECOMPUTED = ["--train.activation_checkpointing", "full"]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zbv")
REFERENCES = {  # name: flags, command
    "eight": ([*UNTIED, "--model_config.n_layer", "8"], "pretrain"),
    "untied": (UNTIED, "pretrain"), "tied": (LAYERS, "pretrain"), "neox": (NEOX, "pretrain"),
    "ragged": ([], "finetune_full"), "packed": (PACKED, "finetune_full"), "bf16": (BF16, "pretrain"),
    "lora": (HEAD, "finetune_lora"), "dora": ([*ADAPTED, "--lora_dora", "true"], "finetune_lora"),
    "qlora": ([*ADAPTED, "--quantize", "bnb.nf4"], "finetune_lora"),
    "muon": (MUON, "pretrain"), "bare": ([*LAYERS, *BARE], "pretrain"),
    "recomputed": ([*UNTIED, *RECOMPUTED], "pretrain"),
    "linear": ([], "finetune_full"), "linear-recomputed": (RECOMPUTED, "finetune_full"),
    "linear-lora": (LINEAR_ADAPTERS, "finetune_lora"),
}  # fmt: skip
CONTEXT, TENSOR = ["--context_parallel_size", "2"], ["--tensor_parallel_size", "2"]
PIPELINES = {  # name: reference, ranks, stages, schedule, and further flags
    **{f"2-{schedule}": ("untied", 2, 2, schedule) for schedule in SCHEDULES},
    "2-tied": ("tied", 2, 2, "1f1b"), "2-tied-interleaved": ("tied", 2, 2, "interleaved"),
    "2-neox": ("neox", 2, 2, "1f1b"), "2-ragged": ("ragged", 2, 2, "1f1b"), "2-packed": ("packed", 2, 2, "1f1b"),
    "2-recomputed": ("recomputed", 2, 2, "1f1b"), "4-muon": ("muon", 4, 4, "1f1b"), "4-bare": ("bare", 4, 4, "gpipe"),
    "2-muon": ("muon", 2, 2, "1f1b"), "2x2-muon": ("muon", 4, 2, "interleaved"),
    "4-gpipe": ("untied", 4, 4, "gpipe"), "4-interleaved": ("eight", 4, 4, "interleaved"),
    "4-zbv": ("eight", 4, 4, "zbv"), "4-1f1b": ("untied", 4, 4, "1f1b"), "4-tied": ("tied", 4, 4, "1f1b"),
    **{f"2x2-{schedule}": ("untied", 4, 2, schedule) for schedule in SCHEDULES}, "2x2-tied": ("tied", 4, 2, "1f1b"),
    "2-bf16": ("bf16", 2, 2, "1f1b"), "2x2-bf16": ("bf16", 4, 2, "1f1b"),
    "context-tied": ("tied", 4, 2, "interleaved", *CONTEXT), "context-packed": ("packed", 4, 2, "1f1b", *CONTEXT),
    "context-ragged": ("ragged", 4, 2, "gpipe", *CONTEXT), "tensor-tied": ("tied", 4, 2, "1f1b", *TENSOR),
    **{f"2-{name}": (name, 2, 2, "1f1b") for name in ("lora", "dora", "qlora")},
    "2x2-lora": ("lora", 4, 2, "interleaved"),
    **{f"linear-{schedule}": ("linear", 2, 2, schedule) for schedule in ("1f1b", "interleaved", "zbv")},
    **{f"2-{name}": (name, 2, 2, "1f1b") for name in ("linear-recomputed", "linear-lora")},
    "offload": ("untied", 2, 2, "1f1b", "--fsdp.cpu_offload", "true"),
    "offload-tied": ("tied", 4, 2, "1f1b", "--fsdp.cpu_offload", "true"),
    **{f"compiled-{schedule}": ("untied", 2, 2, schedule, "--compiler", "torch") for schedule in SCHEDULES},
    "context-zbv": ("untied", 4, 2, "zbv", *CONTEXT), "2x2x2": ("untied", 8, 2, "1f1b", *TENSOR, *CONTEXT),
}  # fmt: skip
FAULTS = {"offload": "offload on a CPU", "compiled": "compile with the eager backend"}
EVALUATED = ["--eval.max_iters", "2", "--eval.max_new_tokens", "8"]


def pipeline(stages: int, schedule: str = "1f1b") -> list[str]:
    return ["--strategy", "fsdp", "--pipeline_parallel_size", str(stages), "--pipeline.schedule", schedule]


@pytest.fixture(scope="module")
def shared(tmp_path_factory, corpus, request) -> dict[str, list[str]]:
    """The flags that the runs of a command share."""
    steps = n_steps(request)
    common = [
        "--accelerator", "cpu", "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_steps", str(steps), "--train.learning_rate", "1e-3",
    ]  # fmt: skip
    base = write_base(tmp_path_factory.mktemp("base"), corpus, n_layer=4, intermediate_size=192)
    linear = write_base(tmp_path_factory.mktemp("linear"), corpus, n_layer=4, intermediate_size=192, **LINEAR)
    rows = ["--data", "JSON", "--data.json_path", str(write_rows(base)), "--data.prompt_style", "plain"]
    text = ["--train.max_seq_length", "32", *text_data(corpus), "--eval.interval", str(steps // 2), *EVALUATED]
    rows += ["--eval.interval", "10"]
    finetuning = [str(base), *common, *rows, "--eval.max_new_tokens", "0"]
    return {
        "pretrain": [*common, *text],
        "finetune_full": finetuning,
        "finetune_lora": finetuning,
        "linear": [str(linear), *common, *rows, *PACKED, *EVALUATED, "--eval.initial_validation", "true"],
    }


def case_of(name: str, flags: list[str], command: str, shared: dict[str, list[str]]) -> Case:
    if command == "pretrain" and "--model_name" not in flags:
        flags = ["--model_name", "pico-llama", *flags]
    fault = FAULTS.get(name.partition("-")[0])
    flags = [*shared["linear" if "linear" in name else command], *flags]
    return Case(name, flags, fault=fault, look_at="gradients", command=command)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared, request):
    """Run the selected pipelines and what they are compared with."""
    folder = tmp_path_factory.mktemp("pipeline")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params.get("name") for item in items} & PIPELINES.keys()
    needed = {PIPELINES[name][0] for name in wanted}
    cases = [case_of(name, *REFERENCES[name], shared) for name in sorted(needed)]
    if "bf16" in needed:
        for micro in (8, 4):  # other micro-batch splits: the tolerance of bf16
            flags = [*BF16, "--train.micro_batch_size", str(micro)]
            cases.append(case_of(f"split-{micro}", flags, "pretrain", shared))
    seen = run_group(folder, 1, cases, [])
    for size in (2, 4, 8):
        cases = []
        for name in sorted(wanted):
            reference, ranks, stages, schedule, *further = PIPELINES[name]
            flags, command = REFERENCES[reference]
            if ranks == size:
                cases.append(case_of(name, [*flags, *pipeline(stages, schedule), *further], command, shared))
        seen |= run_group(folder, size, cases, [])
    return folder, seen


FP32 = [name for name, (reference, *_) in PIPELINES.items() if reference != "bf16"]
ALWAYS = ["2-1f1b"]


@pytest.mark.parametrize("name", slow_except(ALWAYS, FP32))
def test_n3_pipeline_trains_what_one_process_trains(runs, name):
    runs, seen = runs
    reference = PIPELINES[name][0]
    if reference != "qlora":  # 4-bit weights are packed in other shapes
        assert seen[name][0]["initial"] == seen[reference][0]["initial"]  # bit-equal, by two sums of each weight
    require_close(runs / name, runs / reference, atol=1e-6)
    gradients, expected = (torch.load(runs / f"{run}.gradients") for run in (name, reference))
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert (gradient - expected[key]).norm() <= 1e-6 * expected[key].norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in FP32])
def test_n3_pipeline_in_bf16(runs, name):
    runs, _ = runs
    one = losses(runs / "bf16")
    allowed = 2 * max(relative(losses(runs / f"split-{micro}"), one) for micro in (8, 4))
    assert relative(losses(runs / name), one) <= allowed < 2e-3


VALIDATED = [
    "2-1f1b", "2-interleaved", "2-zbv", "2x2-tied", "context-zbv", "2x2x2",
    "linear-1f1b", "linear-interleaved", "linear-zbv", "2-linear-lora",
]  # fmt: skip


def samples(folder) -> list[list[str]]:
    """Return the samples of the runs of each group, from rank 0's output."""
    outputs = [path.read_text() for path in sorted(folder.glob("group-*/0.out"))]
    return [re.findall(r"^sample after.*\n(?:    .*\n)+", output, re.M) for output in outputs]


@pytest.mark.parametrize("name", slow_except(ALWAYS, VALIDATED))
def test_validation_and_samples_go_through_the_stages(runs, name):
    runs, _ = runs
    expected, validated = (column(runs / run, "val_loss") for run in (PIPELINES[name][0], name))
    assert len(expected) >= 2 and validated == pytest.approx(expected, rel=1e-5)
    groups = [set(group) for group in samples(runs)]
    assert len(groups) > 1 and all(groups)
    assert all(group <= groups[0] for group in groups[1:])  # the samples of one process


# Per step of 8 micro-batches: the residual stream and its gradient over each link, the loss, the norm over shards and
# over stages, and between shards one reduction per unit.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stages", "passed", "reduced"),
    [(2, 2, [16, 16], [3, 3]), (4, 4, [16, 32, 32, 16], [3] * 4), (4, 2, [8] * 4, [6, 6, 7, 7])],
)
def test_collectives_of_a_step(tmp_path, shared, ranks, stages, passed, reduced):
    flags = ["--model_name", "pico-llama", *UNTIED, *pipeline(stages), "--train.max_steps", "3", "--eval.interval", "0"]
    case = Case("counted", [*shared["pretrain"], *flags], look_at="collectives")
    seen = run_group(tmp_path, ranks, [case], [])["counted"]
    for rank, n_passed, n_reduced in zip(seen, passed, reduced, strict=True):
        counts = rank["collectives"]
        assert counts["gloo:send"] + counts["gloo:recv"] == n_passed, counts
        assert sum(n for name, n in counts.items() if "reduce" in name) == n_reduced, counts


KEPT = ["--train.save_interval", "7", "--train.keep_last", "0"]
LAYOUTS = {"pp2": (2, 2), "pp4": (4, 4), "2x2": (4, 2), "fsdp": (2, 1), "one": (1, 1)}
RESUMES = [
    ("pp2", "pp2", "sharded", "tied"), ("pp2", "pp2", "full", "untied"), ("pp4", "pp4", "sharded", "tied"),
    ("2x2", "2x2", "full", "tied"), ("pp2", "one", "sharded", "tied"), ("pp2", "pp4", "full", "tied"),
    ("pp4", "pp2", "sharded", "untied"), ("pp2", "fsdp", "full", "tied"), ("fsdp", "pp2", "sharded", "tied"),
    ("one", "pp2", "full", "tied"), ("2x2", "pp2", "sharded", "tied"), ("pp4", "one", "full", "tied"),
    ("pp2", "pp2", "adapters", "tied"),
    ("pp2", "one", "adapters", "tied"), ("one", "pp2", "adapters", "tied"),
    ("pp4", "one", "full", "muon"), ("one", "pp4", "full", "muon"), ("2x2", "2x2", "sharded", "muon"),
    ("pp4", "pp4", "full", "bare"), ("one", "pp4", "sharded", "bare"),
]  # fmt: skip


@pytest.mark.parametrize("name", slow_except(ALWAYS, ["2-1f1b", "4-muon", "4-bare", "2x2-lora"]))
def test_saved_groups_are_those_of_one_process(runs, name):
    runs, _ = runs
    states = [
        load_state(runs / run / "final" / "trainer" / "state.pth")["optimizer"] for run in (name, PIPELINES[name][0])
    ]
    for state in states:
        for group in state["param_groups"]:
            group["params"].sort()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0].keys() == states[1].keys()  # without values by rank


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "kind", "model"), RESUMES)
def test_s2_resume_between_pipelines_and_other_layouts(tmp_path, shared, source, target, kind, model):
    def run(layout: str, out: str, *flags: str) -> None:
        ranks, stages = LAYOUTS[layout]
        command = "finetune_lora" if kind == "adapters" else "pretrain"
        options = ["--model_name", "pico-llama", *REFERENCES[model][0], "--fsdp.state_dict_type", kind]
        options = HEAD if kind == "adapters" else options
        strategy = ["--strategy", "fsdp"] if ranks > 1 else []
        flags = (*shared[command], *options, *KEPT, *pipeline(stages), *strategy, *flags)
        run_group(tmp_path, ranks, [Case(layout, list(flags), command=command, out=out)], [])

    run(source, "first")
    copy_without(tmp_path / "first", tmp_path / "continued", "step-00000014", "final")
    run(target, "continued", "--resume", "auto")
    if source == target:
        require_same(tmp_path / "continued", tmp_path / "first")
    require_close(tmp_path / "continued", tmp_path / "first")


@pytest.mark.slow
def test_error_in_a_middle_stage_ends_all_ranks_with_one_line(corpus, tmp_path):
    flags = [*flags_for(corpus, tmp_path, micro_batch_size=1), "--model_config.n_layer", "3", *pipeline(3)]
    process = pretrain("--devices", "3", *flags, "--callbacks", "helpers.faulty_callbacks.FailInBlock")
    _, err = finish(process)
    assert process.returncode == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert re.search(r"^toolkit pretrain: rank 1: ValueError: this block is broken$", err, re.M), err


def test_micro_batches_that_a_schedule_supports():
    for schedule, size, n, nearest in [
        ("1f1b", 4, 4, [4]), ("1f1b", 4, 2, [4]), ("zbv", 2, 3, [3]),
        ("interleaved", 2, 5, [4, 6]), ("interleaved", 4, 9, [8, 10]), ("interleaved", 4, 3, [4]),
    ]:  # fmt: skip
        assert nearest_micro_batches(schedule, size, n) == nearest
