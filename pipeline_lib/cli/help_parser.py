"""The parser of commands, whose help is in the language that is spoken."""

import argparse
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline_lib.core.language import _


class HelpFormatter(argparse.HelpFormatter):
    """Help whose lines fit although Chinese characters are two columns wide and need no spaces."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Add the usage, after its word in the language that is spoken."""
        super().add_usage(usage, actions, groups, _("usage: ") if prefix is None else prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        if text.isascii():
            return super()._split_lines(text, width)
        console = Console(file=StringIO(), width=width)
        return [line.plain.rstrip() for line in Text(text).wrap(console, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.isascii():
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in self._split_lines(text, width))


class RawHelpFormatter(argparse.RawDescriptionHelpFormatter, HelpFormatter):
    """The same for a description whose lines stay as they are."""


class HelpParser(argparse.ArgumentParser):
    """A parser whose headings and `--help` are in the language that is spoken."""

    def __init__(self, **options: Any) -> None:
        """Take the options of ArgumentParser; unless `add_help` is false, there is `--help`."""
        has_help = options.pop("add_help", True)
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(add_help=False, **options)
        self._positionals.title = _("positional arguments")
        self._optionals.title = _("options")
        if has_help:
            text = _("show this help message and exit")
            self.add_argument("-h", "--help", action="help", help=text)
