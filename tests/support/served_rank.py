"""A program that a launcher starts as a rank: it has the tests' server fork the command instead.

``served_rank.py SERVER WORD...``: what the launcher put into the environment is what the command
sees, and its end is this program's.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import served


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
