"""N3 under context parallelism: the ranks of a context group share each row, and train as one process does."""

import pytest
import torch
from helpers.cases import n_steps
from helpers.compare_runs import column, copy_without, losses, relative, require_same
from helpers.groups import Case, run_group
from helpers.small_runs import text_data, write_base, write_rows

from tests.distributed.test_architectures import GEMMA2, flags

LATENT = {  # latent attention without experts
    "family": "deepseek_v3", "n_query_groups": 4,
    "latent_attention": {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 20,
    },
}  # fmt: skip
LONGROPE = {"attention_factor": 1.2, "original_max_seq_len": 20, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
FULL = ["--train.activation_checkpointing", "full"]
EAGER = "compile with the eager backend"
# name: model, flags
PRETRAINED = {
    "llama": ("pico-llama", []),
    "gemma2": ("pico-llama", flags(GEMMA2)),
    "neox": ("pythia-14m", []),
    "latent": ("pico-llama", flags(LATENT)),
    "longrope": ("pico-llama", flags({"family": "phi3", "rope_adjustments": LONGROPE})),
}
# name: command, flags
FINETUNED = {
    "packed": ("finetune_full", ["--data.packing", "best_fit", "--train.max_seq_length", "48"]),
    "ragged": ("finetune_full", ["--train.micro_batch_size", "2"]),
    "lora": ("finetune_lora", ["--lora_key", "true", "--lora_mlp", "true"]),
    "dora": ("finetune_lora", ["--lora_dora", "true"]),
    "qlora": ("finetune_lora", ["--quantize", "bnb.nf4"]),
}
RUNS = {**dict.fromkeys(PRETRAINED, "pretrain"), **{name: command for name, (command, _) in FINETUNED.items()}}
CP2, CP4 = (["--strategy", "fsdp", "--context_parallel_size", size] for size in "24")
# name: ranks, nodes, flags, reference
LAYOUTS = {
    **{f"{name}-2": (2, 1, CP2, name) for name in RUNS},
    **{f"{name}-4": (4, 1, CP4, name) for name in ("llama", "gemma2", "packed", "latent")},
    "packed-2x2": (4, 1, CP2, "packed"),
    "llama-2x2": (4, 1, [*CP2, "--fsdp.accumulate", "sharded"], "llama"),
    "llama-hybrid": (4, 2, CP2, "llama"),
    "gemma2-tensor": (4, 1, [*CP2, "--tensor_parallel_size", "2"], "gemma2"),
    "llama-recomputed": (2, 1, [*CP2, *FULL], "llama"),
    "gemma2-selective": (2, 1, [*CP2, "--train.activation_checkpointing", "selective"], "gemma2"),
    "llama-compiled": (2, 1, [*CP2, "--compiler", "torch"], "llama"),
    "packed-compiled": (2, 1, [*CP2, "--compiler", "torch"], "packed"),
    "llama-offload": (2, 1, [*CP2, "--fsdp.cpu_offload", "true"], "llama"),
}
FAULTS = {"llama-compiled": EAGER, "packed-compiled": EAGER, "llama-offload": "offload on a CPU"}
ALWAYS = ["gemma2-2"]
GRADIENTS = [name for name in LAYOUTS if LAYOUTS[name][3] not in ("lora", "dora", "qlora")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory, corpus, request) -> dict[str, list[str]]:
    """The flags of pretraining and of finetuning."""
    folder = write_base(tmp_path_factory.mktemp("context-input"), corpus, intermediate_size=192)
    write_rows(folder)
    steps = n_steps(request)
    same = [
        "--accelerator", "cpu", "--precision", "32-true", "--train.global_batch_size", "8",
        "--train.max_steps", str(steps), "--train.lr_schedule", "constant", "--train.lr_warmup_steps", "0",
        "--eval.interval", str(steps // 2), "--eval.max_iters", "2",
    ]  # fmt: skip
    text = [*text_data(corpus), "--train.micro_batch_size", "2", "--train.max_seq_length", "32"]
    rows = ["--data", "JSON", "--data.json_path", str(folder / "rows.jsonl"), "--data.prompt_style", "plain"]
    return {
        "pretrain": [*same, *text, "--train.learning_rate", "1e-3"],
        "finetune": [str(folder), *same, *rows, "--train.micro_batch_size", "1", "--train.learning_rate", "1e-3"],
    }


def case(shared: dict[str, list[str]], name: str, reference: str, further: list[str], nodes: int = 1) -> Case:
    if reference in PRETRAINED:
        model, options = PRETRAINED[reference]
        words = [model, *shared["pretrain"], *options]
    else:
        words = [*shared["finetune"], *FINETUNED[reference][1]]
    return Case(name, [*words, *further], nodes, FAULTS.get(name), "collectives gradients", RUNS[reference])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared, request):
    """Run the layouts of the selected tests, and one process for each reference."""
    folder = tmp_path_factory.mktemp("context")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["name"] for item in items}
    seen = run_group(folder, 1, [case(shared, name, name, []) for name in sorted({LAYOUTS[n][3] for n in names})], [])
    for size in (2, 4):
        cases = [
            case(shared, name, reference, flags, nodes)
            for name, (n_ranks, nodes, flags, reference) in LAYOUTS.items()
            if name in names and n_ranks == size
        ]
        seen |= run_group(folder, size, cases, [])
    return folder, seen


