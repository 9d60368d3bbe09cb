"""Files of other tools, written into the working directory and imported."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.import_draft import Row
from pipeline_lib.config.importing import Imported, import_files
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.data.read_files import count_rows


def write(name: str, content: Any) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        content if isinstance(content, str) else json.dumps(content, indent=4), encoding="utf-8"
    )
    return path


def imported(*paths: Path, gpus: int | None = None) -> Imported:
    return import_files(paths, "huggingface", count_rows, gpus=gpus)


def config_of(result: Imported) -> dict[str, Any]:
    """The keys of the config that was written, as text and back."""
    value = strict_yaml.parse(result.text, "imported").value
    assert isinstance(value, dict)
    return value


def row_of(result: Imported, key: str) -> Row:
    """The one row that accounts for `key`."""
    [row] = [row for row in result.rows if key in [one.name for one in row.keys]]
    return row


def problems(*paths: Path) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        imported(*paths)
    return raised.value.problems


def leaves(value: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            found += leaves(inner, f"{above}{key}.")
        elif key == "betas" and isinstance(inner, list):
            found += [f"{above}{key}[{number}]" for number in range(len(inner))]
        else:
            found.append(above + key)
    return found
