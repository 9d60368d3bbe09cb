"""Import a config from other tools: LLaMA-Factory, Axolotl, ms-swift, TRL, DeepSpeed, accelerate.

It reads their files, arguments of transformers' Trainer, and the commands of some. The kind of a
file is recognised by its content. Nothing in a file is evaluated, and no key is left out in silence.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.deepspeed_json import REASONS
from pipeline_lib.config.import_arguments import convert_arguments
from pipeline_lib.config.import_datasets import CountRows, Info, convert_datasets
from pipeline_lib.config.import_deepspeed import account_for_placement
from pipeline_lib.config.import_draft import DEFAULTS, AccountPart, Draft, Given, Row, shown
from pipeline_lib.config.import_inputs import DATASETS, InputFile, read_all, referenced
from pipeline_lib.config.import_keys import OVERRIDDEN, add_keys
from pipeline_lib.config.import_sources import convert_sources
from pipeline_lib.config.import_tools import (
    ACCELERATE,
    ARGUMENTS,
    DEEPSPEED,
    LLAMA_FACTORY,
    NAMES,
    OF_TRAININGS,
    SWIFT,
    WITH_ARGUMENTS,
    Origin,
)
from pipeline_lib.config.import_yaml import yaml_text
from pipeline_lib.config.load import problems_of
from pipeline_lib.config.schema import NAME_PATTERN
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.core.errors import ConfigError

PAGE = "docs/from-other-tools.md"


@dataclass(frozen=True)
class Imported:
    """The config as YAML text, and what became of each key."""

    text: str
    rows: tuple[Row, ...]
    # sections that the files say nothing about and that a config has to have
    missing: tuple[str, ...]


def import_files(
    paths: Sequence[Path],
    hub: str,
    count_rows: CountRows,
    out: Path | None = None,
    gpus: int | None = None,
) -> Imported:
    """Return the config that `paths` describe together; `hub` is where a name without one lies.

    `count_rows` counts the rows of the data files, where a number of them is held out. The
    experiment is named like the run; if no file names that, like the file `out` that the config is
    for. `gpus` is the number of GPUs of a machine, which few files say.

    Also read are the files that the given ones name, if they are here: dataset_info.json, a
    DeepSpeed JSON, accelerate's YAML, the YAML of a command. Raises ConfigError with all problems:
    files that cannot be read, that are of no known kind, that contradict each other, or that hold
    what cannot be trained here.
    """
    files = read_all(paths)
    main = next((file for file in files if file.kind in WITH_ARGUMENTS), files[0])
    names = NAMES.get(main.kind, {})
    draft = Draft(their_names={common: theirs for theirs, common in names.items()})
    files += referenced(files, main, draft)
    if gpus is not None:
        draft.add("nproc_per_node", Given("the command", "--gpus", gpus))
    _add_all(draft, files)
    origin = _origin(files, main, draft, hub)
    _account_for_named(draft, files)
    _name(draft, out or main.path)
    convert_arguments(draft, origin)
    if origin.tool in (LLAMA_FACTORY, ARGUMENTS, None):
        listing = next((file for file in files if file.kind == DATASETS), None)
        info = None
        if listing is not None:
            info = Info(str(listing.path), listing.path.parent, listing.content)
        convert_datasets(draft, info, hub, count_rows)
    else:
        convert_sources(draft, origin, count_rows)
    account_for_placement(draft)
    draft.account_for_the_rest(REASONS)
    _say_what_is_missing(draft)
    problems = draft.problems or _problems_of(draft)
    if problems:
        raise ConfigError(", ".join(str(path) for path in paths), problems)
    missing = []
    if "model" not in draft.values:
        missing.append("model")
    if "data.train" not in draft.values:
        missing.append("data")
    return Imported(yaml_text(draft, _head(files)), tuple(draft.rows), tuple(missing))


def _origin(files: Sequence[InputFile], main: InputFile, draft: Draft, hub: str) -> Origin:
    kinds = {file.kind for file in files}
    if main.kind == SWIFT:
        uses_hf = str(draft.value("use_hf")).lower() in ("1", "true")
        hub = "huggingface" if uses_hf else "modelscope"
        draft.taken("use_hf", why=f"source: {hub}")
    return Origin(
        tool=main.kind if main.kind in WITH_ARGUMENTS else None,
        has_deepspeed=DEEPSPEED in kinds,
        folder=main.path.parent,
        hub=hub,
    )


def _add_all(draft: Draft, files: Sequence[InputFile]) -> None:
    """Add the keys of `files`; where a command says something, the other files do not decide."""
    has_command = any(file.is_command for file in files)
    for file in sorted(files, key=lambda file: not file.is_command):
        if file.kind == DATASETS:  # its keys are added once it is known which are used
            continue
        gives_way = has_command and not file.is_command and file.kind != DEEPSPEED
        add_keys(draft, file.kind, file.content, str(file.path), gives_way=gives_way)


def _account_for_named(draft: Draft, files: Sequence[InputFile]) -> None:
    """Account for the keys that name another file."""
    listed = "its keys are listed by themselves"
    read = [file for file in files if not file.is_command]
    kinds = {file.kind for file in read}
    if DEEPSPEED in kinds or draft.has("zero_stage") or isinstance(draft.value("deepspeed"), dict):
        draft.taken("deepspeed", why=listed)
    draft.without(
        "deepspeed", "this file is not here: give it as another FILE, or set train.strategy"
    )
    if ACCELERATE in kinds:
        draft.taken("config_file", why=listed)
    draft.without("config_file accelerate_config", "this file is not here: give it as another FILE")
    if kinds & set(OF_TRAININGS):
        draft.taken("config", why=listed)
    elif draft.has("config"):
        name = draft.value("config")
        draft.problems.append(f"{name}: this file is not here: import from the folder it is in")
    draft.taken(OVERRIDDEN, why="without effect there, too: the command's own options decide")


def _head(files: Sequence[InputFile]) -> str:
    names = ", ".join(f"{file.path} ({file.kind})" for file in files)
    return f"Imported from {names}. {PAGE} says what differs between the tools."


def _name(draft: Draft, path: Path) -> None:
    """Name the experiment like the run, or like the file, in the letters that a name may have."""
    key = next((key for key in ("run_name", "swanlab_run_name") if draft.has(key)), None)
    wanted = str(draft.value(key)) if key else path.stem
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", wanted).strip("-._=")[:128]
    if not re.match(NAME_PATTERN, name) or name == "current":
        name = "imported"
    if key:
        draft.taken(key, {"experiment": name})
        return
    draft.values["experiment"] = name
    draft.origins["experiment"] = str(path)
    draft.rows.append(Row(AccountPart.TAKEN, (), "the file's name", f"experiment: {name}", ""))


_OF_A_RUN = (
    "model",
    "data.train",
    "tokenize.max_tokens",
    "train.epochs",
    "train.lr",
    "train.global_batch_samples",
)
_INSTEAD = {
    "train.epochs": "train.max_steps",
    "train.global_batch_samples": "train.global_batch_tokens",
}


def _say_what_is_missing(draft: Draft) -> None:
    """Account for what no file says and a run needs: the defaults of this project."""
    missing = [key for key in _OF_A_RUN if key not in draft.values]
    for ours, instead in _INSTEAD.items():
        if ours in missing and instead in draft.values:
            missing.remove(ours)
    defaults = [f"{key} {shown(DEFAULTS[key])}" for key in missing if DEFAULTS.get(key) is not None]
    needed = [key for key in missing if key in ("model", "data.train")]
    if defaults:
        text = f"no file says it: our defaults are {', '.join(defaults)}"
        draft.rows.append(Row(AccountPart.CHANGED, (), "what else a run needs", "", text))
    if needed:
        text = "no file says it, and it has no default: write it yourself"
        draft.rows.append(Row(AccountPart.NONE, (), " and ".join(needed), "", text))


def _problems_of(draft: Draft) -> list[str]:
    """Return what the schema and the checks say against the values, with their keys."""
    value: dict[str, Any] = {"model": {"source": "tiny"}, "data": {"train": [{"source": "pydoc"}]}}
    places: dict[Keys, str] = {}
    for ours, item in draft.values.items():
        keys = strict_yaml.undotted(ours)
        place = value
        for key in keys[:-1]:
            place = place.setdefault(str(key), {})
        place[str(keys[-1])] = item
        places[keys] = draft.origins[ours]
    return problems_of(value, places)
