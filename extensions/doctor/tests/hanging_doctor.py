"""The toolkit command, except that local rank 1 hangs where communication is measured; a script."""

import os
import signal
import sys

from toolkit_doctor import communication

from toolkit import cli

if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == "1":
        communication.measure_collectives = lambda device: signal.pause()
    sys.exit(cli.main(sys.argv[1:]))
