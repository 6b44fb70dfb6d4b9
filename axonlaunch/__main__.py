"""``python -m axonlaunch``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, whose yaml.py would be taken for the library

    from axonlaunch.cli import main

    main()
