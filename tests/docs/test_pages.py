"""All pages: links lead somewhere, commands exist, languages agree, every page is in the index."""

import re
import shlex
from pathlib import Path

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.config.stages import STAGES
from tests.docs.pages import (
    CHINESE,
    LINK,
    ONLY_IN_CHINESE,
    ROOT,
    anchors_of,
    chinese_of,
    commands_of,
    differences,
    read,
    sections_of,
)

PAGES = [
    "README.md",
    "README.zh-CN.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
IN_TWO_LANGUAGES = [
    "README.md",
    "docs/config.md",
    "docs/data.md",
    "docs/host-checks.md",
    "docs/host-faults.md",
    "docs/join.md",
    "docs/long-context.md",
    "docs/troubleshooting.md",
    "docs/tutorial.md",
    "docs/two-machines.md",
]


@pytest.mark.parametrize("page", IN_TWO_LANGUAGES)
def test_both_languages_have_the_same_code_numbers_and_links(page: str) -> None:
    assert differences(page, read(page), read(chinese_of(page))) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("24 GB", "25 GB", "## Your own run: only in README.md: number 24"),
        (
            "chat demo",
            "chat demos",
            "## Three commands: only in README.zh-CN.md: line of code '    qwen3",
        ),
        (
            "epochs: 2\n",
            "epochs: 3\n",
            "## Your own run: only in README.md: line of code '     epochs: 2'",
        ),
        (
            "docs/data.zh-CN.md",
            "docs/dat.zh-CN.md",
            "## Your own run: only in README.zh-CN.md: link 'docs/dat.md'",
        ),
        ("## 有测试保证的行为", "### 有测试保证的行为", "the sections differ: "),
    ],
)
def test_a_change_in_one_language_alone_is_named(old: str, new: str, what: str) -> None:
    english, chinese = read("README.md"), read("README.zh-CN.md")
    assert old in chinese

    found = differences("README.md", english, chinese.replace(old, new))

    assert [line for line in found if line.startswith(what)], found


def test_a_translated_comment_is_no_difference() -> None:
    assert (
        differences("x.md", "a\n\n    make demo  # in 3 s\n", "一\n\n    make demo   # 三秒\n")
        == []
    )


def test_the_chinese_readme_has_a_section_on_modelscope_and_swanlab() -> None:
    [section] = [
        section
        for section in sections_of(read("README.zh-CN.md"))
        if section.heading == ONLY_IN_CHINESE
    ]
    assert "source: modelscope" in "\n".join(section.code)
    assert "swanlab sync" in section.prose


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in LINK.findall(read(page)):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (
            anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    makefile = read("Makefile")
    rules = "".join(path.read_text() for path in sorted(ROOT.glob("workflow/rules/*.smk")))
    rules += read("workflow/Snakefile")
    for line in commands_of(read(page)):
        command = shlex.split(re.split(r" && | > ", line)[0])
        if command[0] == "make":
            assert all(
                re.search(rf"^{target}:", makefile, re.MULTILINE)
                for target in command[1:]
                if "=" not in target
            ), line
        elif command[0] == "snakemake" and "--snakefile" not in command:
            for target in targets_of(command[1:]):
                has_rule = re.search(rf"^rule {target}:", rules, re.MULTILINE)
                assert target in STAGES or has_rule, line
        elif command[0] == "python" and len(command) > 3:
            words = [
                "1" if word == "N" else word for word in command[3:] if word not in ("...", "&")
            ]
            parser().parse_args(words)  # exits where it cannot


def targets_of(arguments: list[str]) -> list[str]:
    """Those arguments of snakemake that name a rule: no option, and no option's value."""
    values = {"--profile", "--configfile", "-j", "--sdm", "--until"}
    before = ["", *arguments]
    return [
        one
        for last, one in zip(before, arguments, strict=False)
        if last not in values and re.fullmatch(r"[a-z_]+", one)
    ]


def test_two_machines_quotes_the_speeds_in_the_header_of_its_recipe() -> None:
    recipe = read("config/recipes/full-1.5b-2nodes-2xa10-9gbit.yaml")
    header = " ".join(
        line.removeprefix("#").strip() for line in recipe.splitlines() if line.startswith("#")
    )
    of_two_and_of_one = re.findall(r"([\d,]+) tokens/s \([^)]*\) in all", header)
    assert len(of_two_and_of_one) == 2
    for page in ("docs/two-machines.md", chinese_of("docs/two-machines.md")):
        [section] = [
            one
            for one in sections_of(read(page))
            if "full-1.5b-2nodes-2xa10-9gbit.yaml)" in one.prose
        ]
        assert re.findall(r"([\d,]+) tokens/s", section.prose) == of_two_and_of_one


def test_the_index_names_every_page() -> None:
    index = read("docs/README.md")
    pages = [
        Path(page).name for page in PAGES if page.startswith("docs/") and page != "docs/README.md"
    ]
    assert [page for page in pages if f"({page})" not in index] == []


def test_each_language_links_to_the_other() -> None:
    for page in IN_TWO_LANGUAGES:
        name = Path(page).name
        assert f"]({chinese_of(name)})" in read(page).partition("\n## ")[0], page
        assert f"]({name})" in read(chinese_of(page)).partition("\n## ")[0], chinese_of(page)
    translated = {page.replace(CHINESE, ".md") for page in PAGES if page.endswith(CHINESE)}
    assert translated == set(IN_TWO_LANGUAGES)


def test_the_image_and_make_install_take_the_torch_of_the_constraints() -> None:
    [pinned] = re.findall(r"^torch==([\d.]+)$", read("constraints.txt"), re.MULTILINE)
    assert re.findall(r"torch==([\d.]+)", read("Makefile")) == [pinned]
    assert re.findall(r"torch==([\d.]+)", read("Dockerfile")) == [pinned]
