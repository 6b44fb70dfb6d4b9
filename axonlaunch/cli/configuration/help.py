"""``axonlaunch help``: shows the pages of ``axonlaunch/docs`` in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axonlaunch.cli.shared.options import Json, print_json
from axonlaunch.system.text.terminal import console_on

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

HELP = "List the pages of the documentation, show one, or search them."
EXAMPLES = """Examples:

\b
  axonlaunch help
  axonlaunch help strategies
  axonlaunch help "gradient accumulation"
  axonlaunch help architecture --json
"""
_MOST_FOUND = 10
"""Number of sections that a search shows."""
_IN_HEADING = 5
"""Number of times in a text that a word in a heading counts for."""
_AS_PHRASE = 100
"""Number of times in a text that all words in a row count for."""
_LONGEST = 160
DOCS = Path(__file__).parents[2] / "docs"


def command(
    context: typer.Context,
    topic: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC...",
            help="Name of a page, or words to search for; default: list all pages.",
            autocompletion=lambda: [path.stem for path in DOCS.glob("*.md")],
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages of the documentation, show one, or search them."""
    pages = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
    if not topic:
        _list_pages({name: summary(path.read_text()) for name, path in pages.items()}, as_json)
        return
    words = " ".join(topic)
    name = words.lower().replace(" ", "-").removesuffix(".md").replace("_", "-")
    if name not in pages:
        is_command = _is_command(context, words)
        texts = {} if is_command else {page: path.read_text() for page, path in pages.items()}
        if found := search_pages(words, texts):
            _show_found(words, found, as_json)
            return
        raise _unknown_page(words, list(pages), is_command=is_command)
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
    """Return the first sentence of a page's first paragraph, without Markdown."""
    _, _, body = text.partition("\n\n")
    paragraph = " ".join(body.partition("\n\n")[0].split())
    paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph).replace("`", "")
    return re.split(r"(?<=[.:])\s", paragraph, maxsplit=1)[0].rstrip(".:")


@dataclass(frozen=True)
class Section:
    """A section of a page that has all words of a search.

    Attributes:
        page: Name of the page.
        heading: Heading of the section.
        line: The line with most of the words; the first of several.
        count: Number of occurrences of the words. An occurrence in the heading counts more, and so
            do all words one after another.
    """

    page: str
    heading: str
    line: str
    count: int


def search_pages(words: str, pages: Mapping[str, str]) -> list[Section]:
    """Return up to ten sections that contain all words, those with the highest ``count`` first.

    Args:
        words: Words, in any case and with any space between them.
        pages: Text of each page by its name.
    """
    wanted = [word for word in words.lower().split() if word]
    found = []
    for page, text in pages.items():
        for heading, lines in _sections(text):
            lowered = "\n".join([heading, *lines]).lower()
            counts = [_count(word, lowered) for word in wanted]
            if not counts or not all(counts):
                continue
            phrase = " ".join(wanted)
            best = max(lines, key=lambda each: _matches(each.lower(), [phrase, *wanted]))
            line = best.strip()
            count = sum(counts)
            if len(wanted) > 1:
                count += _AS_PHRASE * _count(phrase, lowered)
            count += _IN_HEADING * sum(_count(word, heading.lower()) for word in wanted)
            found.append(Section(page, heading, line, count))
    return sorted(found, key=lambda each: -each.count)[:_MOST_FOUND]


def _count(text: str, lowered: str) -> int:
    """Count the words that begin with a text; ``during`` does not begin with ``ring``."""
    return len(re.findall(f"(?<![a-z]){re.escape(text)}", lowered))


def _matches(line: str, texts: Sequence[str]) -> int:
    return sum(_count(text, line) > 0 for text in texts)


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading and the lines of each section; lines of code are no headings."""
    heading, lines, is_code = "", [""], False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            yield heading, lines
            heading, lines = line.lstrip("# "), [""]
        else:
            lines.append(line)
    yield heading, lines


def _show_found(words: str, sections: Sequence[Section], as_json: bool) -> None:
    if as_json:
        print_json({"sections": [asdict(section) for section in sections]})
        return
    from rich.text import Text

    console = console_on()
    for section in sections:
        console.print(Text(f"{section.page}: {section.heading}", style="bold"))
        line = Text(
            section.line if len(section.line) < _LONGEST else f"{section.line[:_LONGEST]}..."
        )
        line.highlight_words(words.split(), "yellow", case_sensitive=False)
        console.print(line)
    console.print("\naxonlaunch help TOPIC shows a page")


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
