"""Options of the commands for jobs."""

from __future__ import annotations

from typing import Annotated

import typer

RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run folder, or name of the run.", show_default=False),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig; default: the current one.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAME",
        help="Namespace of the cluster; default: that of the context.",
        show_default=False,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        envvar="RAY_ADDRESS",
        help="Address of a Ray cluster, or auto for that of this node.",
        show_default=False,
    ),
]
