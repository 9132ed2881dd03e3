"""Text to token ids, batch by batch, on all cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from toolkit.data.text.documents import Piece
from toolkit.data.tokenizer import Tokenizer, is_parallel, one_thread_per_call

Batch = tuple[list[Piece], np.ndarray]


def tokenize(batches: Iterable[list[Piece]], tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield each batch with its token ids, (n,) int64, an eos token after each complete document.

    Batches are tokenized in threads of our own, if the tokenizers library may use all cores: batches are read,
    converted and written meanwhile. Tokenizing alone is about as fast in the threads of the library.
    """
    assert tokenizer.eos_id is not None  # checked by the callers
    end = [tokenizer.eos_id]

    def encode(pieces: list[Piece]) -> Batch:
        ids: list[int] = []
        encoded = tokenizer.encode_batch([piece.text for piece in pieces], bos=False)
        for piece, part in zip(pieces, encoded, strict=True):
            ids += part + end if piece.ends_document else part
        return pieces, np.asarray(ids, np.int64)

    if not is_parallel():
        yield from map(encode, batches)
        return
    # as many as the library would start: a job may have some of the cores only
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    running = deque[Future[Batch]]()
    with one_thread_per_call(), ThreadPoolExecutor(threads) as pool:
        for batch in batches:
            running.append(pool.submit(encode, batch))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
