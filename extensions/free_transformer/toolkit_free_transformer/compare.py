"""``make compare``: plot and tabulate a Free Transformer and its baseline, trained on the same data.

The baseline's loss, a negative log-likelihood, is comparable with the Free Transformer's bounds, the ELBO (CE + KL) and
IWAE-K. The cross-entropy given the encoder's latents is not comparable, because the encoder sees the text.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from toolkit_metric.evaluate import data_of_run

from toolkit.checkpoints.folder import read_model_config
from toolkit.data.base import DataModule
from toolkit.errors import UserError
from toolkit.models.gpt import model_on_meta
from toolkit.ui.loggers import read_metrics
from toolkit_free_transformer.iwae import iwae_of_checkpoint
from toolkit_free_transformer.letters import Letters, entropy_per_token

NOTE = "CE with the encoder's Z is not comparable with the baseline: the encoder sees the tokens to predict"


def read_run(out_dir: Path) -> list[dict[str, float]]:
    """Return the rows with a validation from a finished run's metrics.

    Raises:
        UserError: the run is not finished, or had no validation.
    """
    rows = [row for row in read_metrics(out_dir / "logs" / "metrics.csv") if not math.isnan(row["val_loss"])]
    if not rows or not (out_dir / "final").is_dir():
        raise UserError(f"{out_dir}: no finished run; run make train-free-fsdp and make train-baseline-fsdp first")
    return rows


def data_entropy(data: DataModule, length: int | None) -> float | None:
    """Return the entropy of the data in nats per token; None if unknown."""
    if isinstance(data, Letters) and length is not None:
        return entropy_per_token(length - 1, data.run, data.noise)
    return None


def make_table(free: Path, baseline: Path, k: int, rows: int) -> str:
    """Return the comparison of two runs as a Markdown table."""
    last = {out_dir: read_run(out_dir)[-1] for out_dir in (free, baseline)}
    sizes = [
        sum(p.numel() for p in model_on_meta(read_model_config(out_dir / "final")).parameters())
        for out_dir in (baseline, free)
    ]
    entropy = data_entropy(*data_of_run(free / "final", trust=False))
    of_free, bound = last[free], iwae_of_checkpoint(str(free / "final"), k, rows)
    lines: list[tuple[str, float | None, float | None]] = [
        ("negative log-likelihood (Free Transformer: ELBO, an upper bound)", last[baseline]["val_loss"],
         of_free["val_elbo"]),
        (f"IWAE-{k}, a tighter upper bound, on {rows} rows", None, bound),
        ("KL, a part of the ELBO", None, of_free["val_kl"]),
        ("CE with the encoder's Z, the other part: not comparable", None, of_free["val_ce"]),
        ("CE with Z from the prior", None, of_free["val_prior_ce"]),
        ("entropy of the data: a lower bound", entropy, entropy),
    ]  # fmt: skip

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    table = ["| validation, nats per token | baseline | Free Transformer |", "|---|---|---|"]
    table += [f"| {name} | {cell(one)} | {cell(other)} |" for name, one, other in lines]
    table.append(f"| parameters | {sizes[0]:,} | {sizes[1]:,} |")
    seconds = [last[out_dir]["seconds"] for out_dir in (baseline, free)]
    table.append(f"| seconds of training | {seconds[0]:.0f} | {seconds[1]:.0f} |")
    table.append(f"| steps | {last[baseline]['step']:.0f} | {of_free['step']:.0f} |")
    return "\n".join([*table, "", f"{NOTE}.", ""])


def plot(free: Path, baseline: Path, path: Path) -> None:
    """Draw the validation losses over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    of_free = read_run(free)
    curves: list[tuple[Any, str, str, dict[str, Any]]] = [
        (read_run(baseline), "val_loss", "baseline: negative log-likelihood", {"color": "black"}),
        (of_free, "val_elbo", "Free Transformer: ELBO = CE + KL (an upper bound)", {"color": "tab:red"}),
        (of_free, "val_prior_ce", "CE with Z from the prior", {"color": "tab:orange", "ls": ":"}),
        (of_free, "val_ce", "CE with the encoder's Z (not comparable)", {"color": "tab:blue", "ls": "--"}),
        (of_free, "val_kl", "KL", {"color": "tab:green", "ls": "-."}),
    ]
    for rows, name, label, style in curves:
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=label, **style)
    entropy = data_entropy(*data_of_run(free / "final", trust=False))
    if entropy is not None:
        axes.axhline(entropy, color="gray", lw=0.8, label=f"entropy of the data, {entropy:.3f}")
    highest = max(
        row[name] for rows, name in ((curves[0][0][1:], "val_loss"), (of_free[1:], "val_elbo")) for row in rows
    )
    axes.set(ylim=(0, 1.5 * highest), xlabel="optimizer steps", ylabel="validation, nats per token")
    axes.set_title("Compare the black curve with the red one only", fontsize=11)
    figure.supxlabel(f"{NOTE}.", fontsize=8)
    axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a Free Transformer with its baseline")
    parser.add_argument("--free", type=Path, default=Path("out/free-transformer"))
    parser.add_argument("--baseline", type=Path, default=Path("out/free-baseline"))
    parser.add_argument("--out_dir", type=Path, default=Path("out/free-compare"))
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128)
    args = parser.parse_args()
    try:
        table = make_table(args.free, args.baseline, args.k, args.rows)
        args.out_dir.mkdir(parents=True, exist_ok=True)
        plot(args.free, args.baseline, args.out_dir / "compare.png")
    except UserError as error:
        parser.exit(2, f"{error}\n")
    (args.out_dir / "compare.md").write_text(table, encoding="utf-8")
    print(table)
    print(f"wrote {args.out_dir / 'compare.md'} and {args.out_dir / 'compare.png'}")


if __name__ == "__main__":
    main()
