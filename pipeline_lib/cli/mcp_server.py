"""`mcp`: a server of the Model Context Protocol over stdio, by which assistants read experiments.

It has the commands that look: none of its tools starts a training, changes a file or costs anything.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pipeline_lib.cli.run import rules_folder
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.language import N_, _

_WHAT = N_("let an assistant check, plan and compare, by the Model Context Protocol over stdio")
_PATIENCE_S = 600.0
_MOST_SECTIONS = 5
_MOST_CHARS = 1500  # of a section


def add_to(commands: Any) -> None:
    """Add `mcp` to the subparsers `commands`."""
    sub = commands.add_parser("mcp", help=_(_WHAT), description=_(_WHAT))
    sub.set_defaults(command=_serve)


def _serve(_: argparse.Namespace) -> None:
    """Serve until stdin ends. Raise ConfigError without the extra that this needs."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        remedy = "it needs the official SDK: pip install 'qwen3-pipeline[mcp]'"
        raise ConfigError("qwen3 mcp", [remedy]) from error
    server = MCPServer("qwen3-pipeline")
    for tool in (check, plan, status, summary, compare, search_docs):
        server.tool()(tool)
    server.run("stdio")


def check(config: str) -> str:
    """Name all problems of a config file."""
    return said_by("check", [config])


def plan(config: str, what_if: list[str] | None = None) -> str:
    """Predict memory, time and disk of a config file, and choose the strategy.

    `what_if` are KEY=VALUE pairs, such as cluster.nodes=4, to predict beside it.
    """
    options = ["--what-if", *what_if] if what_if else []
    return said_by("plan", [config, *(what_if or [])], [config, *options])


def status(experiments: list[str] | None = None) -> str:
    """Show the state of experiments: stage, step, loss, time left; of all without names."""
    return said_by("status", experiments or [])


def summary(experiments: list[str]) -> str:
    """Show the results of a finished experiment, or a line for each of several."""
    return said_by("summary", experiments)


def compare(experiments: list[str]) -> str:
    """Say which of several experiments is best, whether its lead is noise, and what differs."""
    return said_by("compare", experiments)


def search_docs(words: str) -> str:
    """Return the sections of the documentation that have most of the words."""
    wanted = {word.lower() for word in re.findall(r"[\w.-]+", words)}
    found = []
    for page in sorted((rules_folder() / "docs").glob("*.md")):
        if page.name.endswith(".zh-CN.md"):
            continue
        for section in re.split(r"(?m)^(?=##+ )", page.read_text(encoding="utf-8")):
            text = section.lower()
            hits = sum(word in text for word in wanted)
            found.append((-hits, len(section), f"docs/{page.name}\n{section[:_MOST_CHARS]}"))
    best = [text for hits, _, text in sorted(found)[:_MOST_SECTIONS] if hits]
    return "\n\n".join(best) or "no section has any of these words"


def said_by(command: str, words: Sequence[str], arguments: Sequence[str] | None = None) -> str:
    """Return what `qwen3 COMMAND` prints, with its errors.

    `words` come from the assistant, and `arguments` are the whole command line if it is longer.
    Raise ConfigError for a word that would be read as an option.
    """
    if options := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"qwen3 {command}", [f"{word!r} is an option" for word in options])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipeline_lib",
            command,
            *(words if arguments is None else arguments),
        ],
        stdin=subprocess.DEVNULL,  # the server's own is the protocol's
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "QWEN3_LANG": "en"},
        timeout=_PATIENCE_S,
        text=True,
        check=False,
    )
    failed = f"exit code {done.returncode}\n" if done.returncode else ""
    return failed + done.stdout
