"""The toolkit command with small units of streamed text: ``python small_units.py COMMAND ...``."""

import sys

from toolkit.cli import main
from toolkit.data.streamed import units

units.UNIT_BYTES = 4000

if __name__ == "__main__":
    sys.exit(main())
