"""An FSDP guide's YAML and minGPT's hydra file: what each key becomes, and a run of each."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from toolkit_foreign.formats import FORMATS
from toolkit_foreign.groups import GROUPS

from toolkit.cli import main
from toolkit.cli import parser as cli_parser
from toolkit.config import PRETRAIN
from toolkit.data import CharText, SyntheticTokens
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.strategy import plan_strategy
from toolkit.errors import UserError
from toolkit.optim.schedule import build_schedule
from toolkit.planning.compatibility import find_conflicts
from toolkit.planning.facts import Facts
from toolkit.planning.limits import Progress, build_limits
from toolkit.planning.run_args import RunArgs

TUTORIALS = Path(__file__).parents[3] / "tutorials"
GUIDE = re.search(r"```yaml\n(distributed:.*?)```", (TUTORIALS / "distributed.md").read_text(), re.S)[1]
MINGPT = """\
data_config:
  path: https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
  block_size: 128
  train_split: 0.9
  truncate: 0.05
gpt_config:
  n_layer: 8
  n_head: 8
  n_embd: 512
trainer_config:
  max_epochs: 10
  batch_size: 216
  data_loader_workers: 4
  grad_norm_clip: 1.0
  snapshot_path: gpt_snapshot.pt
  save_every: 3
  use_amp: True
optimizer_config:
  weight_decay: 0.1
  learning_rate: 0.0003

hydra:
  run:
    dir: ./
"""


FREE_TRANSFORMER = """\
model:
  vocab_size: 1000
  hidden_dim: 128
  num_layers: 4
  num_heads: 4
  num_kv_heads: 4
  ffn_hidden_dim: 512
  max_seq_len: 128
  dropout: 0.1
  use_rmsnorm: true
  use_rope: true
  use_swiglu: true
  latent_dim: 8
  split_layer: 2

training:
  learning_rate: 3.0e-4
  weight_decay: 0.1
  beta1: 0.9
  beta2: 0.95
  grad_clip: 1.0
  warmup_steps: 100
  gradient_accumulation_steps: 1
  beta_kl: 1.0
  kappa_free_bits: 0.3466
  batch_size: 8
  max_steps: 100
  log_every: 10
  eval_every: 20
  save_every: 50
  checkpoint_dir: "./checkpoints/test_free/baseline"

data:
  dataset_name: "synthetic-test-free"
  data_dir: "./data"
  max_length: 128
  num_workers: 2
