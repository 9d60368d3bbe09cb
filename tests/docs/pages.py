"""What tests read in a page: its sections, code and links; and a folder for its commands."""

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = ("workflow", "profiles", "slurm", "pipeline_lib")
CHINESE = ".zh-CN.md"
ONLY_IN_CHINESE = "## 国内环境：ModelScope 与 SwanLab"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)]+)\)")
PROGRAMS = ("make ", "snakemake", "qwen3 ")


@dataclass
class Section:
    """A section: its heading, the lines of its code without comments, and its prose."""

    heading: str
    code: list[str] = field(default_factory=list)
    prose: str = ""

    @property
    def level(self) -> int:
        return self.heading.count("#")

    def facts(self) -> Counter[str]:
        """What both languages must contain: code, links, and numbers written in digits."""
        links = [
            link.partition("#")[0].replace(CHINESE, ".md") for link in LINK.findall(self.prose)
        ]
        bare = LINK.sub("]", INLINE.sub("", self.prose))
        found = Counter(f"line of code {line!r}" for line in self.code)
        found += Counter(f"code `{code}`" for code in self.inline())
        found += Counter(f"link {link!r}" for link in links if link)
        return found + Counter(f"number {number}" for number in NUMBER.findall(bare))

    def inline(self) -> list[str]:
        """The text of code spans, each on one line."""
        return [" ".join(code.split()) for code in INLINE.findall(self.prose)]


def read(page: str) -> str:
    """The text of `page`, a path from the root of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def chinese_of(page: str) -> str:
    return page.removesuffix(".md") + CHINESE


def sections_of(text: str) -> list[Section]:
    """The sections of a page; the first is what stands above all headings of level two."""
    # a blank line stands before code that is indented
    sections = [Section("(top)")]
    fence = False
    may_indent = False
    for line in text.splitlines():
        indented = may_indent and re.match(r" {4,}\S", line)
        may_indent = bool(indented) or not line.strip()
        if line.lstrip().startswith("```"):
            fence = not fence
        elif fence or indented:
            if code := re.sub(r"(^|\s+)#\s.*", "", line).rstrip():
                sections[-1].code.append(code)
        elif heading := re.match(r"(##+) (.*)", line):
            sections.append(Section(heading[0]))
        else:
            sections[-1].prose += line + "\n"
    return sections


def differences(page: str, english: str, chinese: str) -> list[str]:
    """What one language of `page` contains and the other does not, by section."""
    first = sections_of(english)
    second = [section for section in sections_of(chinese) if section.heading != ONLY_IN_CHINESE]
    if [section.level for section in first] != [section.level for section in second]:
        headings = [[section.heading for section in sections] for sections in (first, second)]
        return [f"the sections differ: {headings[0]} and {headings[1]}"]
    found = []
    for one, other in zip(first, second, strict=True):
        # each links to the other
        left_out = {f"link {Path(name).name!r}" for name in (page, chinese_of(page))}
        for name, more in (
            (page, one.facts() - other.facts()),
            (chinese_of(page), other.facts() - one.facts()),
        ):
            found += [
                f"{one.heading}: only in {name}: {what}"
                for what in more.elements()
                if what not in left_out
            ]
    return found


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(text: str) -> Iterator[str]:
    """The commands of a page that are ours; of a pipe, the last part that is."""
    for section in sections_of(text):
        for line in [*section.code, *section.inline()]:
            for part in reversed(line.split(" | ")):
                if part.strip().startswith(PROGRAMS):
                    yield part.strip()
                    break


def yaml_blocks(text: str) -> list[str]:
    """The fenced YAML of a page, without its indentation."""
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in blocks]


class Workplace:
    """A folder that looks like a clone to whoever works in it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        """Link the project into `folder`; commands get `environment` beside what tests have."""
        self.folder = folder
        for name in PROJECT:
            (folder / name).symlink_to(ROOT / name)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("HF_TOKEN", "PIPELINE_STORE")
        }
        self.environment = {**kept, "PATH": path, "HF_HOME": str(folder / "hf"), **environment}

    def run(self, command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `command` in bash; its output and its exit code."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
