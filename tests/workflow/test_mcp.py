"""`qwen3 mcp`, driven by the official SDK's client over stdio."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.cli.mcp_server import said_by, search_docs
from pipeline_lib.core.errors import ConfigError
from tests.config import test_sweep


def test_the_tools_look_and_start_nothing(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    (tmp_path / "my.yaml").write_text(test_sweep.BASE.replace("lr:", "lrr:"))
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "pipeline_lib", "mcp"],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    async def talk() -> tuple[set[str], Any, Any]:
        async with (
            mcp.stdio_client(server) as (read, write),
            mcp.ClientSession(read, write) as session,
        ):
            await session.initialize()
            tools = await session.list_tools()
            checked = await session.call_tool("check", {"config": "my.yaml"})
            found = await session.call_tool("search_docs", {"words": "freeze globs"})
            return {tool.name for tool in tools.tools}, checked, found

    names, checked, found = asyncio.run(talk())
    assert names == {"check", "plan", "status", "summary", "compare", "search_docs"}
    assert "exit code 2" in checked.content[0].text
    assert "did you mean 'lr'?" in checked.content[0].text
    assert "docs/models.md" in found.content[0].text
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_a_word_that_is_an_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="'--page=x' is an option"):
        said_by("compare", ["a", "--page=x"])


def test_sections_with_most_of_the_words_come_first() -> None:
    assert search_docs("which keys may I change in an unfinished run").startswith("docs/resume.md")
    assert search_docs("xyzzyplugh") == "no section has any of these words"
