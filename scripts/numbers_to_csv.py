"""Write numbers and how they are read aloud, as CSV files of prompts and answers, for tutorials and tests.

    pip install num2words
    python scripts/numbers_to_csv.py numbers

Writes numbers/train.csv and numbers/val.csv with the columns prompt and completion. The words are those of the package
num2words; a number of val.csv is not in train.csv.
"""

import argparse
import csv
import random
from pathlib import Path

from num2words import num2words


def row(source: random.Random) -> tuple[str, str]:
    """Return a random count, ordinal, year or price and its words. The number of digits is uniform."""
    number = source.randrange(10 ** source.randint(1, 6))
    kind = source.choice(["cardinal", "ordinal", "year", "currency"])
    if kind == "year":
        number = source.randrange(1100, 2100)
        return f"the year {number}", num2words(number, to="year")
    if kind == "currency":
        price = number + source.randrange(100) / 100
        return f"${price:,.2f}", num2words(price, to="currency", currency="USD")
    if kind == "ordinal":
        suffix = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        return f"the {number:,}{suffix}", num2words(number, to="ordinal")
    return f"{number:,}", num2words(number)


def write(folder: Path, n_train: int, n_val: int, seed: int) -> None:
    """Write ``n_val`` rows to val.csv and ``n_train`` others to train.csv."""
    source, rows = random.Random(seed), {}
    while len(rows) < n_train + n_val:
        text, words = row(source)
        rows[f"Read aloud: {text}"] = words
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("val", list(rows.items())[:n_val]), ("train", list(rows.items())[n_val:])):
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("prompt", "completion"), *part])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--n_train", type=int, default=4000, help="rows of train.csv (default 4000)")
    parser.add_argument("--n_val", type=int, default=200, help="rows of val.csv (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.n_train, arguments.n_val, arguments.seed)
