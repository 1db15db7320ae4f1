"""``python -I -S as_forked.py NAME COMMAND…``: as ``python COMMAND…``, in a process of the ForkServer of that name.

It passes on the signals that launchers send and ends as that process does.  Imports as little as it can: it is started
where a fresh Python would take half a second to import what the server has imported.
"""

import _signal
import _socket
import os
from array import array
from sys import argv


def main() -> None:
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server.connect(f"\0{argv[1]}")
    request = repr(["tests.forked:run_command", argv[2:], dict(os.environ), os.getcwd()]).encode()
    server.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", [0, 1, 2]))])
    process = int(server.recv(100))
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
        _signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(server.recv(100))
    if code < 0:
        if code != -_signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
