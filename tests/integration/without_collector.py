"""``without_collector.py SCRIPT [ARGUMENTS]``: runs a script that forks ranks, without looking for garbage while it imports.

That is a fifth of what imports compute; ``rank_processes.fork_ranks`` enables the collector again.
"""

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.path[0]  # this file's folder, as if the interpreter had been given a command
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
