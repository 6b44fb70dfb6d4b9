"""Runs as a rank that a launcher starts, and has the tests' server fork the command.

``served_rank.py SERVER WORD...``: the command gets the environment of this program, which includes
the launcher's variables, and this program returns the command's exit status.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

from support import served


def main(server_file: str, *overrides: str) -> None:
    server = pickle.loads(Path(server_file).read_bytes())
    with served.reached(server):
        rank = served.Forked(
            served.command, server, *overrides, folder=Path.cwd(), environment=dict(os.environ)
        )
        signal.signal(signal.SIGTERM, lambda number, frame: rank.send_signal(number))
        output, errors = rank.communicate()
    sys.stdout.write(output)
    sys.stderr.write(errors)
    sys.stdout.flush()
    os._exit(rank.returncode or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
