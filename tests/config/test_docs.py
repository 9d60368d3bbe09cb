import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.docs import config_json_schema, config_page
from pipeline_lib.config.exports import Average
from pipeline_lib.config.load import load_configs
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.schema import ConfigFile, GpuSheet, HubAdapter, LocalAdapter
from pipeline_lib.config.train import PLACEMENT_KEYS, RENAMED
from pipeline_lib.core.language import Language, speaking
from tests.config.keys import all_keys, plain
from tests.docs.pages import read, yaml_blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "language"), [("docs/config.md", "en"), ("docs/config.zh-CN.md", "zh")]
)
def test_the_page_is_the_present_one(page: str, language: Language) -> None:
    with speaking(language):
        assert read(page) == config_page(), "run `make docs`"


def test_the_schema_for_editors_is_the_present_one() -> None:
    text = (ROOT / "workflow" / "schemas" / "config.schema.json").read_text(encoding="utf-8")

    assert text == config_json_schema(), "run `make docs`"


def test_what_may_change_in_an_unfinished_run_is_listed() -> None:
    text = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    listed = text.partition("and these keys of `train`:\n")[2].partition(
        "\n\nChanging anything else"
    )[0]

    assert set(re.findall(r"`(\w+)`", listed)) == {
        RENAMED.get(key, key) for key in PLACEMENT_KEYS
    } | {"until_step"}


def test_the_examples_of_sweeps_pass_beside_the_demo(tmp_path: Path) -> None:
    demo: dict[str, Any] = strict_yaml.load(ROOT / "config" / "config.yaml").value
    blocks = yaml_blocks(read("docs/sweeps.md"))
    assert len(blocks) == 4

    counts = []
    for block in blocks:
        added: dict[str, Any] = strict_yaml.parse(block, "docs/sweeps.md").value
        content = {**demo, **added, "train": {**demo["train"], **added.get("train", {})}}
        (tmp_path / "sweep.yaml").write_text(json.dumps(content), encoding="utf-8")
        counts.append(len(load_configs(tmp_path / "sweep.yaml")))

    assert counts == [4, 2, 8, 4]


def test_the_examples_of_chains_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = "experiment: base\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\n"
    (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    chains = []
    for block in yaml_blocks(read("docs/chains.md")):
        Path("my.yaml").write_text(block, encoding="utf-8")
        chains.append([len(config.chain) for config in load_configs(Path("my.yaml"))])

    assert chains == [[1, 2], [2], [1, 2], [1], [1, 2, 2, 2]]


def keys_of_tables() -> list[str]:
    """The keys of all sections, also of those that a list or one of several kinds holds."""
    return [
        *(plain(key).rpartition(".")[2] for key in all_keys(ConfigFile)),
        *Rope.model_fields,
        *LocalAdapter.model_fields,
        *HubAdapter.model_fields,
        *GpuSheet.model_fields,
        *Benchmark.model_fields,
        *Average.model_fields,
    ]


def test_every_key_has_a_row_with_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", config_page(), re.MULTILINE)

    assert sorted(row[0] for row in rows) == sorted(keys_of_tables())
    for key, *cells in rows:
        assert all(cell.strip() for cell in cells), f"{key} has an empty cell"


@pytest.mark.parametrize(
    "row",
    [
        "| `experiment` | text | required | name of the experiment: letters, digits, '.', '_', '-' "
        "and '=' |",
        "| `nodes` | whole number >= 1, <= 10,000 | `1` | number of nodes, all of the same kind; "
        "training on more than one runs as a SLURM job, on the `hosts` of the site file, or on "
        "machines that run `join` |",
        "| `gpus_per_node` | whole number >= 0, <= 64 | `0` | one rank per GPU; 0 trains on the "
        "CPU |",
        "| `beta1` | number >= 0, < 1 | `0.9` | AdamW's beta1 |",
        "| `max_steps` | whole number >= 1 | none | optimizer steps of the run, instead of "
        "`epochs`; the learning rate schedule ends there |",
        "| `tokenizer` | text | none | folder with a `tokenizer.json`; without it, one is trained "
        "|",
        "| `duplicates` | `keep`, `drop` | `keep` | whether to keep conversations equal to an "
        "earlier one; they are counted either way |",
        "| `columns` | names to text | `{}` | our name, then yours: `{output: answer}`; `{label: "
        "ignore}`"
        " skips the column `label` |",
        "| `sweep` | names to list of any value or object | `{}` | several experiments from one "
        "file, named by what"
        " differs: lists of values for keys of the sections, such as `{train.lr: [1e-4, 2e-4], "
        "train.seed: [1, 2]}`;"
        " also `list`, `random` and `halving`: docs/sweeps.md |",
        "| `prompts` | list of text | `[]` | your own questions, answered beside the held-out "
        "prompts; they use `tokenize.system` and `tokenize.tools`, and thinking is on only if "
        "all trained answers have thinking |",
    ],
)
def test_rows_say_type_range_default_and_meaning(row: str) -> None:
    assert row in config_page().splitlines()


def test_the_schema_knows_every_key_and_refuses_others() -> None:
    schema: dict[str, Any] = json.loads(config_json_schema())
    sections = [schema, *schema["$defs"].values()]

    names = sorted(name for section in sections for name in section["properties"])
    holders = {
        "model",
        "data",
        "train",
        "tokenize",
        "shard",
        "cluster",
        "tracking",
        "merge",
        "push",
        "evaluate",
        "ship",
        "report",
        "lora",
        "guards",
    }
    # `train` is a section of the file and a list in `data`.
    assert sorted(name for name in names if name not in holders) == sorted(keys_of_tables())
    assert all(section["additionalProperties"] is False for section in sections)
    assert schema["anyOf"] == [
        {"required": ["experiment", "model", "data"]},
        {"required": ["experiments"]},
    ]
