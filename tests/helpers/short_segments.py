"""Streamed text in segments of a few rows, so that a short run reads several of them."""

from dataclasses import dataclass
from unittest import mock

from toolkit.data import HuggingFaceText
from toolkit.data.streamed import segments


@dataclass
class ShortSegments(HuggingFaceText):
    """HuggingFaceText with segments of about 500 bytes."""

    def prepare(self, **options):
        with mock.patch.object(segments, "SEGMENT_BYTES", 500):
            return super().prepare(**options)