def layouts(names):
    """Parametrize by layout; those not in ALWAYS are marked slow."""
    return pytest.mark.parametrize(
        "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@layouts(LAYOUTS)
def test_n3_losses_are_those_of_one_process(runs, name):
    folder, _ = runs
    one = folder / LAYOUTS[name][3]
    assert relative(losses(folder / name), losses(one)) < 1e-5
    validated = column(one, "val_loss")
    assert validated and column(folder / name, "val_loss") == pytest.approx(validated, rel=1e-5)


@layouts(GRADIENTS)
def test_n3_first_gradients_are_those_of_one_process(runs, name):
    folder, _ = runs
    gradients, reference = (torch.load(folder / f"{run}.gradients") for run in (name, LAYOUTS[name][3]))
    assert gradients.keys() == reference.keys()
    total = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for key in reference:
        assert (gradients[key] - reference[key]).norm() <= 1e-6 * total, key


# Two layers. Rows per data-parallel rank / micro-batch: 4 micro-batches, or 2 with two data-parallel ranks.
COLLECTIVES = {"gemma2-2": (8, 8), "llama-4": (8, 8), "llama-2x2": (4, 4), "llama-recomputed": (16, 8)}


@layouts(COLLECTIVES)
def test_keys_and_values_are_gathered_once_per_layer_and_micro_batch(runs, name):
    _, seen = runs
    counts = seen[name][0]["collectives"]
    assert (counts["toolkit::gather_context"], counts["toolkit::scatter_context"]) == COLLECTIVES[name]


@pytest.mark.slow
def test_s2_a_run_resumes_on_other_layouts(tmp_path, shared):
    """Context parallel, one process, fsdp; and context parallel again, bit-equal."""

    def resume(name: str, source: str, size: int, flags: list[str], later: tuple[str, ...]) -> None:
        copy_without(tmp_path / source, tmp_path / name, *later)
        run_group(tmp_path, size, [case(shared, name, "gemma2", [*saves, *flags, "--resume", "auto"])], [])

    saves = ["--train.save_interval", "7", "--train.keep_last", "0"]
    run_group(tmp_path, 2, [case(shared, "two", "gemma2", [*saves, *CP2])], [])
    resume("again", "two", 2, CP2, ("step-00000014", "final"))
    resume("one", "two", 1, [], ("step-00000014", "final"))
    resume("sharded", "one", 2, [], ("final",))
    require_same(tmp_path / "again", tmp_path / "two")
    for name in ("one", "sharded"):
        assert relative(losses(tmp_path / name), losses(tmp_path / "two")) < 1e-5


def test_lengths_that_do_not_divide_are_refused_with_the_nearest(refusal):
    run = ["pretrain", "pico-llama", "--accelerator", "cpu", "--data", "SyntheticTokens", "--train.max_steps", "1"]
    message = "--train.max_seq_length 30: must be a multiple of 8 with --context_parallel_size 4; use 24 or 32"
    assert message in refusal(*run, "--devices", "4", "--context_parallel_size", "4", "--train.max_seq_length", "30")
