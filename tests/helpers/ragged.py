"""Random rows of different lengths, for tests of training without a data module."""

import torch

VOCABULARY = 128


class RaggedRows:
    """Rows of different lengths whose first tokens are masked; every fifth row is masked completely."""

    def __init__(self, n: int, length: int = 24) -> None:
        self.n, self.length = n, length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        length = self.length - row % 7
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: length if row % 5 == 0 else row % 11] = -100
        return {"input_ids": tokens[:-1], "labels": labels}
