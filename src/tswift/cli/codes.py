"""Exit codes."""

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # nobody reads stdout any more: what a shell reports for SIGPIPE
