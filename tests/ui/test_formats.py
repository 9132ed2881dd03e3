import math

import pytest

from toolkit.ui.formats import (
    format_count,
    format_learning_rate,
    format_loss,
    format_norm,
    format_perplexity,
    format_seconds,
)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_loss, 3.21454, "3.2145"),
        (format_loss, 10.8312, "10.83"),
        (format_loss, math.nan, "nan"),
        (format_learning_rate, 3.94e-4, "3.9e-04"),
        (format_learning_rate, 0.0, "0.0e+00"),
        (format_norm, 0.873, "0.87"),
        (format_norm, 0.0, "0.00"),
        (format_norm, 0.00123, "1.2e-03"),
        (format_norm, 12345.6, "1.2e+04"),
        (format_norm, math.inf, "inf"),
        (format_count, 0, "0"),
        (format_count, 999, "999"),
        (format_count, 12345.6, "12.3k"),
        (format_count, 999_600, "1.00M"),
        (format_count, 99_960, "100k"),
        (format_count, 5_242_880, "5.24M"),
        (format_count, 15e12, "15.0T"),
        (format_count, math.nan, "nan"),
        (format_perplexity, 27.136, "27.14"),
        (format_perplexity, 50_304.0, "50.3k"),
        (format_seconds, 0.4, "0s"),
        (format_seconds, 59.6, "1m 00s"),
        (format_seconds, 65, "1m 05s"),
        (format_seconds, 3600 * 2 + 180, "2h 03m"),
        (format_seconds, 86400 * 3 + 3600 * 4, "3d 04h"),
    ],
)
def test_number_formats(write, value, text):
    assert write(value) == text
