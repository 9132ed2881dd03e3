"""Losses and gradient norms of three steps against TRL's trainers, on SmolLM2's weights and the same rows.

Needs an environment with TRL 1.16, whose Python TOOLKIT_TEST_TRL_PYTHON names.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.smollm2 import smollm2_folder

from toolkit.cli import main
from toolkit.config.options import DEFAULT_SEED
from toolkit.data.order import ShuffledOrder
from toolkit.ui.loggers import read_metrics

TRL_PYTHON = os.environ.get("TOOLKIT_TEST_TRL_PYTHON")
TRL = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

options = json.loads(sys.argv[1])
name, folder, rows, trainer_options = (options[key] for key in ("objective", "folder", "rows", "options"))
if name == "DPO":
    from trl import DPOConfig as Config, DPOTrainer as Trainer
elif name == "ORPO":
    from trl.experimental.orpo import ORPOConfig as Config, ORPOTrainer as Trainer
elif name == "SimPO":
    from trl.experimental.cpo import CPOConfig as Config, CPOTrainer as Trainer
else:
    from trl import KTOConfig as Config, KTOTrainer as Trainer
tokenizer = AutoTokenizer.from_pretrained(folder)
if name in ("SimPO", "ORPO"):
    tokenizer.bos_token = None  # they put it before each prompt
if name == "KTO":
    tokenizer.padding_side, tokenizer.chat_template = "left", options["template"]
    trainer_options["train_sampling_strategy"] = "sequential"
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.get_input_embeddings().padding_idx = None  # would drop the gradient of <|im_end|> in prompts
config = Config(
    output_dir=options["out"], per_device_train_batch_size=4, max_steps=3, learning_rate=1e-5, report_to=[],
    lr_scheduler_type="constant", logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, weight_decay=0.0,
    gradient_checkpointing=False, max_length=256, optim="adamw_torch", warmup_steps=0, **trainer_options,
)
trainer = Trainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
print("RESULT", json.dumps([r for r in trainer.state.log_history if "loss" in r]))
"""
QUESTIONS = [
    ("Name a colour.", "Blue.", "I do not want to name any colour today."),
    ("What is 2 + 2?", "It is 4.", "Five, of course."),
    ("Say hello in French.", "Bonjour! It means hello.", "Hola"),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet.", "Nobody knows."),
]
# without a chat template, because TRL also trains on the line break that follows the end of a turn
PAIRS = [
    {name: f"Question: {question}\nAnswer: {answer}" for name, answer in (("chosen", good), ("rejected", bad))}
    for question, good, bad in QUESTIONS
]
# without the line break after a turn, for the same reason
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
RATED = [
    {
        "prompt": [{"role": "user", "content": f"{question} ({i})"}],
        "completion": [{"role": "assistant", "content": (good, bad)[i % 2]}],
        "label": i % 2 == 0,
    }
    for i, (question, good, bad) in enumerate(QUESTIONS * 3)
]
CASES = {
    "KTO": ("KTO", {"beta": 0.2, "undesirable_weight": 0.8}, {"beta": 0.2, "undesirable_weight": 0.8}),
    "sigmoid": ("DPO", {"beta": 0.1}, {"beta": 0.1}),
    "sigmoid_norm": ("DPO", {"beta": 2.0}, {"beta": 2.0}),
    **{name: ("DPO", {}, {}) for name in ("ipo", "hinge", "apo_zero")},
    "SimPO": ("SimPO", {"beta": 2.0, "gamma": 0.6}, {"beta": 2.0, "simpo_gamma": 0.6, "cpo_alpha": 0.0}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "base"
    assert main(["convert_from_hf", str(smollm2_folder()), str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.skipif(TRL_PYTHON is None, reason="TOOLKIT_TEST_TRL_PYTHON names no Python with TRL")
@pytest.mark.parametrize("name", CASES)
def test_three_steps_equal_trl(name, base, tmp_path):
    objective, options, trl_options = CASES[name]
    rows = RATED if objective == "KTO" else PAIRS
    if objective == "DPO":
        options, trl_options = options | {"loss_type": name}, trl_options | {"loss_type": [name]}
    elif objective == "SimPO":
        trl_options = trl_options | {"loss_type": "simpo"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "finetune_full", str(base), "--objective", objective, "--data", "Preference",
        "--data.json_path", str(tmp_path / "rows.jsonl"), "--data.val_split_fraction", "0",
        "--data.cache_dir", str(tmp_path / "cache"), "--accelerator", "cpu", "--out_dir", str(tmp_path / "run"),
        "--train.global_batch_size", "4", "--train.micro_batch_size", "4", "--train.max_steps", "3",
        "--train.learning_rate", "1e-5", "--train.lr_schedule", "constant", "--train.lr_warmup_steps", "0",
        "--train.max_seq_length", "255", "--eval.max_new_tokens", "0", "--train.save_interval", "0",
    ]  # fmt: skip
    if objective == "KTO":
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        words += ["--data.chat_template", str(tmp_path / "template.jinja")]
        rows = [rows[i] for i in ShuffledOrder(len(rows), DEFAULT_SEED).ids(np.arange(len(rows)))]
    words += [word for key, value in options.items() for word in (f"--objective.{key}", str(value))]
    assert main(words) == 0
    ours = read_metrics(tmp_path / "run" / "logs" / "metrics.csv")
    setup = {
        "objective": objective, "folder": str(smollm2_folder()), "rows": rows, "options": trl_options,
        "template": TEMPLATE,
        "out": str(tmp_path / "trl"),
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [str(TRL_PYTHON), "-c", TRL, json.dumps(setup)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.partition("RESULT ")[2].splitlines()[0])
    for column, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        found, expected = ([row[column] for row in rows] for rows in (ours, theirs))
        print(name, column, max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)))  # pytest -s
        assert found == pytest.approx(expected, rel=limit)
