"""The importance-weighted bound IWAE-K of the negative log-likelihood (Burda et al. 2016, arXiv 1509.00519).

``python -m toolkit_free_transformer.iwae CHECKPOINT_DIR [--k 16] [--rows 64]`` prints it for the validation data of the
checkpoint's run. K = 1 is the negative ELBO; as K grows, the bound decreases to the negative log-likelihood.
"""

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.models.labels import IGNORE_INDEX
from toolkit_free_transformer.latent import POSTERIOR, log_probability, sample_codes, uniform
from toolkit_free_transformer.model import FreeTransformer


@torch.no_grad()
def iwae(model: FreeTransformer, input_ids: Tensor, labels: Tensor, k: int, seed: int = 0) -> Tensor:
    """Return an upper bound of the negative log-likelihood of each row, (B,), in nats.

    The bound is -log(mean of p(row | z) p(z) / q(z | row)) over K samples z from the encoder's q(z | row).

    Args:
        model: The model in evaluation mode.
        input_ids: (B, T) token ids without padding, because the encoder sees all tokens.
        labels: (B, T) labels.
        k: Number of samples; each needs a forward pass.
        seed: Random seed of the samples.
    """
    positions = torch.arange(input_ids.size(1), device=input_ids.device)
    rows = torch.arange(input_ids.size(0), device=input_ids.device)
    prior = input_ids.size(1) * model.options.latent_bits * math.log(2)
    _, z_logits = model(input_ids, mode="training")
    weights = []
    for draw in range(k):
        numbers = uniform(seed + draw, POSTERIOR, rows, positions, model.options.latent_bits)
        codes = sample_codes(z_logits, numbers)
        logits = model(input_ids, codes=codes)
        nll = F.cross_entropy(logits.mT.float(), labels, ignore_index=IGNORE_INDEX, reduction="none").sum(1)
        weights.append(-nll - prior - log_probability(z_logits, codes).sum(1))
    return math.log(k) - torch.stack(weights).logsumexp(0)


def iwae_of_checkpoint(checkpoint_dir: str, k: int, rows: int) -> float:
    """Return the bound for the first validation rows of a checkpoint's run, in nats per token.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    from toolkit_metric.evaluate import data_of_run

    from toolkit.checkpoints.folder import find_model, load_model
    from toolkit.data.tokenizer import Tokenizer

    folder = find_model(checkpoint_dir)
    model = load_model(folder, dtype=torch.float32).eval()
    assert isinstance(model, FreeTransformer)
    data, length = data_of_run(folder, trust=False)
    prepared = data.prepare(
        tokenizer=Tokenizer.load(folder), max_seq_length=length or model.config.block_size, report=lambda line: None
    )
    assert prepared.val is not None
    batch = [prepared.val[i] for i in range(min(rows, len(prepared.val)))]
    input_ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
    return float(iwae(model, input_ids, labels, k).sum() / (labels != IGNORE_INDEX).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="IWAE-K of a checkpoint, in nats per token")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    print(f"IWAE-{args.k}: {iwae_of_checkpoint(args.checkpoint_dir, args.k, args.rows):.4f} nats per token")


if __name__ == "__main__":
    main()
