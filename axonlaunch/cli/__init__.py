"""The command line; importing it imports no torch, no Hydra and no Typer."""


def main() -> None:
    """Run the command that the arguments name."""
    from axonlaunch.cli.app import run

    run()
