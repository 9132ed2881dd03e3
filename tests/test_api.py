"""`import toolkit`: user-provided modules, datasets and optimizers, in one process and in several."""

import json
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers.compare_runs import losses
from helpers.processes import Forked, finish, start
from toolkit_metric.evaluate import open_checkpoint
from toolkit_metric.options import EvaluateOptions
from torch import nn

import toolkit
from toolkit import api
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.config import TrainArgs
from toolkit.data import SyntheticTokens
from toolkit.data.batch import choose_padding
from toolkit.data.tokens.rows import InMemoryDataset
from toolkit.errors import PeerShutdownError, UserError
from toolkit.models.gpt import GPT
from toolkit.models.loss_wrapper import LossWrapper, find_blocks
from toolkit.training import build, data_reader, engine

ROOT = Path(__file__).parents[1]
MODELS = '''
import torch
from torch import nn


class Layer(nn.Module):
    """Single-head attention and a linear layer."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Net(nn.Module):
    """Returns logits."""

    def __init__(self, vocabulary=64, width=32, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NetWithLoss(Net):
    """The same, with its own loss."""

    def forward(self, input_ids, labels):
        loss = nn.functional.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )


class Rows:
    """Ragged, partly masked rows."""

    def __len__(self):
        return 40

    def __getitem__(self, row):
        tokens = torch.randint(0, 64, (25 - row % 7,), generator=torch.Generator().manual_seed(row))
        labels = tokens[1:].clone()
        labels[: row % 11] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


class Plain(torch.optim.Optimizer):
    """Gradient descent with weight decay."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad * group["lr"])


TRAIN = {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 3e-3}
'''
_space: dict = {"__name__": "models_of_the_test"}
exec(compile(MODELS, "models_of_the_test.py", "exec"), _space)
Net, NetWithLoss, Layer, TokenDataset, Plain, TRAIN = (
    _space[name] for name in ("Net", "NetWithLoss", "Layer", "Rows", "Plain", "TRAIN")
)


def train(model=None, dataset=None, **options):
    """Four steps on the CPU."""
    options["train"] = TRAIN | options.get("train", {})
    dataset = TokenDataset() if dataset is None else dataset
    return toolkit.train(model or Net(), dataset, **({"accelerator": "cpu", "devices": 1} | options))


def run_script(script: Path, *launcher: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script as a user does, in its folder."""
    env = os.environ | environment
    command = [sys.executable, *launcher, script.name]
    return subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=240)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")


# ---- import


def test_import_is_fast_and_exports_the_api():
    code = (
        "import sys, toolkit\n"
        "assert not {'torch', 'lightning.fabric', 'numpy', 'importlib.metadata'} & set(sys.modules)\n"
        "assert set(toolkit.__all__) <= set(dir(toolkit))\n"
        "assert not hasattr(toolkit, 'trian')\n"
        "assert toolkit.ModelConfig(n_layer=3).n_layer == 3 and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert toolkit.train is api.train and toolkit.GPT.__name__ == "GPT"
    assert all(getattr(toolkit, name) is not None for name in toolkit.__all__)


def test_version(capsys):
    project = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    assert toolkit.__version__ == project and "__version__" in dir(toolkit)
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"toolkit {project}\n"


# ---- several processes


def page_script() -> str:
    page = (ROOT / "tutorials" / "python.md").read_text()
    (script,) = re.findall(r"`train_module.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_script_of_the_page_on_two_devices_matches_one_device(tmp_path, monkeypatch, how):
    script = tmp_path / "file.py"
    script.write_text(page_script())
    monkeypatch.chdir(tmp_path)
    process = Forked([], script=script, n_ranks=2) if how == "forked" else start(script.name)
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    assert "fsdp FULL_SHARD" in stdout
    assert len(re.findall(r"^\[rank \d\] .* out/python/final$", stdout, re.MULTILINE)) == 1
    # on one device, in this process; devices=2 became devices=1, both are bytes of the text that is trained on
    one = script.read_text().replace("devices=2", "devices=1").replace("out/python", "out/single")
    one = one.replace("__file__", repr(str(script)))
    (tmp_path / "one.py").write_text(one)
    result = runpy.run_path(str(tmp_path / "one.py"))["result"]
    assert result.checkpoint == Path("out/single/final") and result.step == len(losses(result.out_dir)) > 10
    assert losses(Path("out/python")) == pytest.approx(losses(result.out_dir), rel=1e-5)
    assert losses(result.out_dir)[-1] < losses(result.out_dir)[0] - 1
    names = load_weights(tmp_path / "out/python/final").keys()
    assert names == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"}


MANY = """
import json, sys
import toolkit
from models import Net, NetWithLoss, Rows, Plain, TRAIN, llama

toolkit.rank_print("before", rank=1)
runs = {
    "ddp": (Net(), {"strategy": "ddp"}),
    "full": (Net(), {"strategy": "fsdp", "fsdp": {"sharding_strategy": "FULL_SHARD"}}),
    "grad_op": (Net(), {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "sharded"}}),
    "own_loss": (NetWithLoss(), {"block_classes": ["Layer"]}),
    "plain_descent": (Net(), {"optimizer": {"name": Plain, "weight_decay": 0.1}}),
    "llama": (llama(), {"strategy": "fsdp"}),
}
results = {}
for name, (model, options) in runs.items():
    results[name] = toolkit.train(
        model, Rows(), val_dataset=Rows(), train=TRAIN, accelerator="cpu", out_dir=name, **options
    )
