"""``python -m axonlaunch``."""

from axonlaunch.cli import main

if __name__ == "__main__":
    main()
