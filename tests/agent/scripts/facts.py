"""Tells what kind of process it is, as JSON on standard output."""

import json
import os
import signal
import sys
import threading

main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "argv": sys.argv,
            "path0": sys.path[0],
            "cwd": os.getcwd(),
            "name": __name__,
            "file": __file__,
            "spec": None if __spec__ is None else __spec__.name,
            "main": main.__dict__ is globals(),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "sid": os.getsid(0),
            "stdin": sys.stdin.read(),
            "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "threads": threading.active_count(),
            "env": dict(os.environ),
        }
    )
)
