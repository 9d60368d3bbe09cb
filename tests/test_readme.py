"""README.md and README.zh-CN.md say the same: code, numbers, links; and the commands in them exist.

The Chinese one has a quick start of its own before the sections of the English one, in the same order. What stands
behind `#` in code is translated; a number within the prose counts where it is written in digits.
"""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.config.load import load_configs

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
QUICK_START = "快速上手"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)]+)\)")


@dataclass
class Part:
    """A section: its heading, the lines of its code without comments, and its prose."""

    heading: str
    code: list[str] = field(default_factory=list)
    prose: str = ""

    def said(self) -> Counter[str]:
        """All that both languages have to say alike."""
        links = [link.partition("#")[0] for link in LINK.findall(self.prose)]
        bare = LINK.sub("]", INLINE.sub("", self.prose))
        found = Counter(f"line of code {line!r}" for line in self.code)
        found += Counter(f"code `{code}`" for code in self.inline())
        found += Counter(f"link {link!r}" for link in links if link not in ("", ENGLISH, CHINESE))
        return found + Counter(f"number {number}" for number in NUMBER.findall(bare))

    def inline(self) -> list[str]:
        """What stands between backquotes, on one line."""
        return [" ".join(code.split()) for code in INLINE.findall(self.prose)]


def parts_of(text: str) -> list[Part]:
    """The sections, the first of which is what stands above all headings."""
    parts, fence, may_indent = [Part("(the top)")], False, False  # a blank line stands before code that is indented
    for line in text.splitlines():
        indented = may_indent and re.match(r" {4,}\S", line)
        may_indent = bool(indented) or not line.strip()
        if line.lstrip().startswith("```"):
            fence = not fence
        elif fence or indented:
            if code := re.sub(r"(^|\s+)#\s.*", "", line).rstrip():
                parts[-1].code.append(code)
        elif heading := re.match(r"(##+) (.*)", line):
            parts.append(Part(heading[0]))
        else:
            parts[-1].prose += line + "\n"
    return parts


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_quick_start(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.heading != f"## {QUICK_START}"]


def level(part: Part) -> int:
    return part.heading.count("#")


def differences(english: str, chinese: str) -> list[str]:
    """What one README has and the other has not, by section."""
    first, second = parts_of(english), without_quick_start(parts_of(chinese))
    if [level(part) for part in first] != [level(part) for part in second]:
        headings = [[part.heading for part in parts] for parts in (first, second)]
        return [f"the sections differ: {headings[0]} and {headings[1]}"]
    found = []
    for one, other in zip(first, second, strict=True):
        for name, more in ((ENGLISH, one.said() - other.said()), (CHINESE, other.said() - one.said())):
            found += [f"{one.heading}: only in {name}: {what}" for what in more.elements()]
    return found


def test_both_languages_say_the_same() -> None:
    assert differences(read(ENGLISH), read(CHINESE)) == []


def test_the_chinese_one_begins_with_its_quick_start_of_modelscope_and_swanlab() -> None:
    quick_start = parts_of(read(CHINESE))[1]

    assert quick_start.heading == f"## {QUICK_START}"
    assert "source: modelscope" in "\n".join(quick_start.code)
    assert "SwanLab" in quick_start.prose


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("115 s", "116 s", "## Commands: only in README.md: number 115"),
        ("make test ", "make tests ", "## Commands: only in README.zh-CN.md: line of code '    make tests'"),
        ("lr: 1.0e-5", "lr: 2.0e-5", "## Your own run: only in README.md: line of code '   train:"),
        ("`-j 20`", "`-j 21`", "### Many at once: only in README.md: code `-j 20`"),
        ("docs/data.md", "docs/dat.md", "## Your own run: only in README.zh-CN.md: link 'docs/dat.md'"),
        ("## 比较", "### 比较", "the sections differ: "),
    ],
)
def test_a_change_in_one_language_alone_is_named(old: str, new: str, what: str) -> None:
    found = differences(read(ENGLISH), read(CHINESE).replace(old, new))

    assert [line for line in found if line.startswith(what)], found


def test_a_translated_comment_is_no_difference() -> None:
    assert differences("a\n\n    make demo  # in 3 s\n", "一\n\n    make demo   # 三秒\n") == []


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_links_lead_somewhere(name: str) -> None:
    text = read(name)
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    links = LINK.findall(text)

    assert f"]({CHINESE if name == ENGLISH else ENGLISH})" in text.partition("\n## ")[0], (
        "no link to the other language"
    )
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []
    assert [link for link in links if link.startswith("#") and link[1:] not in anchors] == []


def anchor(heading: str) -> str:
    """What GitHub calls a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands_of(name: str) -> Iterator[list[str]]:
    """The commands in a README, as a shell hands them on; behind `|` stands another word for one of theirs."""
    for part in parts_of(read(name)):
        for line in [*part.code, *part.inline()]:
            if line.strip().startswith(("make ", "snakemake", "python -m pipeline_lib")):
                yield shlex.split(line.partition(" | ")[0], comments=True)


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_commands_exist(name: str) -> None:
    makefile, rules = read("Makefile"), "".join(path.read_text() for path in sorted(ROOT.glob("workflow/rules/*.smk")))
    rules += read("Snakefile")
    seen = Counter[str]()
    for command in commands_of(name):
        seen[command[0]] += 1
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        elif command[0] == "snakemake":
            for target in targets_of(command[1:]):
                assert re.search(rf'^rule {target}:|^for stage in .*"{target}"', rules, re.MULTILINE), command
        else:
            parser().parse_args(command[3:])  # exits where it cannot

    assert min(seen[program] for program in ("make", "snakemake", "python")) >= 2, seen


def targets_of(arguments: list[str]) -> list[str]:
    """Those arguments of snakemake that name a rule: no option, and no option's value."""
    values = {"--profile", "--configfile"}
    before = ["", *arguments]
    return [
        one
        for last, one in zip(before, arguments, strict=False)
        if last not in values and re.fullmatch(r"[a-z_]+", one)
    ]


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_whole_configs_are_read_as_they_stand(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", read(name), re.DOTALL)
    whole = [block for block in blocks if "experiment:" in block]
    for block in whole:
        path = tmp_path / "my.yaml"
        path.write_text(block, encoding="utf-8")
        [config] = load_configs(path)
        assert config.experiment == "my-first"

    assert len(whole) == (1 if name == ENGLISH else 2)


A10 = """\
experiment: a10
model: {source: huggingface, name: Qwen/Qwen2-1.5B}
data: {train: [{source: pydoc}]}
tokenize: {max_tokens: 512}
shard: {block_tokens: 512}
cluster: {nodes: 2, gpus_per_node: 2, gpu: a10, internode_gbit_s: 9}
train: {strategy: zero3, micro_batch_blocks: 2, global_batch_tokens: 8192}
"""


@pytest.fixture(scope="module")
def printed_plan(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("a10")
    (folder / "a10.yaml").write_text(A10)
    command = [sys.executable, "-m", "pipeline_lib", "plan", "a10.yaml"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_STORE": str(folder / "store")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return {" ".join(line.split()) for line in done.stdout.splitlines()}


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_the_plan_is_what_is_printed(name: str, printed_plan: set[str]) -> None:
    shown = read(name).partition("    strategy    zero3")[2].partition("as these 2\n")[0]
    lines = [" ".join(line.split()) for line in shown.splitlines()[1:]]
    assert [line for line in lines if line not in printed_plan and line != lines[-1]] == []
    assert len(lines) > 25
