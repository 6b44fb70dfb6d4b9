"""``axonlaunch help``: shows the pages of ``axonlaunch/docs`` in the terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

HELP = "List the pages of the documentation, or show one."
EXAMPLES = """Examples:

\b
  axonlaunch help
  axonlaunch help strategies
  axonlaunch help architecture --json
"""
DOCS = Path(__file__).parents[2] / "docs"


def command(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Name of a page; default: list all pages."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages of the documentation, or show one."""
    pages = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
    if topic is None:
        _list_pages({name: summary(path.read_text()) for name, path in pages.items()}, as_json)
        return
    name = topic.lower().removesuffix(".md").replace("_", "-")
    if name not in pages:
        raise _unknown_page(topic, list(pages), is_command=_is_command(context, topic))
    text = pages[name].read_text()
    if as_json:
        print_json({"topic": name, "text": text})
        return
    _show(text)


def _show(text: str) -> None:
    """Render a page. Long words in tables and code wrap instead of being cut off."""
    from rich.console import RenderResult
    from rich.markdown import CodeBlock, Markdown, TableElement
    from rich.syntax import Syntax
    from rich.table import Table

    class UnpaddedCode(CodeBlock):
        """A code block without margins, so that output for 80 columns fits into 80 columns."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            code, padding = str(self.text).rstrip(), (1, 0)
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=padding)

    class WrappingTable(TableElement):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for table in super().__rich_console__(console, options):
                assert isinstance(table, Table)
                for column in table.columns:
                    column.overflow = "fold"
                yield table

    class WrappingMarkdown(Markdown):
        elements = {
            **Markdown.elements,
            "table_open": WrappingTable,
            "fence": UnpaddedCode,
            "code_block": UnpaddedCode,
        }

    console_on().print(WrappingMarkdown(text))


def summary(text: str) -> str:
    """Return the first sentence of a page's first paragraph."""
    _, _, body = text.partition("\n\n")
    paragraph = " ".join(body.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", paragraph, maxsplit=1)[0].rstrip(".:")


def _list_pages(summaries: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json({"pages": summaries})
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in summaries.items():
        table.add_row(name, line)
    console = console_on()
    console.print(table)
    console.print(
        "\naxonlaunch help TOPIC shows a page; axonlaunch COMMAND --help a command's help"
    )


def _is_command(context: typer.Context, topic: str) -> bool:
    commands = getattr(context.find_root().command, "commands", {})
    return topic in commands


def _unknown_page(topic: str, pages: list[str], *, is_command: bool) -> Exception:
    from axonlaunch.config import ConfigError, ConfigIssue
    from axonlaunch.config.problems.did_you_mean import unknown

    message = unknown("page", topic, pages)
    if is_command:
        message = f"{topic} is a command; use axonlaunch {topic} --help"
    return ConfigError([ConfigIssue("", message)])