longer = TRAIN | {"max_steps": 6}  # sharded weights, read again by two ranks
toolkit.train(Net(), Rows(), val_dataset=Rows(), train=longer, accelerator="cpu", out_dir="grad_op", resume="auto")
toolkit.barrier()
stats = toolkit.memory_stats()
told = {name: [r.step, r.tokens, r.metrics["val_loss"]] for name, r in results.items()}
toolkit.rank_print(json.dumps([stats, told]))
"""


@pytest.mark.slow
def test_every_strategy_under_torchrun_matches_one_device(tmp_path):
    """User-provided modules and optimizers; several runs in one script; resume; helpers."""
    (tmp_path / "models.py").write_text(MODELS)
    script = tmp_path / "many.py"
    script.write_text(MANY)
    done = run_script(script, *TORCHRUN)
    assert done.returncode == 0, done.stderr
    one = tmp_path / "one"
    options = {"val_dataset": TokenDataset()}
    expected = {
        "ddp": train(out_dir=one / "plain", **options),
        "own_loss": train(NetWithLoss(), out_dir=one / "own_loss", **options),
        "plain_descent": train(
            out_dir=one / "plain_descent", optimizer={"name": Plain, "weight_decay": 0.1}, **options
        ),
        "llama": train(_space["llama"](), out_dir=one / "llama", **options),
    }
    expected |= dict.fromkeys(("full", "grad_op"), expected["ddp"])
    longer = train(out_dir=one / "plain", resume="auto", train={"max_steps": 6}, **options)
    for name, single in expected.items():
        reference = losses(single.out_dir)
        assert losses(tmp_path / name) == pytest.approx(reference if name == "grad_op" else reference[:4], rel=1e-5)
    assert len(losses(tmp_path / "grad_op")) == longer.step == 6
    assert losses(one / "own_loss") == losses(one / "plain")[:4] != losses(one / "plain_descent")

    told = dict(re.findall(r"^\[rank (\d)\] (\[\[.*)$", done.stdout, re.MULTILINE))
    assert told.keys() == {"0", "1"} and told["0"] == told["1"]
    stats, results = json.loads(told["0"])
    assert [s["rank"] for s in stats] == [0, 1] and all(0.05 < s["rss_gb"] < 5 for s in stats)
    assert results["own_loss"][:2] == [4, expected["own_loss"].tokens]
    assert results["llama"][2] == pytest.approx(expected["llama"].metrics["val_loss"], rel=1e-5)
    assert re.findall(r"^(.*)before$", done.stdout, re.MULTILINE) == ["[rank 1] "]

    # names on disk are the module's names, tied or not, sharded or not
    for name, model in {"full": Net(), "grad_op": Net(), "llama": _space["llama"]()}.items():
        model.load_state_dict(load_weights(tmp_path / name / "final"))
    assert not (tmp_path / "full/final/hyperparameters.yaml").exists()


@pytest.mark.slow
def test_user_error_after_launch_is_printed_once(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    script = tmp_path / "wrong.py"
    script.write_text(
        "import toolkit\nfrom models import Net, Rows\ntry:\n"
        "    toolkit.train(Net(), Rows(), train={'max_steps': 2}, devices=2, accelerator='cpu')\n"
        "finally:\n    print('ended', flush=True)\n"
    )
    done = run_script(script)
    assert done.returncode == 1 and done.stdout.count("ended") == 2
    assert done.stderr.count("Traceback") == 1 and "UserError: train.global_batch_size 64" in done.stderr
    assert not (tmp_path / "out").exists()


def test_peer_shutdown_exits_silently(monkeypatch, tmp_path):
    def end(args, callbacks):
        raise PeerShutdownError(3)

    monkeypatch.setattr(api, "run_training", end)
    with pytest.raises(SystemExit) as caught:
        train(out_dir=tmp_path / "run")
    assert caught.value.code == 3


def test_token_beyond_the_vocabulary_is_one_line(tmp_path):
    config = toolkit.ModelConfig(vocab_size=64, block_size=32, n_layer=1, n_embd=32)
    rows = [torch.arange(17), torch.arange(60, 77)]
    with pytest.raises(UserError, match=r"^rows \[.*1.*\]: have token id 76, which is not in .* of 64 tokens"):
        train(config, rows, out_dir=tmp_path / "run", train={"global_batch_size": 2})


def test_run_without_standard_streams(tmp_path, monkeypatch):
    """As in a service, where they are None."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert train(out_dir=tmp_path / "run", train={"max_steps": 1}).step == 1


