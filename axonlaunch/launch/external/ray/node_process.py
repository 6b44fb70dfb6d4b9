"""Program between an actor and the process of its node, which ends with the actor.

An actor that is killed can't end its processes, and can't delete its files, one of which has the
run's token. Its end of this program's standard input is then closed, which this program notices.
Usage: ``python -m axonlaunch.launch.external.ray.node_process FOLDER ARGUMENT...`` runs
``axonlaunch ARGUMENT...`` and then deletes FOLDER.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

from axonlaunch.system.processes.parent_death import end_with_parent


def main() -> None:
    """Run the command, and end it when standard input is closed. Delete its files at the end."""
    folder, *arguments = sys.argv[1:]
    command = [sys.executable, "-P", "-m", "axonlaunch", *arguments]
    # Ray kills this program, but not its children, if it loses the node.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent())
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))

    def end_with_actor() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        process.kill()  # ranks end with it

    threading.Thread(target=end_with_actor, daemon=True).start()
    status = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
