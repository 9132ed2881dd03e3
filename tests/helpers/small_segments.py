"""The toolkit command with small segments of streamed text: ``python small_segments.py COMMAND ...``."""

import sys

from toolkit.cli import main
from toolkit.data.streamed import segments

if __name__ == "__main__":  # not where only its path is imported
    segments.SEGMENT_BYTES = 4000
    sys.exit(main(sys.argv[1:]))
