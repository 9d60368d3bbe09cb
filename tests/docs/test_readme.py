"""README.md is short, its commands and configs work, and the plan in it is what `plan` prints."""

import re
import shlex
from collections.abc import Iterator

import pytest
import yaml  # type: ignore[import-untyped]

from tests.docs.pages import Workplace, commands_of, read, sections_of, yaml_blocks
from tests.fake_hub import Files, serving

READMES = ["README.md", "README.zh-CN.md"]
MAX_LINES = 220
NOT_RUN = {  # here; docs/tutorial.md and others have tests of their own
    "make": "installs, or tests",
    "chat": "needs a trained model: tests/docs/test_tutorial.py",
    "summary": "needs a trained model: tests/docs/test_tutorial.py",
    "compare": "needs two trained models: tests/compare",
    "status": "with --watch it goes on until it is stopped: tests/status",
    "import": "needs a file of another tool: tests/config/test_importing.py",
    "store": "needs a trained model: tests/upkeep",
    "docs": "writes into the repository: tests/config",
}
# the plan knows the sizes of Qwen3-0.6B
MODEL: Files = {"config.json": b"{}", "model.safetensors": b"0"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """README's data row, many times, and its config, beside a hub that has the model."""
    folder = tmp_path_factory.mktemp("readme")
    [row] = [
        line
        for section in sections_of(read("README.md"))
        for line in section.code
        if '"messages"' in line
    ]
    (folder / "data").mkdir()
    rows = [row.strip().replace("Who are you?", f"Who are you, {number}?") for number in range(200)]
    (folder / "data" / "chat.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "my.yaml").write_text(yaml_blocks(read("README.md"))[0])
    with serving() as hub:
        hub.add("model", "Qwen/Qwen3-0.6B", MODEL)
        yield Workplace(folder, HF_ENDPOINT=hub.url, MODELSCOPE_ENDPOINT=hub.url)


@pytest.mark.parametrize("page", READMES)
def test_it_is_short(page: str) -> None:
    # one section more
    assert len(read(page).splitlines()) <= MAX_LINES + (25 if page == "README.zh-CN.md" else 0)


def test_every_command_runs_as_far_as_check_plan_or_a_dry_run(workplace: Workplace) -> None:
    run = set()
    for line in commands_of(read("README.md")):
        name = name_of(line)
        if name in NOT_RUN:
            continue
        if line not in run:
            done = workplace.run(f"{line} -n" if name in ("snakemake", "run") else line)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            run.add(line)

    assert set(map(name_of, run)) == {"check", "plan", "run", "snakemake"}


def name_of(line: str) -> str:
    """The command of ours, or the program."""
    program, *words = shlex.split(line)
    return words[0] if program == "qwen3" else program


def test_the_first_config_works_for_conversations_as_short_as_the_example_row(
    workplace: Workplace,
) -> None:
    """Whole blocks hold as many tokens as a step has, however short the conversations are."""
    done = workplace.run("qwen3 check my.yaml")
    assert "is likely to be refused" not in done.stdout + done.stderr
    keys = yaml.safe_load((workplace.folder / "my.yaml").read_text())
    del keys["train"]["global_batch_tokens"]
    keys["train"]["global_batch_samples"] = 16
    (workplace.folder / "samples.yaml").write_text(yaml.safe_dump(keys))
    done = workplace.run("qwen3 check samples.yaml")
    assert "global_batch_samples: 16 is likely to be refused" in done.stdout + done.stderr


def test_configs_pass_check_and_plan(workplace: Workplace) -> None:
    """A block without `experiment` is to be added to the first one.

    Most are in both languages: each is tried once.
    """
    tried: list[object] = []
    for page in READMES:
        blocks = [yaml.safe_load(block) for block in yaml_blocks(read(page))]
        for keys in blocks:
            if "experiment" not in keys:
                keys = blocks[0] | {
                    name: merged(blocks[0].get(name), value) for name, value in keys.items()
                }
            if keys in tried:
                continue
            tried.append(keys)
            path = workplace.folder / f"{len(tried)}.yaml"
            path.write_text(yaml.safe_dump(keys), encoding="utf-8")
            for command in ("check", "plan"):
                done = workplace.run(f"qwen3 {command} {path.name}")
                assert done.returncode == 0, f"{keys}\n{done.stdout}{done.stderr}"
    assert len(tried) == 4, "three in both languages, and one more in Chinese"


def merged(old: object, new: object) -> object:
    return {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new


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
    done = Workplace(folder, COLUMNS="100").run("qwen3 plan a10.yaml")
    return {" ".join(line.split()) for line in done.stdout.splitlines()}


@pytest.mark.parametrize("page", READMES)
def test_the_plan_is_what_is_printed(page: str, printed_plan: set[str]) -> None:
    shown = re.search(r"\n    FITS .*rounded to bf16\n", read(page), re.DOTALL)
    assert shown is not None
    lines = [" ".join(line.split()) for line in shown[0].splitlines()]
    assert [line for line in lines if line not in printed_plan] == []
    assert len(lines) > 20


@pytest.mark.parametrize("page", READMES)
def test_the_memory_of_a_recipe_is_that_of_its_table(page: str) -> None:
    recipes = read("docs/recipes.md")
    shown = re.findall(r"\(config/recipes/([\w.-]+)\)[^|;]*?([\d.]+ GiB)", read(page))
    assert len(shown) == 6
    for recipe, memory in shown:
        [row] = [line for line in recipes.splitlines() if line.startswith(f"| [{recipe}]")]
        assert f"| {memory} (" in row, recipe
