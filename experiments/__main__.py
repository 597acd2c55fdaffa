"""`python -m experiments` is the command `twingrad`."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line. Ctrl-C while its modules are still being imported ends it without a traceback, too."""
    usual = signal.signal(signal.SIGINT, _stop)
    from experiments import cli

    signal.signal(signal.SIGINT, usual)
    cli.main()


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """End at once: nothing has been begun, and an exception could be caught by whatever is being imported."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
