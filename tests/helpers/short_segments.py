"""Streamed text in segments of a few rows, so that a short run reads several of them."""

from dataclasses import dataclass

from toolkit.data import HuggingFaceText
from toolkit.data.streamed import segments


@dataclass
class ShortSegments(HuggingFaceText):
    """HuggingFaceText with segments of about 500 bytes."""

    def prepare(self, **options):
        segments.SEGMENT_BYTES = 500
        return super().prepare(**options)
