"""`toolkit prepare_data`: tokenize data before a run."""

import re

from jsonargparse.typing import PositiveInt

from toolkit.config import AUTO, Auto, none_if_auto
from toolkit.data import DataModule, HuggingFaceText, PythonStdlib
from toolkit.data.base import choose_seq_length
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, require_option


def setup(
    data: DataModule = PythonStdlib(),
    max_seq_length: PositiveInt | Auto = AUTO,
    tokenizer_dir: str | None = None,
    workers: PositiveInt = 1,
    part: str = "1/1",
    out_dir: str | None = None,
) -> None:
    """Tokenize data into the cache that training reads, and write it to a folder or to object storage.

    Args:
        data: The data, with the same options as in the run if they affect the stored tokens.
        max_seq_length: Tokens per sequence, as in the run. auto: 256, or what the data sets.
        tokenizer_dir: A folder with a tokenizer.json; without it TextFiles and PythonStdlib train a tokenizer.
        workers: Processes that tokenize HuggingFaceText; use one per core. Other data uses all cores.
        part: What to tokenize on this machine, for HuggingFaceText with a shared cache_dir: 2/4 is the second of four
            parts.
        out_dir: A new folder, or a URL such as s3://bucket/tokens, to write the tokens to for --data LitData.
    """
    part_of_total = _parse_part(part)
    is_streamed = isinstance(data, HuggingFaceText)
    hint = "has no effect without --data HuggingFaceText: one process tokenizes other data on all cores; remove it"
    require_option(is_streamed or workers == 1, "workers", workers, hint)
    require_option(is_streamed or part_of_total == (1, 1), "part", part, hint)
    if isinstance(data, HuggingFaceText) and data.max_cache_gb is not None:
        hint = "is not supported by prepare_data, which keeps all tokens; remove it"
        raise UserError(f"--data.max_cache_gb {data.max_cache_gb:g}: {hint}")
    if out_dir is not None:
        from toolkit.data.tokens.publish import publish_tokens, require_free

        if part_of_total != (1, 1):
            raise UserError(f"--out_dir {out_dir}: needs all parts; prepare the others first, then leave out --part")
        require_free(out_dir)
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir, report=print)
    length = choose_seq_length(data, none_if_auto(max_seq_length), "max_seq_length") or 256
    prepared = data.prepare(tokenizer=tokenizer, max_seq_length=length)
    if is_streamed:
        from toolkit.data.streamed.open_text import prepare_all

        prepare_all(prepared.train, workers, part_of_total, print)
    if out_dir is not None:
        publish_tokens(prepared, out_dir, print)


def _parse_part(part: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    number, total = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= total:
        raise UserError(f"--part {part}: must be a part and the number of parts, such as 2/4")
    return number, total