"""  # the keys and values of configs/free_transformer.yaml of udapy/free-transformer


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Return a function that resolves the options of ``toolkit pretrain`` from the contents of files and from flags."""
    monkeypatch.chdir(tmp_path)

    def run(contents: str | dict | list, *flags: str, devices: int = 2) -> dict:
        words = ["--accelerator", "cpu", "--devices", str(devices)]
        for i, content in enumerate(contents if isinstance(contents, list) else [contents]):
            Path(f"file{i}.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
            words += ["--config", f"file{i}.yaml"]
        found = cli_parser.parse("pretrain", [*words, *flags])
        return vars(found["options"]) | vars(found["options"].shared)

    return run


def look_up(options: dict, name: str):
    for part in name.split("."):
        options = options[part] if isinstance(options, dict) else getattr(options, part)
    return options


# keys, and the options that they set on 2 devices
EFFECTS = [
    (
        {
            "training": {
                "batch_size": 8,
                "learning_rate": "2e-4",
                "gradient_checkpointing": True,
                "bf16": True,
                "gradient_clip_norm": 0.5,
            },
            "distributed": {
                "fsdp_sharding_strategy": "shard_grad_op",
                "fsdp_backward_prefetch": "backward_post",
                "fsdp_forward_prefetch": True,
                "fsdp_auto_wrap_policy": "size_based_auto_wrap",
                "fsdp_min_num_params": 5000,
                "fsdp_state_dict_type": "sharded_state_dict",
                "fsdp_reduce_dtype": "bfloat16",
                "fsdp_buffer_dtype": "float32",
                "cpu_offload": True,
            },
        },
        {
            "train.micro_batch_size": 8,
            "train.global_batch_size": 16,
            "train.learning_rate": 2e-4,
            "train.activation_checkpointing": "full",
            "precision": "bf16-mixed",
            "train.max_norm": 0.5,
            "fsdp.sharding_strategy": "SHARD_GRAD_OP",
            "fsdp.backward_prefetch": "none",
            "fsdp.forward_prefetch": True,
            "fsdp.auto_wrap": "size",
            "fsdp.min_num_params": 5000,
            "fsdp.state_dict_type": "sharded",
            "fsdp.reduce_dtype": "bf16",
            "fsdp.buffer_dtype": "auto",
            "fsdp.cpu_offload": True,
        },
    ),
    ({"training": {"bf16": False, "gradient_checkpointing": False}}, {"precision": "32-true"}),
    (
        {
            "model": {
                "vocab_size": 1000,
                "hidden_dim": 128,
                "num_layers": 4,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_hidden_dim": 512,
                "max_seq_len": 64,
                "dropout": 0.1,
                "use_rmsnorm": True,
                "use_rope": True,
                "use_swiglu": True,
                "latent_dim": 8,
                "split_layer": 2,
            },
            "training": {
                "batch_size": 8,
                "gradient_accumulation_steps": 3,
                "warmup_steps": 4,
                "weight_decay": 0.2,
                "beta1": 0.8,
                "beta2": 0.95,
                "grad_clip": 0.5,
                "max_steps": 100,
                "num_epochs": 3,
                "log_every": 10,
                "eval_every": 20,
                "save_every": 50,
                "checkpoint_dir": "checkpoints/free",
                "beta_kl": 1.0,
                "kappa_free_bits": 0.3466,
            },
            "data": {"dataset_name": "synthetic", "data_dir": "data", "max_length": 32, "num_workers": 1},
        },
        {
            "data": SyntheticTokens(1000, num_workers=1),
            "model_config.n_embd": 128,
            "model_config.n_layer": 4,
            "model_config.n_head": 4,
            "model_config.n_query_groups": 2,
            "model_config.intermediate_size": 512,
            "model_config.block_size": 64,
            "model_config.family_options.latent_bits": 8,
            "model_config.family_options.free_bits": 0.5,
            "train.max_seq_length": 32,
            "train.micro_batch_size": 8,
            "train.global_batch_size": 48,
            "train.lr_warmup_steps": 4,
            "train.max_norm": 0.5,
            "train.max_steps": 100,
            "train.epochs": 3.0,
            "train.log_interval": 10,
            "train.save_interval": 50,
            "eval.interval": 20,
            "optimizer.weight_decay": 0.2,
            "optimizer.betas": (0.8, 0.95),
            "out_dir": "checkpoints/free",
        },
    ),
    (
        {"distributed": {"use_fsdp": True, "fsdp_min_num_params": 5, "fsdp_sharding_strategy": "full_shard"}},
        {"strategy": "fsdp", "fsdp.min_num_params": "auto", "fsdp.sharding_strategy": "FULL_SHARD"},
    ),
    ({"distributed": {"use_fsdp": False, "cpu_offload": True}}, {"strategy": "ddp", "fsdp.cpu_offload": False}),
    ({"distributed": {"fsdp_sharding_strategy": "no_shard"}}, {"fsdp.sharding_strategy": "NO_SHARD"}),
    ({"distributed": {"fsdp_mixed_precision": True}}, {"precision": "bf16-mixed"}),
    ({"distributed": {"fsdp_param_dtype": "float32"}}, {"precision": "32-true"}),
    ({"distributed": {"fsdp_mixed_precision": False, "fsdp_param_dtype": "bfloat16"}}, {"precision": "32-true"}),
    ({"distributed": {"fsdp_param_dtype": "float16", "fsdp_mixed_precision": True}}, {"precision": "16-mixed"}),
    (
        {
            "data_config": {"path": "my.txt", "block_size": 64, "train_split": 0.8, "truncate": 0.5},
            "gpt_config": {"n_layer": 3, "n_head": 3, "n_embd": 33},
            "optimizer_config": {"weight_decay": 0.3, "learning_rate": 0.01},
            "trainer_config": {
                "max_epochs": 10,
                "batch_size": 3,
                "data_loader_workers": 5,
                "grad_norm_clip": 2,
                "snapshot_path": "snapshot.pt",
                "save_every": 3,
                "use_amp": False,
            },
        },
        {
            "data": CharText("my.txt", stride=1, train_split=0.8, truncate=0.5, num_workers=5),
            "train.max_seq_length": 64,
            "model_name": "gpt-mini",
            "model_config.block_size": 64,
            "model_config.n_layer": 3,
            "model_config.n_head": 3,
            "model_config.n_embd": 33,
            "optimizer.weight_decay": 0.3,
            "train.learning_rate": 0.01,
            "train.lr_schedule": "constant",
            "train.lr_warmup_steps": 0,
            "train.epochs": 10.0,
            "train.global_batch_size": 6,
            "train.max_norm": 2.0,
            "resume": "auto",
            "out_dir": "snapshot",
            "train.save_interval": "auto",  # epochs there, which is reported
            "precision": "32-true",
        },
    ),
    ({"gpt_config": {"model_type": "gpt-nano"}, "trainer_config": {"use_amp": True}}, {"model_name": "gpt-nano"}),
]


def test_every_key_has_its_effect(parse):
    for content, expected in EFFECTS:
        options = parse(content)
        assert {name: look_up(options, name) for name in expected} == expected
    seen = {f"{group}.{key}" for content, _ in EFFECTS for group, keys in content.items() for key in keys}
    assert seen == {f"{group}.{key}" for group, keys in FORMATS.items() for key in keys} and (*FORMATS,) == GROUPS


@pytest.mark.slow
def test_printed_guide_fits_any_layout(parse):
    """No key is refused because it has no effect: on a laptop, with other flags, and with other values."""
    other = GUIDE.replace('"backward_pre"', '"backward_post"').replace("transformer_auto_wrap", "size_based_auto_wrap")
    other = other.replace("forward_prefetch: false", "forward_prefetch: true").replace(
        'e: "float32"', 'e: "bfloat16"', 1
    )
    for content, flags, devices in (
        (GUIDE, (), 1),
        (GUIDE, (), 2),
        (other, (), 1),
        (other, ("--strategy", "single"), 1),
        (other, ("--strategy", "ddp"), 2),
        (other, ("--precision", "32-true"), 2),
        (other.replace("full_shard", "no_shard"), (), 2),
        (other.replace("use_fsdp: true", "use_fsdp: false"), (), 2),
        (other, (), 2),
    ):
        options = parse(content, *flags, devices=devices)
        arguments = {name: options[name] for name in ("strategy", "fsdp", "ddp", "precision")}
        strategy = plan_strategy(**arguments, devices=devices, num_nodes=1, accelerator="cpu")
        args = RunArgs(
            command="pretrain", data=options["data"], train=options["train"], eval=options["eval"],
            optimizer=options["optimizer"], out_dir="out", **arguments,
        )  # fmt: skip
        assert not list(find_conflicts(Facts(args, args.precision, "cpu", devices, strategy)))
    fsdp = options["fsdp"]
    assert (fsdp.auto_wrap, fsdp.min_num_params, fsdp.reduce_dtype) == ("size", 1_000_000, "bf16")
    assert (fsdp.backward_prefetch, fsdp.forward_prefetch, fsdp.buffer_dtype) == ("none", True, "auto")


def test_what_cannot_be_honored_is_an_error_unless_a_flag_overrides_it(parse):
    for content, message, flags in (
        ("training: {batch_sise: 8}", "file0.yaml: training.batch_sise: no such key; did you mean 'batch_size'?", None),
        ("training: 3", "file0.yaml: training: 3: must be a group of `name: value` pairs", None),
        (
            "training: {batch_size: 0.5}",
            "batch_size: 0.5: must be an integer greater",
            ["--train.micro_batch_size", "2", "--train.global_batch_size", "4"],
        ),
        ("training: {bf16: 1}", "file0.yaml: training.bf16: 1: must be true or false", ["--precision", "32-true"]),
        ("model: {num_layers: 4, split_layer: 1}", "split_layer: 1: must be half of num_layers", None),
        ("data: {dataset_name: wikitext}", "wikitext: use --data HuggingFaceText --data.repo_id wikitext", None),
        (
            "distributed: {fsdp_state_dict_type: local_state_dict}",
            "fsdp_state_dict_type: local_state_dict: use sharded_state_dict",
            ["--fsdp.state_dict_type", "full"],
        ),
        (
            "distributed: {fsdp_sharding_strategy: full_shart}",
            "full_shart: must be full_shard or shard_grad_op or no_shard; did you mean 'full_shard'?",
            ["--fsdp.sharding_strategy", "FULL_SHARD"],
        ),
        (
            "distributed: {fsdp_auto_wrap_policy: custom}",
            "custom: name the classes of the units: --fsdp.auto_wrap class --fsdp.wrap_classes",
            ["--fsdp.auto_wrap", "class", "--fsdp.wrap_classes", "Block"],
        ),
        (
            "distributed: {fsdp_reduce_dtype: float16}",
            "fsdp_reduce_dtype: float16: needs the gradient scaler of --precision 16-mixed",
            ["--fsdp.reduce_dtype", "fp32"],
        ),
        (
            "distributed: {fsdp_mixed_precision: true}\ntraining: {bf16: false}",
            "training.bf16: means --precision 32-true, but distributed.fsdp_mixed_precision means --precision bf16-",
            ["--precision", "32-true"],
        ),
        (
            "training: {learning_rate: 1e-3}\ntrain: {learning_rate: 2e-3}",
            "file0.yaml: training.learning_rate: 1e-3: the file also sets train.learning_rate; keep one of them",
            ["--train.learning_rate", "1e-4"],
        ),
        (MINGPT.replace("0.05", "2"), "truncate: 2: must be greater than 0 and at most 1", ["--data", "PythonStdlib"]),
    ):
        with pytest.raises(UserError) as caught:
            parse(content)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        if flags:
            parse(content, *flags)


def test_wrong_devices_are_reported_as_without_the_file(parse):
    with pytest.raises(UserError, match="^--devices 0: must be auto or at least 1"):
        parse(GUIDE, devices=0)


def test_order_of_files_and_flags(parse):
    files = ["train: {learning_rate: 1.0}\ntraining: {batch_size: 4}", GUIDE, "{seed: 7, devices: 3}"]
    options = parse([*files, "training: {gradient_clip_norm: 3}"], "--train.micro_batch_size", "2", devices=4)
    train = options["train"]
    assert (train.learning_rate, train.micro_batch_size, train.global_batch_size) == (2e-4, 2, 64 * 4)
    assert train.max_norm == 3 and options["seed"] == 7
    assert parse(["training: {learning_rate: 1e-3}", "train: {learning_rate: 1.0}"])["train"].learning_rate == 1.0


def test_a_snapshot_path_may_be_a_url(parse):
    assert look_up(parse("trainer_config: {snapshot_path: s3://a/b.pt}"), "out_dir") == "s3://a/b"


def test_each_key_is_reported_once_and_on_rank_0_only(parse, monkeypatch, capsys):
    parse(GUIDE, "--train.learning_rate", "1e-3", devices=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(len(keys) for keys in yaml.safe_load(GUIDE).values())
    for line in (
        "training.batch_size 64 -> --train.micro_batch_size 64 --train.global_batch_size 64 (it is per device)",
        "training.learning_rate 2e-4: overridden by --train.learning_rate 1e-3",
        "distributed.fsdp_backward_prefetch backward_pre: no effect on one device",
        "distributed.fsdp_min_num_params 1000000: no effect without fsdp_auto_wrap_policy size_based_auto_wrap",
        "distributed.fsdp_buffer_dtype float32: already set by --precision bf16-mixed",
    ):
        assert f"file0.yaml: {line}" in lines
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert parse(GUIDE, devices=2)["train"].global_batch_size == 128
    assert not capsys.readouterr().err


SMALL = "--accelerator cpu --train.max_steps 1 --train.micro_batch_size 2 --train.global_batch_size 2 --out_dir out"


def test_run_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("guide.yaml").write_text(GUIDE)
    data = "--data SyntheticTokens --data.num_rows 8 --data.vocab_size 50 --train.max_seq_length 16"
    assert main(["pretrain", "pico-llama", "--config", "guide.yaml", *data.split(), *SMALL.split()]) == 0
    saved = yaml.safe_load(Path("out/final/hyperparameters.yaml").read_text())
    assert saved["precision"] == "bf16-mixed" and saved["train"]["activation_checkpointing"] == "full"


def test_mingpt_on_several_processes_has_the_rows_of_mingpt(parse):
    """minGPT's CharDataset has len(data) - block_size rows, of which 90 % are trained; one batch is per GPU."""
    size = 1_115_394  # of the file that minGPT downloads
    Path("input.txt").write_text(("".join(map(chr, range(32, 97))) * (size // 65 + 1))[:size])
    for devices in (2, 4):
        options = parse(re.sub("https://.*", "input.txt", MINGPT), devices=devices)
        train, data = options["train"], options["data"]
        rows = data.prepare(tokenizer=None, max_seq_length=128, report=[].append).train
        held_out = int(0.1 * int(0.05 * size))
        assert len(rows) == int(0.05 * size) - held_out - 128
        for i in (0, 1, len(rows) - 1):
            assert torch.equal(rows[i]["input_ids"], rows[0]["input_ids"][:1] + torch.arange(i, i + 128) % 65)
        limits = build_limits(train, Progress(), n_rows=len(rows), tokens_per_row=128)
        assert train.global_batch_size == 216 * devices
        assert limits.total_steps == pytest.approx(10 * (55_769 - 128) * 0.9 / (216 * devices), rel=2e-3)


def test_the_free_transformer_warms_up_over_the_whole_run(parse):
    for devices in (1, 2):
        train = parse(FREE_TRANSFORMER, devices=devices)["train"]
        rates = [*map(build_schedule(train, train.max_steps, PRETRAIN).learning_rate, range(100))]
        assert rates == pytest.approx([3e-4 * (step + 1) / 100 for step in range(100)])
        assert train.global_batch_size == 8 * devices


def test_errors_name_the_key_of_the_file(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text("training: {warmup_steps: 3, max_steps: 2}")
    command = ["pretrain", "pico-llama", "--config", "file.yaml", "--accelerator", "cpu", "--data", "SyntheticTokens"]
    assert "must be at most the 2 steps of the run; it is set by file.yaml: training.warm" in refusal(*command)
    assert "--train.lr_warmup_steps 4: must be at most the 2 steps of the run\n" in refusal(
        *command, "--train.lr_warmup_steps", "4"
    )


@pytest.mark.slow
def test_run_of_mingpt(tmp_path, monkeypatch, corpus, web):
    """The file as it stands; only its URL is a server on this machine."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2_train_cfg.yaml").write_text(re.sub("https://.*", f"{web}/input.txt", MINGPT))
    text = "".join(file.read_text() for file in sorted(corpus.iterdir()))
    Path("input.txt").write_text(text * (1 + 30_000 // len(text)))
    command = re.search(r"^toolkit (pretrain .*gpt2_train_cfg.*)$", (TUTORIALS / "from_nanogpt.md").read_text(), re.M)[
        1
    ]
    model = "--model_config.n_layer 1 --model_config.n_head 2 --model_config.n_embd 16 --data.num_workers 0"
    assert main([*command.split(), *model.split(), *SMALL.split()]) == 0
    config = yaml.safe_load(Path("out/final/model_config.yaml").read_text())
    text = Path("input.txt").read_text()
    assert config["family"] == "gpt2" and config["block_size"] == 128 and config["vocab_size"] == len(set(text)) + 2
    tokenizer = Tokenizer.load("out/final")
    assert len(tokenizer.encode(text)) == len(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert main(["evaluate", "out/final", "--trust_checkpoint_data", "true", "--eval.max_iters", "1"]) == 0
