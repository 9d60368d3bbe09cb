"""The tutorial's commands and configs work, its plans are what is printed, its small run trains.

The English page is worked through in its order: files are written as the reader writes them,
commands run as far as `check`, `plan` or `-n`, and what is shown below them is compared. The
Chinese page has the same files, commands and output; only prose and comments are translated.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.data.tiny_model import build_tiny
from tests.docs.pages import Workplace, read
from tests.fake_hub import Files, serving

PAGES = ["docs/tutorial.md", "docs/tutorial.zh-CN.md"]
NOT_RUN = {  # by the first words of a command
    "git": "the repository has no address yet",
    "cd": "tests are in a folder that looks like the clone",
    "make": "installs, and runs the demo: tests/pipeline",
    ".": "there is no .venv in the tests' folder",
    "curl": "needs the internet: the file is put there by the test",
    "qwen3 doctor": "measures the machine: tests/doctor",
    "qwen3 status": "with --watch it goes on until it is stopped: tests/status",
    "qwen3 summary": "needs a trained model: the slow test",
    "qwen3 chat": "needs a trained model: the slow test",
    "echo": "chat: the slow test",
    "qwen3 compare": "needs two trained models: tests/compare",
}
# the plan knows the sizes of these
MODEL: Files = {"config.json": b"{}", "model.safetensors": b"0"}


@dataclass
class Block:
    """A part of the page that is not prose.

    `kind` is `commands` for indented lines, else the word behind the fence.
    """

    kind: str
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page in their order."""
    blocks: list[Block] = []
    fence, last = False, ""
    for line in read(page).splitlines():
        if line.startswith("```"):
            fence = not fence
            if fence:
                blocks.append(Block(line.removeprefix("```"), []))
        elif fence:
            blocks[-1].lines.append(line)
        elif line.startswith("    "):
            if not last.startswith("    "):
                blocks.append(Block("commands", []))
            blocks[-1].lines.append(line.strip())
        last = line
    return blocks


def is_run(command: str) -> bool:
    return not any(f"{command} ".startswith(f"{words} ") for words in NOT_RUN)


# The lengths of the file's questions and answers, in characters: the means of ten parts of equal
# size.
ASKED, ANSWERED = (3, 7, 11, 15, 20, 25, 31, 40, 53, 88), (3, 7, 11, 15, 18, 22, 28, 36, 49, 82)


def rows_like_huanhuan() -> str:
    texts = ("娘娘万福金安" * 20, "本宫不会委屈了这孩子" * 10)
    lengths = [(ASKED[number % 10], ANSWERED[number // 10 % 10]) for number in range(3_729)]
    rows = [
        {"instruction": f"{texts[0][:asked]}{number}", "input": "", "output": texts[1][:answered]}
        for number, (asked, answered) in enumerate(lengths)
    ]
    return json.dumps(rows, ensure_ascii=False)


def workplace(folder: Path, **environment: str) -> Workplace:
    """A clone in which the demo has run, except its training; with the file that curl brings."""
    model = folder / "results" / "demo" / "model"
    model.mkdir(parents=True)
    build_tiny(TinyModel(source="tiny"), model, lambda _: None)
    (folder / "data").mkdir()
    (folder / "data" / "huanhuan.json").write_text(rows_like_huanhuan(), encoding="utf-8")
    return Workplace(folder, **environment)


def normalized(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def write_config(block: Block, folder: Path) -> str | None:
    """Write a whole config under the name of its experiment, as the page says."""
    experiment: str | None = yaml.safe_load(block.text).get("experiment")
    if experiment is not None:
        (folder / f"{experiment}.yaml").write_text(block.text, encoding="utf-8")
    return experiment


@pytest.fixture
def hub() -> Iterator[str]:
    with serving() as served:
        for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-14B"):
            served.add("model", name, MODEL)
        yield served.url


def without_comments(block: Block) -> Block:
    return Block(block.kind, [re.sub(r"(^|\s+)# .*", "", line) for line in block.lines])


def test_the_pages_differ_only_in_prose_and_comments() -> None:
    """So what works on one page works on the other."""
    english, chinese = ([without_comments(block) for block in blocks_of(page)] for page in PAGES)
    assert english == chinese


def test_the_page_works_as_far_as_check_plan_or_a_dry_run(tmp_path: Path, hub: str) -> None:
    place = workplace(tmp_path, HF_ENDPOINT=hub, MODELSCOPE_ENDPOINT=hub)
    printed, run, configs, compared = "", [], [], 0
    for block in blocks_of(PAGES[0]):
        if block.kind == "yaml":
            configs.append(write_config(block, tmp_path))
        elif block.kind == "json":
            json.loads(block.text)
        elif block.kind == "text":
            if printed:  # by commands that all ran in full
                shown = [line for line in normalized(block.text) if line != "..."]
                assert [line for line in shown if line not in normalized(printed)] == [], printed
                compared += 1
        else:
            printed, in_full = "", True
            for command in [block.text] if block.kind == "bash" else block.lines:
                if not is_run(command):
                    continue
                is_a_run = shlex.split(command, comments=True)[:2] == ["qwen3", "run"]
                done = place.run(command.replace(" run ", " run -n ") if is_a_run else command)
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                run.append(command)
                in_full &= not is_a_run
                printed += done.stdout + done.stderr
            printed = printed if in_full else ""

    assert configs == ["orders", "laptop", "card", None]  # the last is a site file
    assert [command for command in run if " plan two.yaml" in command]
    assert compared == 6


def test_every_kind_of_command_that_is_not_run_is_there() -> None:
    commands = [
        line for block in blocks_of(PAGES[0]) if block.kind == "commands" for line in block.lines
    ]
    unused = [
        words
        for words in NOT_RUN
        if not any(f"{line} ".startswith(f"{words} ") for line in commands)
    ]
    assert unused == []


@pytest.mark.slow
def test_the_small_run_trains_and_its_model_answers(tmp_path: Path, forked_programs: Path) -> None:
    """From untrained weights instead of the demo's."""
    programs = f"{forked_programs}:{Path(sys.executable).parent}"
    place = workplace(tmp_path, PATH=f"{programs}:{os.environ['PATH']}", OMP_NUM_THREADS="1")
    for block in blocks_of(PAGES[0]):
        if block.kind == "bash":
            assert place.run(block.text).returncode == 0
        if block.kind == "yaml" and write_config(block, tmp_path) == "orders":
            break
    done = place.run("qwen3 run orders.yaml", timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for command in commands_of_the_small_run():
        done = place.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if command.startswith("echo"):
            assert done.stdout.strip() == "It has left our warehouse and arrives in two days."
    assert (tmp_path / "results" / "orders" / "report.html").exists()


def commands_of_the_small_run() -> list[str]:
    """`summary`, and the questions that a pipe asks."""
    lines = [
        line for block in blocks_of(PAGES[0]) if block.kind == "commands" for line in block.lines
    ]
    found = [line for line in lines if line.startswith(("qwen3 summary", "echo "))]
    assert len(found) == 3
    return found
