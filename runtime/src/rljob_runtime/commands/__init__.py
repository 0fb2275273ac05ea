"""The ``rljob`` command and its subcommands; imports neither torch nor Ray before a command needs them."""