def test_callback_class_is_named(tmp_path):
    with pytest.raises(UserError, match="^callbacks Callback: must be objects of a class of toolkit.Callback"):
        train(out_dir=tmp_path / "run", callbacks=[toolkit.Callback])


UNSEEDED = """
import torch, toolkit

config = toolkit.ModelConfig(vocab_size=64, block_size=32, n_layer=1, n_embd=32)
rows = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(torch.seed()))
toolkit.train(config, list(rows), devices=2, accelerator="cpu", train={"max_steps": 1, "global_batch_size": 2})
"""


def test_unseeded_dataset_is_named(tmp_path):
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    process = Forked([], script=tmp_path / "unseeded.py", n_ranks=2)
    _, err = finish(process)
    assert process.returncode and "dataset: rank 1's rows differ from rank 0's; build the same rows" in err


def test_several_devices_need_a_script(monkeypatch, tmp_path):
    module = types.ModuleType("__main__")
    module.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", module)
    with pytest.raises(UserError, match="devices 2: .*a notebook.*devices=1"):
        train(devices=2, out_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(out_dir=tmp_path / "run")


# ---- models


def test_module_is_trained_saved_and_resumed_bit_equal(tmp_path):
    model, rows = Net(), TokenDataset()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    uninterrupted = train(model, rows, out_dir=tmp_path / "uninterrupted", train={"save_interval": 2})
    assert uninterrupted.step == 4 and uninterrupted.metrics["loss"] == losses(tmp_path / "uninterrupted")[-1]
    assert "val_loss" not in uninterrupted.metrics
    saved = load_weights(uninterrupted.checkpoint)
    assert saved.keys() == before.keys() and all(torch.equal(saved[k], v) for k, v in model.state_dict().items())
    assert not torch.equal(saved["head.weight"], before["head.weight"])
    assert {p.name for p in uninterrupted.checkpoint.iterdir()} == {"COMPLETE", "lit_model.pth", "trainer"}
    # other initial weights: the checkpoint's count
    other = Net()
    torch.nn.init.zeros_(other.head.weight)
    steps = {"max_steps": 4, "save_interval": 2}
    again = train(
        other, rows, out_dir=tmp_path / "again", train=steps, resume=tmp_path / "uninterrupted" / "step-00000002"
    )
    assert all(torch.equal(tensor, saved[name]) for name, tensor in load_weights(again.checkpoint).items())
    finished = train(Net(), rows, out_dir=tmp_path / "uninterrupted", resume="auto")
    assert finished == uninterrupted


def test_biases_norms_and_embeddings_of_a_user_module_do_not_decay(tmp_path, monkeypatch):
    built = []
    original = build.build_optimizer
    monkeypatch.setattr(build, "build_optimizer", lambda *args, **kw: built.append(original(*args, **kw)) or built[-1])
    model = Net()
    train(model, out_dir=tmp_path / "run")
    decays = {id(p): group["weight_decay"] for group in built[0].param_groups for p in group["params"]}
    decaying = {name for name, p in model.named_parameters() if decays[id(p)] == 0.1}
    assert decaying == {"head.weight", *(f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("qkv", "out"))}


def test_gpt_instance_keeps_its_config(tmp_path):
    config = toolkit.ModelConfig(vocab_size=64, block_size=32, n_layer=2, n_embd=32, tie_embeddings=True)
    first = train(config, out_dir=tmp_path / "first")
    model = toolkit.load(first.checkpoint)
    assert model.config == config and model.lm_head.weight is model.transformer.wte.weight
    start = model.lm_head.weight.clone()
    second = train(model, out_dir=tmp_path / "second", train={"learning_rate": 1e-8})
    assert losses(second.out_dir)[0] < losses(first.out_dir)[0] - 0.01
    assert torch.allclose(toolkit.load(second.checkpoint).lm_head.weight, start, atol=1e-6)
    third = train(toolkit.GPT(config), out_dir=tmp_path / "third")  # initialized as the first run's model
    assert losses(third.out_dir) == losses(first.out_dir)
    assert toolkit.load(second.checkpoint, dtype="bf16").lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="dtype bf61: must be one of.*did you mean 'bf16'"):
        toolkit.load(first.checkpoint, dtype="bf61")
    with pytest.raises(UserError, match="no such folder"):
        toolkit.load(tmp_path / "nowhere")


