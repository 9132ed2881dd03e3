"""Write TRL's losses and gradients on stored answers, for test_trl.py, with TRL's own trainers.

    python3.11 -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0 && trl/bin/python write.py

student/ and teacher/ are random models in Hugging Face's format. answers.json has prompts, answers and rewards, and for
each case the loss and its number of tokens. CASE.safetensors has the gradients by transformers' names.
"""

import json
import logging
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent
PAD, EOS, VOCABULARY, ANSWERS, TEMPERATURE = 0, 1, 40, 4, 0.7
LENGTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CASES = {
    "grpo": ("grpo", 2, {"scale_rewards": "none"}),
    "divided": ("grpo", 2, {"scale_rewards": "group"}),
    "equal_rewards": ("grpo", 3, {"scale_rewards": "none"}),
    "forward_kl": ("distillation", 3, {"beta": 0.0}),
    "reverse_kl": ("distillation", 3, {"beta": 1.0}),
    "jsd": ("distillation", 3, {"beta": 0.3}),
}
"""Trainer, number of prompts and options."""


def make_model(seed: int, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **LENGTHS | sizes, num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=64, eos_token_id=EOS,
        pad_token_id=PAD, bos_token_id=None, initializer_range=0.4, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().padding_idx = None
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_answers() -> list[dict]:
    """Four answers to each of three prompts: one of the first is cut off, and those of the third have equal rewards."""
    chance, rows = random.Random(0), []
    for prompt in range(3):
        ids = [chance.randrange(2, VOCABULARY) for _ in range(3 + 2 * prompt)]
        for number in range(ANSWERS):
            tokens = [chance.randrange(2, VOCABULARY) for _ in range(chance.randint(1, 9))]
            has_ended = (prompt, number) != (0, 3)
            reward = 0.5 if prompt == 2 else round(chance.random(), 3)
            rows.append({"prompt": ids, "tokens": tokens + [EOS] * has_ended, "reward": reward})
    return rows


class Record(TrainerCallback):
    """Keeps the gradients of the step, and after it the loss."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


def compute(case: str, rows: list[dict], folder: str) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Make one step of a trainer with three micro-batches or two, and a learning rate of 0."""
    name, n_prompts, options = CASES[case]
    rows, record = rows[: n_prompts * ANSWERS], Record()
    shared = {
        "output_dir": folder, "per_device_train_batch_size": ANSWERS, "gradient_accumulation_steps": n_prompts,
        "max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False,
        "temperature": TEMPERATURE, "max_completion_length": 10, "disable_tqdm": True,
    }  # fmt: skip
    items: list[int] = []
    if name == "grpo":
        dataset = Dataset.from_list([{"prompt": str(i)} for i in range(n_prompts)])

        def stored(prompts, trainer):
            assert prompts == [str(i // ANSWERS) for i in range(len(rows))]
            answers = [row["tokens"] for row in rows]
            log_probs = [[0.0] * len(tokens) for tokens in answers]
            return {"prompt_ids": [row["prompt"] for row in rows], "completion_ids": answers, "logprobs": log_probs}

        def reward(completions, **_):
            return [row["reward"] for row in rows]

        args = GRPOConfig(
            **shared, **options, num_generations=ANSWERS, loss_type="dapo", beta=0.0, mask_truncated_completions=True
        )
        trainer = GRPOTrainer(
            model=make_model(1), reward_funcs=reward, args=args, train_dataset=dataset,
            processing_class=make_tokenizer(), rollout_func=stored, callbacks=[record],
        )  # fmt: skip
    else:

        class Stored(DistillationTrainer):
            def _tokenize_prompts(self, prompts):
                items[:] = map(int, prompts)
                return [rows[i]["prompt"] for i in items], None, {}

            def _generate_single_turn(self, prompt_ids, *_, **__):
                return [rows[i]["tokens"] for i in items]

        dataset = Dataset.from_list([{"prompt": str(i)} for i in range(len(rows))])
        trainer = Stored(
            model=make_model(1), teacher_model=make_model(2, hidden_size=24), train_dataset=dataset,
            args=DistillationConfig(**shared, **options), processing_class=make_tokenizer(), callbacks=[record],
        )  # fmt: skip
    counts: list[int] = []
    generate = trainer._generate_and_score_completions

    def counting(inputs):
        outputs = generate(inputs)
        counts.append(int(outputs["num_items_in_batch"]))
        return outputs

    trainer._generate_and_score_completions = counting
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def recorded_loss(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = recorded_loss
    trainer.train()
    assert len(losses) == n_prompts and len(counts) == 1
    return sum(losses), counts[0], record.gradients


def main() -> None:
    logging.disable()
    for name, model in (("student", make_model(1)), ("teacher", make_model(2, hidden_size=24))):
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
    rows, results = make_answers(), {}
    for case in CASES:
        with TemporaryDirectory() as folder:
            loss, n_tokens, gradients = compute(case, rows, folder)
        results[case] = {"loss": loss, "tokens": n_tokens}
        save_file(gradients, HERE / f"{case}.safetensors")
    values = {"temperature": TEMPERATURE, "eos": EOS, "answers": rows, "results": results}
    (HERE / "answers.json").write_text(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
