"""What newcomers write: each error names the cause and the form to write."""

import json
from pathlib import Path

import pytest

from pipeline_lib.config.load import load_config
from pipeline_lib.core.errors import ConfigError

GOOD = """\
experiment: e
model: {source: tiny}
data:
  train: [{source: file, path: rows.jsonl}]
  validation_fraction: 0.1
cluster: {gpus_per_node: 0, cpu_ranks: 1}
train: {lr: 1.0e-4, global_batch_tokens: 2048}
"""


@pytest.mark.parametrize(
    ("right", "written", "said"),
    [
        (
            "\n  train: [{source: file, path: rows.jsonl}]\n  validation_fraction: 0.1",
            "",
            "data.train",
        ),
        ("  validation", "   validation", "indented otherwise"),
        ("[{source: file, path: rows.jsonl}]", "x.jsonl", "train: [{source: file, path: x.jsonl}]"),
        ("source: file, ", "", "one of pydoc, file, huggingface, modelscope"),
        ("source: tiny", "name: x", "one of tiny, local, huggingface, modelscope"),
        ("lr: 1.0e-4", "compile: on", "write true"),
        ("lr: 1.0e-4", "method: qlora", "write lora, and train.lora.base: nf4"),
        (GOOD, json.dumps({"messages": []}) + "\n{}\n", "a config is YAML"),
    ],
)
def test_the_form_to_write_is_said(tmp_path: Path, right: str, written: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    assert right in GOOD
    path.write_text(GOOD.replace(right, written))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [problem] = caught.value.problems
    assert said in problem
