"""`python -m experiments` is the command `twingrad`."""

from __future__ import annotations

from experiments.cli import main

if __name__ == "__main__":
    main()
