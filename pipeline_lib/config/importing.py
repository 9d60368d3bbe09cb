"""Import a config from other tools: LLaMA-Factory, Axolotl, ms-swift, TRL, DeepSpeed, accelerate.

It reads their files, arguments of transformers' Trainer, and the commands of some. The kind of a
file is recognised by its content. Nothing in a file is evaluated, and no key is left out in silence.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.deepspeed_json import REASONS
from pipeline_lib.config.import_arguments import convert_arguments
from pipeline_lib.config.import_commands import read_command
from pipeline_lib.config.import_datasets import (
    INFO_NAME,
    CountRows,
    Info,
    convert_datasets,
    is_dataset_info,
)
from pipeline_lib.config.import_deepspeed import account_for_placement, is_deepspeed
from pipeline_lib.config.import_draft import (
    DEFAULTS,
    AccountPart,
    Draft,
    Given,
    Row,
    shown,
    yaml_text,
)
from pipeline_lib.config.import_keys import OVERRIDDEN, add_keys
from pipeline_lib.config.import_sources import convert_sources
from pipeline_lib.config.import_tools import (
    ACCELERATE,
    ADAPTER,
    ARGUMENTS,
    DEEPSPEED,
    LLAMA_FACTORY,
    NAMES,
    NO_PREFERENCES,
    OF_TRAININGS,
    PREFERENCES,
    SWIFT,
    TELLING,
    TELLING_ARGUMENTS,
    WITH_ARGUMENTS,
    Origin,
)
from pipeline_lib.config.load import problems_of
from pipeline_lib.config.schema import NAME_PATTERN
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.core.errors import ConfigError

DATASETS = INFO_NAME
PAGE = "docs/from-other-tools.md"
# Keys under which a file or a command names another file, and the kind of that file; None is the
# kind of the file itself.
_NAMING = {
    "config": None,
    "config_file": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "deepspeed_config_file": DEEPSPEED,
}


@dataclass(frozen=True)
class Imported:
    """The config as YAML text, and what became of each key."""

    text: str
    rows: tuple[Row, ...]
    # sections that the files say nothing about and that a config has to have
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    path: Path
    kind: str
    content: dict[str, Any]
    is_command: bool = False


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
    files = _read_all(paths)
    main = next((file for file in files if file.kind in WITH_ARGUMENTS), files[0])
    names = NAMES.get(main.kind, {})
    draft = Draft(their_names={common: theirs for theirs, common in names.items()})
    files += _referenced(files, main, draft)
    if gpus is not None:
        draft.add("nproc_per_node", Given("the command", "--gpus", gpus))
    _add_all(draft, files)
    origin = _origin(files, main, draft, hub)
    _account_for_named(draft, files)
    _name(draft, out or main.path)
    infos = [
        Info(str(file.path), file.path.parent, file.content)
        for file in files
        if file.kind == DATASETS
    ]
    convert_arguments(draft, origin)
    if origin.tool in (LLAMA_FACTORY, ARGUMENTS, None):
        convert_datasets(draft, infos[0] if infos else None, hub, count_rows)
    else:
        convert_sources(draft, origin, count_rows)
    account_for_placement(draft)
    draft.account_for_the_rest(REASONS)
    _say_what_is_missing(draft)
    problems = draft.problems or _problems_of(draft)
    if problems:
        raise ConfigError(", ".join(str(path) for path in paths), problems)
    missing = tuple(
        key
        for key, prefix in (("model", "model"), ("data", "data.train"))
        if prefix not in draft.values
    )
    return Imported(yaml_text(draft, _head(files)), tuple(draft.rows), missing)


def _origin(files: Sequence[_File], main: _File, draft: Draft, hub: str) -> Origin:
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


def _add_all(draft: Draft, files: Sequence[_File]) -> None:
    """Add the keys of `files`; where a command says something, the other files do not decide."""
    has_command = any(file.is_command for file in files)
    for file in sorted(files, key=lambda file: not file.is_command):
        if file.kind == DATASETS:  # its keys are added once it is known which are used
            continue
        gives_way = has_command and not file.is_command and file.kind != DEEPSPEED
        add_keys(draft, file.kind, file.content, str(file.path), gives_way=gives_way)


def _account_for_named(draft: Draft, files: Sequence[_File]) -> None:
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


def _head(files: Sequence[_File]) -> str:
    names = ", ".join(f"{file.path} ({file.kind})" for file in files)
    return f"Imported from {names}. {PAGE} says what differs between the tools."


# Files: reading them, and telling their kind.


def _read_all(paths: Sequence[Path]) -> list[_File]:
    files: list[_File] = []
    problems: list[str] = []
    for path in paths:
        try:
            files += _read(path)
        except ConfigError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    for kind in dict.fromkeys(file.kind for file in files):
        same = [str(file.path) for file in files if file.kind == kind and not file.is_command]
        if len(same) > 1:
            problems.append(
                f"{' and '.join(same)} are both of the kind {kind}; import one of them at a time"
            )
    tools = [file.kind for file in files if file.kind in OF_TRAININGS]
    if len(set(tools)) > 1:
        problems.append(f"{' and '.join(dict.fromkeys(tools))}: import one training at a time")
    if not problems and all(file.kind == DATASETS for file in files):
        problems.append(f"{INFO_NAME} lists data sets only: give the YAML that uses them as well")
    if problems:
        raise ConfigError("import", problems)
    return files


def _read(path: Path) -> list[_File]:
    """Return the file, or what a command in it says, as if by files. Raises ConfigError."""
    text = _text(path)
    command = read_command(text, str(path))
    if command is not None:
        return [_of_command(path, kind, content) for kind, content in command]
    content = _content(text, str(path))
    return [_File(path, _kind(content), content)]


def _of_command(path: Path, kind: str, content: dict[str, Any]) -> _File:
    """Return a part of a command; an unknown script has LLaMA-Factory's arguments or the Trainer's."""
    _refuse_preferences(content)
    if kind == ARGUMENTS and "finetuning_type" in content:
        kind = LLAMA_FACTORY
    return _File(path, kind, content, is_command=True)


def _text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    source = str(path)
    if path.is_dir():
        raise ConfigError(source, ["is a folder; name the YAML or JSON file in it"])
    try:
        with path.open("rb") as file:  # once, since it may be a pipe
            content = file.read(strict_yaml.MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(source, [f"cannot be read: {reason}"]) from error
    if len(content) > strict_yaml.MAX_BYTES:
        raise ConfigError(source, [f"larger than {strict_yaml.MAX_BYTES} bytes, so not a config"])
    return text


def _content(text: str, source: str) -> dict[str, Any]:
    """Return the keys of a JSON or YAML text. Raises ConfigError."""
    if text.lstrip().startswith(("{", "[")):
        value = _json(text, source)
    else:
        document = strict_yaml.parse(text, source)
        if document.problems:
            raise ConfigError(source, document.problems)
        value = document.value
    if not isinstance(value, dict) or not value:
        raise ConfigError(source, ["holds no keys with values, so it is not a config"])
    return value


def _json(text: str, source: str) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ConfigError(source, [f"{key}: given twice; keep one of them" for key in twice])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        where = (
            f"line {error.lineno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise ConfigError(
            source, [f"not JSON: {where}; JSON has no comments and no comma after the last item"]
        ) from None


def _kind(content: Mapping[str, Any]) -> str:
    """Return the kind of a file.

    Raises ConfigError for one that is not read, with what it looks like.
    """
    document = dict(content)
    if is_dataset_info(document):
        return DATASETS
    if isinstance(document.get("model"), dict) or "experiment" in document:
        raise ConfigError("", ["is a config of this project already: `qwen3 check` reads it"])
    _refuse_preferences(document)
    hits = {tool: sum(key in document for key in keys) for tool, keys in TELLING.items()}
    tool = max(hits, key=lambda tool: hits[tool])
    if tool == ADAPTER and hits[tool]:
        text = f"looks like {tool}, which is not imported. Put its keys into a config and run"
        raise ConfigError("", [f"{text} `qwen3 check`: it names our key for each of them"])
    if hits[tool]:
        return tool
    if is_deepspeed(document):
        return DEEPSPEED
    if any(key in document for key in TELLING_ARGUMENTS):
        return ARGUMENTS
    known = (
        f"a YAML or JSON of {', '.join(OF_TRAININGS)}, DeepSpeed or {ACCELERATE}, {INFO_NAME}, "
        "TrainingArguments as JSON, or a script with one command such as `swift sft ...`"
    )
    found = ", ".join(list(document)[:5])
    raise ConfigError("", [f"unknown kind of file (it has the keys {found}); expected {known}"])


def _refuse_preferences(document: Mapping[str, Any]) -> None:
    """Raise ConfigError if `document` is of a training on preferences or rewards."""
    found = [key for key in PREFERENCES if document.get(key) not in (None, False, "", [], {})]
    if found:
        key = found[0]
        raise ConfigError("", [f"{key}: {shown(document[key])}: {NO_PREFERENCES}"])


def _referenced(files: Sequence[_File], main: _File, draft: Draft) -> list[_File]:
    """Return the files here that the arguments name, unless one of their kind was given."""
    kinds = {file.kind for file in files}
    found: list[_File] = []
    to_read = list(files)
    while to_read:
        file = to_read.pop(0)
        for key, kind in _NAMING.items():
            name = file.content.get(key)
            is_needed = kind != DEEPSPEED or DEEPSPEED not in kinds
            if isinstance(name, str) and is_needed and file.kind not in (DEEPSPEED, DATASETS):
                named = _named(file, Path(name), kind or file.kind, draft)
                new = [one for one in named if one.path not in [other.path for other in files]]
                found += new
                to_read += new
    if main.kind == LLAMA_FACTORY and DATASETS not in kinds:
        folder = main.content.get("dataset_dir")
        places = [Path(folder if isinstance(folder, str) else "data") / INFO_NAME, Path(INFO_NAME)]
        for place in places:
            if all(file.kind != DATASETS for file in found):
                found += _named(main, place, DATASETS, draft)
    return found


def _named(main: _File, name: Path, kind: str, draft: Draft) -> list[_File]:
    """Return the file `name`, relative to here, to the file naming it or to a folder above."""
    folders = [Path(), main.path.parent, *main.path.absolute().parent.parents]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        return []
    try:
        content = _content(_text(path), str(path))
        if (found := _kind(content)) != kind:
            raise ConfigError("", [f"is not a {kind} file but {found}"])
    except ConfigError as error:
        draft.problems += [
            f"{path}, which {main.path} names: {problem}" for problem in error.problems
        ]
        return []
    return [_File(path, kind, content)]


# The result.


def _name(draft: Draft, path: Path) -> None:
    """Name the experiment like the run, or like the file, in the letters that a name may have."""
    key = next((key for key in ("run_name", "swanlab_run_name") if draft.has(key)), None)
    wanted = str(draft.value(key)) if key else path.stem
    name = re.sub(r"[^A-Za-z0-9._=-]+", "-", wanted).strip("-._=")[:128]
    values = {
        "experiment": name if re.match(NAME_PATTERN, name) and name != "current" else "imported"
    }
    if key:
        draft.taken(key, values)
    else:
        draft.values.update(values)
        draft.origins.update(dict.fromkeys(values, str(path)))
        draft.rows.append(
            Row(AccountPart.TAKEN, (), "the file's name", f"experiment: {values['experiment']}", "")
        )


_OF_A_RUN = (
    "model",
    "data.train",
    "tokenize.max_tokens",
    "train.epochs",
    "train.lr",
    "train.global_batch_samples",
)


def _say_what_is_missing(draft: Draft) -> None:
    """Account for what no file says and a run needs: the defaults of this project."""
    others = {
        "train.epochs": "train.max_steps",
        "train.global_batch_samples": "train.global_batch_tokens",
    }
    missing = [
        key for key in _OF_A_RUN if key not in draft.values and others.get(key) not in draft.values
    ]
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
