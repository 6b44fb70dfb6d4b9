"""Runs the command line with ``python -m axonlaunch``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder; a file yaml.py in it would hide the library yaml

    from axonlaunch.cli import main

    main()
