"""The command ``fuseboard``, one module a subcommand."""

#: The exit status after Ctrl-C, as shells have it: 128 and the number of SIGINT.
INTERRUPTED = 130
