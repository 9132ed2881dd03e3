"""Text of any size from the Hugging Face hub, object storage or files, tokenized during training."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from toolkit.config.checks import require_not_negative, require_positive
from toolkit.data.base import (
    AUTO,
    AddBos,
    Content,
    DataModule,
    PreparedData,
    Report,
    require,
    require_one,
    trained_vocabulary,
)
from toolkit.data.cache import require_preparation
from toolkit.data.tokenizer import Tokenizer


@dataclass
class HuggingFaceText(DataModule):
    """Text from the Hugging Face hub, object storage or files of any size, tokenized while the run trains.

    Args:
        repo_id: Dataset name, such as HuggingFaceFW/fineweb-edu.
        subset: Dataset configuration (subset) name.
        revision: Branch, tag or commit of the dataset.
        split: Training split.
        path: Instead of repo_id, a file, folder or glob: local, or s3://, gs://, hf:// or https://. Parquet, JSON
            Lines or text, the last two also as .gz or .zst.
        text_column: Column or JSON key of the text.
        val_split: Split to validate on.
        val_path: Files to validate on.
        val_rows: Sequences to validate on: the first in val_split or val_path, else the last in the first segment, at
            most a tenth of that segment. 0 disables validation.
        max_cache_gb: Disk space for tokens in GB. The oldest are deleted, and tokenized again when needed. By default
            all are kept.
        on_bad_shard: What to do about a file that cannot be read: end the run, or skip the rest of it.
        prepare_workers: Processes that tokenize ahead of the run, on each node.
        vocab_size: Vocabulary size of the byte-level BPE tokenizer to train without --tokenizer_dir; 4096 by default.
        add_bos: Whether each document begins with bos. auto: if the tokenizer adds it; null: no, as in toolkit 0.1.0.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    repo_id: str | None = None
    subset: str | None = None
    revision: str = "main"
    split: str = "train"
    path: str | None = None
    text_column: str = "text"
    val_split: str | None = None
    val_path: str | None = None
    val_rows: int = 256
    max_cache_gb: float | None = None
    on_bad_shard: Literal["error", "skip"] = "error"
    prepare_workers: int = 1
    vocab_size: int | None = None
    add_bos: AddBos = AUTO
    cache_dir: str | None = None
    num_workers: int = 0

    content: ClassVar[Content] = "text"
    is_streamed: ClassVar[bool] = True
    takes_urls: ClassVar[tuple[str, ...]] = ("path", "val_path")

    def __post_init__(self) -> None:
        super().__post_init__()
        has_one = (self.repo_id is None) != (self.path is None)
        require(has_one, "repo_id", self.repo_id, "give either --data.repo_id or --data.path")
        for name, default in (("subset", None), ("revision", "main"), ("split", "train"), ("val_split", None)):
            value = getattr(self, name)
            require(self.path is None or value == default, name, value, "has no effect with --data.path; remove it")
        require_one(self, "val_path", "val_split")
        source, count = self.val_split or self.val_path, self.val_rows
        require(not source or count > 0, "val_rows", count, f"must be positive to validate on {source}")
        require_not_negative("data", self, "val_rows")
        require_positive("data", self, "max_cache_gb", "prepare_workers")
        size = trained_vocabulary(self)
        require(size > 256, "vocab_size", size, "must be at least 257, for the 256 bytes and <|endoftext|>")
        from toolkit.io.source_files import require_no_secret

        for name in self.takes_urls:
            if value := getattr(self, name):
                require_no_secret(value, name)

    @property
    def skips_broken(self) -> bool:
        """Whether to skip the rest of a file that cannot be read."""
        return self.on_bad_shard == "skip"

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        """See :meth:`DataModule.prepare`. Only the first segment, about 32 MB, is tokenized here.

        Sets ``revision`` to the commit; it is recorded with the run's options.
        """
        require_preparation()
        from toolkit.data.streamed.hub_files import list_split, list_url, open_repository
        from toolkit.data.streamed.open_text import TextSource, open_text

        val_files = None if self.val_path is None else list_url(self.val_path, "val_path")
        if self.path is not None:
            where, files = f"--data.path {self.path}", list_url(self.path, "path")
        else:
            assert self.repo_id is not None
            repository = open_repository(self.repo_id, self.revision)
            if repository.commit != self.revision:
                report(f"Data: {self.repo_id}: revision {self.revision} is commit {repository.commit}")
                self.revision = repository.commit
            where, files = f"--data.repo_id {self.repo_id}", list_split(repository, self.subset, self.split)
            if self.val_split is not None:
                val_files = list_split(repository, self.subset, self.val_split)
        return open_text(TextSource(self, where, files, val_files), tokenizer, max_seq_length, report)


@dataclass
class OpenWebText(HuggingFaceText):
    """OpenWebText, 9 billion tokens, streamed with HuggingFaceText."""

    repo_id: str | None = "Skylion007/openwebtext"
    max_cache_gb: float | None = 10


@dataclass
class RedPajama(HuggingFaceText):
    """RedPajama's sample of 1 billion tokens, streamed with HuggingFaceText."""

    repo_id: str | None = "togethercomputer/RedPajama-Data-1T-Sample"
    max_cache_gb: float | None = 10


@dataclass
class TinyStories(HuggingFaceText):
    """TinyStories, about 0.5 billion tokens, streamed with HuggingFaceText."""

    repo_id: str | None = "roneneldan/TinyStories"
    val_split: str | None = "validation"