def test_parameters_have_the_dtype_of_the_precision(tmp_path):
    model = Net().bfloat16()
    train(model, out_dir=tmp_path / "run")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_blocks_are_found():
    assert find_blocks(Net()) == (Layer,)
    assert find_blocks(Net(), [nn.Linear, "LayerNorm"]) == (nn.Linear, nn.LayerNorm)
    experts = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(9))}) for _ in "ab")
    assert find_blocks(nn.Sequential(experts)) == (nn.ModuleDict,)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2))) == ()
    with pytest.raises(UserError, match="block_classes Leyer: .*did you mean 'Layer'"):
        find_blocks(Net(), ["Leyer"])


class Returns(nn.Module):
    """Returns a given value."""

    def __init__(self, what):
        super().__init__()
        self.what, self.weight = what, nn.Parameter(torch.ones(1))

    def forward(self, input_ids):
        return self.what(input_ids, self.weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Returns(lambda ids, w: (w, None)), r"returns a tuple \(a tensor of shape \(1,\), an object of type NoneType"),
        (Returns(lambda ids, w: w * ids[:, -1:, None]), r"Returns.forward.*returns a tensor of shape \(2, 1, 1\)"),
        (Returns(lambda ids, w: {"logits": w}), "returns an object of type dict; it must return logits"),
    ],
)
def test_module_outputs_are_checked(model, message):
    with pytest.raises(UserError, match=message):
        LossWrapper(model)(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))


def test_mean_loss_is_not_mistaken_for_logits():
    class Mean(Returns):
        def forward(self, input_ids, labels):
            return self.weight.mean()

    with pytest.raises(UserError, match=r"Mean.forward\(input_ids, labels\) returns a tensor of shape \(\); it must"):
        LossWrapper(Mean(None))(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))


# ---- data


BLOCKS = [torch.arange(i, i + 13) % 64 for i in range(40)]


