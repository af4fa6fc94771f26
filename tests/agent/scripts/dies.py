"""A process that holds a connection and does what it reads from there, a Python expression; it dies slowly."""

from __future__ import annotations

import os
import signal
import socket
import sys

from tests.agent.scripts.held import hold_a_thread

hold_a_thread()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"%d\n" % os.getpid())
exec(connection.recv(1 << 16), {"os": os, "signal": signal, "sys": sys, "connection": connection})
