"""``spawned.py NAME=NUMBER... --multiprocessing-fork``: what multiprocessing spawns, as a script; the numbers are of open files."""

from __future__ import annotations

import sys
from multiprocessing.spawn import spawn_main


def main() -> None:
    """Does not return."""
    numbers = {name: int(number) for name, _, number in (argument.partition("=") for argument in sys.argv[1:-1])}
    del sys.argv[1:-1]  # multiprocessing looks for the last
    spawn_main(**numbers)


if __name__ == "__main__":
    main()