@pytest.mark.parametrize(
    "rows",
    [
        torch.stack(BLOCKS),
        torch.utils.data.TensorDataset(torch.stack(BLOCKS).to(torch.int32)),
        [b.numpy() for b in BLOCKS],
        [b.tolist() for b in BLOCKS],
        [{"input_ids": b[:-1], "labels": b[1:], "attention_mask": torch.ones(12)} for b in BLOCKS],
    ],
    ids=["tensor", "TensorDataset", "arrays", "lists", "dicts"],
)
def test_all_row_formats_give_the_same_rows(rows):
    ready = InMemoryDataset("dataset", rows, None)
    row = ready[3]
    assert row["input_ids"].dtype == row["labels"].dtype == torch.int64
    assert row["input_ids"].tolist() == list(range(3, 15)) and row["labels"].tolist() == list(range(4, 16))
    assert ready.key == InMemoryDataset("dataset", BLOCKS, None).key
    assert InMemoryDataset("dataset", rows, 5)[3]["labels"].tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "dataset: has no rows"),
        (iter([]), "dataset: yields no rows"),
        (3, r"needs len\(\) and \[index\]"),
        ([torch.zeros(4)], r"dataset\[0\]: has shape \(4,\) and torch.float32"),
        ([torch.zeros(2, 2).long()], r"dataset\[0\]: has shape \(2, 2\)"),
        (["text"], r"dataset\[0\]: is of type str"),
        ([torch.zeros(1).long()], "has 0 input tokens and 0 labels"),
        ([torch.tensor([1, -1, 2])], "negative tokens"),
        ([{"input_ids": torch.tensor([1, 2])}], r"dataset\[0\]: has no labels; its keys are input_ids"),
        ([{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1])}], "2 input tokens and 1 labels"),
        ([{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, -1])}], "only labels may be -100"),
        ([{"input_ids": b, "labels": b} for b in BLOCKS], "labels equal the input_ids"),
    ],
)
def test_invalid_rows(rows, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(dataset=rows, out_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_with_other_rows_is_an_error(tmp_path):
    train(dataset=BLOCKS, out_dir=tmp_path / "run", train={"max_steps": 2})
    with pytest.raises(UserError, match='already used .*; resume="auto" continues it'):
        train(dataset=BLOCKS, out_dir=tmp_path / "run", train={"max_steps": 2})
    others = BLOCKS[:-1] + [BLOCKS[0]]
    with pytest.raises(UserError, match="^data: .*was trained with other data"):
        train(dataset=others, out_dir=tmp_path / "run", resume="auto")
    assert train(dataset=list(BLOCKS), out_dir=tmp_path / "run", resume="auto").step == 4


def test_synthetic_tokens_that_the_model_does_not_embed_are_an_error(tmp_path):
    options = {"model_config": {"vocab_size": 64}, "out_dir": tmp_path / "run", "train": {"max_seq_length": 8}}
    with pytest.raises(UserError, match="^data.vocab_size 4096: .* has token ids up to 4095, .*; use at most 64, or"):
        train("pico-llama", SyntheticTokens(), **options)


def test_max_tokens_uses_the_length_of_the_rows(tmp_path):
    """Not by the model's context length, which is larger; and not if rows differ in length."""
    config = toolkit.ModelConfig(vocab_size=64, block_size=32, n_layer=1, n_embd=32)
    limit = {"max_steps": None, "max_tokens": 8 * 12 * 3}
    assert train(config, BLOCKS, out_dir=tmp_path / "run", train=limit, num_workers=1).step == 3
    with pytest.raises(UserError, match="train.max_tokens 288: the rows of the dataset differ in length"):
        train(config, out_dir=tmp_path / "ragged", train=limit)
    with pytest.raises(UserError, match="a row of the dataset has 12 input tokens, the model takes at most 8"):
        train(toolkit.ModelConfig(vocab_size=64, block_size=8), BLOCKS, out_dir=tmp_path / "long")


def test_cuda_width_padding_is_in_no_metric(tmp_path, monkeypatch):
    """--deterministic also reaches torch, for this run only."""
    config, found = toolkit.ModelConfig(vocab_size=64, block_size=40, n_layer=1, n_embd=32), []
    options = {"val_dataset": TokenDataset(), "eval": {"interval": 2}}
    plain = train(config, out_dir=tmp_path / "plain", **options)
    monkeypatch.setattr(data_reader, "choose_padding", lambda device, *given: choose_padding("cuda", *given))
    train_step = engine.launch_step

    def look(*args, **options):
        found.append(torch.are_deterministic_algorithms_enabled())
        return train_step(*args, **options)

    monkeypatch.setattr(engine, "launch_step", look)
    widths = []
    monkeypatch.setattr(GPT, "forward", watching(GPT.forward, widths))
    padded = train(config, out_dir=tmp_path / "padded", deterministic=True, **options)
    assert set(widths) == {40}  # what the model takes, 64 is more
    assert padded.tokens == plain.tokens and padded.metrics.keys() == plain.metrics.keys()
    for name in ("loss", "val_loss", "grad_norm"):
        assert padded.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-5)
    assert set(found) == {True} and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_cudnn_attention_is_for_training_on_fixed_shapes(tmp_path, monkeypatch):
    allowed, while_generating, forward = torch.backends.cuda.cudnn_sdp_enabled, [], GPT.forward

    def watched(self, *args, kv_cache=None, **options):
        while_generating.extend([] if kv_cache is None else [allowed()])
        return forward(self, *args, kv_cache=kv_cache, **options)

    monkeypatch.setattr(GPT, "forward", watched)
    config = toolkit.ModelConfig(vocab_size=64, block_size=40, n_layer=1, n_embd=32)
    options = {"eval": {"max_new_tokens": 2, "interval": 2}, "val_dataset": BLOCKS}
    done = train(config, BLOCKS, out_dir=tmp_path / "fixed", **options)
    assert allowed() and while_generating and not any(while_generating)
    open_checkpoint(EvaluateOptions(str(done.checkpoint), accelerator="cpu"))
    assert not allowed()
    train(config, BLOCKS, out_dir=tmp_path / "again")
    assert allowed()
    train(config, TokenDataset(), out_dir=tmp_path / "ragged")
    assert not allowed()


def watching(forward, widths):
    def watched(self, input_ids, *args, **options):
        widths.append(input_ids.size(1))
        return forward(self, input_ids, *args, **options)

    return watched


# ---- options


def test_options_match_pretrain(tmp_path):
    options = {"train": TrainArgs(**TRAIN), "optimizer": torch.optim.SGD, "seed": 7, "log": {"run": None}}
    data = SyntheticTokens(vocab_size=50, num_rows=40)
    overrides = {"n_layer": 1, "block_size": 16}
    result = toolkit.train(
        "pico-llama", data, model_config=overrides, accelerator="cpu", out_dir=str(tmp_path / "run"), **options
    )
    text = (result.checkpoint / "hyperparameters.yaml").read_text()
    assert "name: SGD" in text and "seed: 7" in text and "n_layer: 1" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategi": "ddp"}, "strategi: no such option; did you mean 'strategy'"),
        ({"qqq": 1}, r"^qqq: no such option; see help\(toolkit.train\)$"),
        ({"max_steps": 3}, r"max_steps: no such option; did you mean train=\{'max_steps': ...\}\?"),
        ({"train": {"max_stps": 3}}, "train.max_stps: no such option; did you mean 'max_steps'"),
        ({"strategy": "fspd"}, "strategy fspd: must be one of auto, .*; did you mean 'fsdp'"),
        ({"devices": "two"}, "devices 'two': must be an integer or auto"),
        ({"seed": True}, "seed True: must be an integer"),
        ({"train": {"max_steps": 1.5}}, "train.max_steps 1.5: must be an integer"),
        ({"fsdp": {"sharding_strategy": "FULL"}}, "fsdp.sharding_strategy 'FULL': .*did you mean"),
        ({"eval": 3}, "eval int: must be a group of options"),
        ({"model": 3}, "model int: must be a model's name"),
        ({"model": "pico-llama", "model_name": "mini-llama"}, "model_name mini-llama: a model is also given"),
        ({"block_classes": [nn.Linear], "model": "pico-llama"}, "block_classes: has no effect on toolkit's models"),
        ({"model_config": {"n_layer": 2}}, "model_config: has no effect on a user-provided module"),
        ({"train": {"tie_embeddings": True}}, "train.tie_embeddings: has no effect"),
        ({"compiler": "torch", "model": nn.Sequential(nn.Linear(2, 2))}, "compiler torch: .*block_classes"),
        ({"data": SyntheticTokens()}, "data: a dataset is also given"),
        ({"num_workers": 2, "dataset": SyntheticTokens()}, "num_workers: has no effect with a DataModule"),
        ({"dataset": SyntheticTokens()}, "train.max_seq_length: must be set"),
        ({"optimizer": "AdamX"}, "^optimizer.name AdamX: no such optimizer; did you mean 'Adam"),
        ({"optimizer": nn.Linear}, "optimizer Linear: must be a class derived from"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer SGD: give the class"),
        ({"optimizer": {"name": Plain, "betas": (0.9, 0.9)}}, "^optimizer.betas .*: Plain takes no such option"),
        ({"model": nn.Linear(2, 2, device="meta")}, "meta device"),
    ],
)
def test_user_errors(options, message, tmp_path):
    model, dataset = options.pop("model", None) or Net(), options.pop("dataset", BLOCKS)
    with pytest.raises(UserError, match=message) as caught:
        train(model, dataset, out_dir=tmp_path / "run", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_fsdp_requires_block_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    with pytest.raises(UserError, match="^strategy fsdp is not supported with .*block_classes"):
        train(nn.Sequential(nn.Embedding(64, 64)), devices=2, strategy="fsdp", out_dir=tmp_path / "run")


def test_checkpointing_requires_block_classes(tmp_path):
    """And with blocks, it changes no bit."""
    with pytest.raises(UserError, match="^train.activation_checkpointing full is not supported with .*block_classes"):
        train(nn.Sequential(nn.Embedding(64, 64)), out_dir=tmp_path / "a", train={"activation_checkpointing": "full"})
    runs = []
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        runs.append(train(Net(), out_dir=tmp_path / mode, train={"activation_checkpointing": mode}))
    assert losses(runs[0].out_dir) == losses(runs[1].out_dir) == losses(runs[2].out_dir)
