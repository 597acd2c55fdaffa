"""A Julia for a machine that can have an old one only: ``python -m contrib.julia``, in a checkout of TwinGrad.

Does what ``python -m bridge.julia.install`` does; where no Julia is found, and juliapkg can't bring one, it unpacks
that of Debian 11. With ``--image``, and a Julia before 1.9, the engine is then compiled into a system image.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bridge.errors import TwinGradError
from bridge.julia import install
from bridge.libjulia.sysimage import KEEPS_MACHINE_CODE
from contrib import debian, sysimage

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Ends with 0 when a Julia is ready, and the image if it was asked for; with 2 when not."""
    parser = argparse.ArgumentParser(
        prog=install.RECIPES, description="Find or install a Julia for TwinGrad, if need be that of Debian 11."
    )
    parser.add_argument("--again", action="store_true", help="forget what is remembered, and look and try afresh")
    parser.add_argument("--image", action="store_true", help="compile the engine into it, where it is older than 1.9")
    options = parser.parse_args(arguments)
    try:
        julia = install.set_up(install.say, options.again, [debian.set_up])
    except TwinGradError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return sysimage.main([]) if options.image and julia.release < KEEPS_MACHINE_CODE else 0


if __name__ == "__main__":
    sys.exit(main())
