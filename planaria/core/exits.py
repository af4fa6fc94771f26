"""Exit codes, of ranks and of command lines alike."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_LEFT = 75  # its groups have left the job, which goes on without them (EX_TEMPFAIL of sysexits: come back later)
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it: ended in order because somebody asked
