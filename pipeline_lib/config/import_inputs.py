"""The files given to an import, and those that they name: read, and told apart by their content."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.import_commands import read_command
from pipeline_lib.config.import_datasets import INFO_NAME, is_dataset_info
from pipeline_lib.config.import_deepspeed import is_deepspeed
from pipeline_lib.config.import_draft import Draft, shown
from pipeline_lib.config.import_tools import (
    ACCELERATE,
    ADAPTER,
    ARGUMENTS,
    DEEPSPEED,
    LLAMA_FACTORY,
    NO_PREFERENCES,
    OF_TRAININGS,
    PREFERENCES,
    TELLING,
    TELLING_ARGUMENTS,
)
from pipeline_lib.core.errors import ConfigError

DATASETS = INFO_NAME
# Keys under which a file or a command names another file, and the kind of that file; None is the
# kind of the file itself.
_NAMING = {
    "config": None,
    "config_file": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "deepspeed_config_file": DEEPSPEED,
}


@dataclass(frozen=True)
class InputFile:
    """A file's path, kind and keys; or a command in it, as if by a file of its tool."""

    path: Path
    kind: str
    content: dict[str, Any]
    is_command: bool = False


def read_all(paths: Sequence[Path]) -> list[InputFile]:
    """Return the files at `paths`, and what commands in them say, as if by files.

    Raises ConfigError with all problems.
    """
    files: list[InputFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files += _read(path)
        except ConfigError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    by_kind: dict[str, list[str]] = {}
    for file in files:
        if not file.is_command:
            by_kind.setdefault(file.kind, []).append(str(file.path))
    for kind, same in by_kind.items():
        if len(same) > 1:
            text = f"{' and '.join(same)} are both of the kind {kind}"
            problems.append(f"{text}; import one of them at a time")
    tools = [file.kind for file in files if file.kind in OF_TRAININGS]
    if len(set(tools)) > 1:
        problems.append(f"{' and '.join(dict.fromkeys(tools))}: import one training at a time")
    if not problems and all(file.kind == DATASETS for file in files):
        problems.append(f"{INFO_NAME} lists data sets only: give the YAML that uses them as well")
    if problems:
        raise ConfigError("import", problems)
    return files


def _read(path: Path) -> list[InputFile]:
    """Return the file, or what a command in it says, as if by files. Raises ConfigError."""
    text = _text(path)
    command = read_command(text, str(path))
    if command is not None:
        return [_of_command(path, kind, content) for kind, content in command]
    content = _content(text, str(path))
    return [InputFile(path, _kind(content), content)]


def _of_command(path: Path, kind: str, content: dict[str, Any]) -> InputFile:
    """Return a part of a command; an unknown script has LLaMA-Factory's arguments or the Trainer's."""
    _refuse_preferences(content)
    if kind == ARGUMENTS and "finetuning_type" in content:
        kind = LLAMA_FACTORY
    return InputFile(path, kind, content, is_command=True)


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
        where = str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}: {error.msg}"
        text = f"not JSON: {where}; JSON has no comments and no comma after the last item"
        raise ConfigError(source, [text]) from None


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


def referenced(files: Sequence[InputFile], main: InputFile, draft: Draft) -> list[InputFile]:
    """Return the files here that the arguments name, unless one of their kind was given."""
    kinds = {file.kind for file in files}
    found: list[InputFile] = []
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


def _named(main: InputFile, name: Path, kind: str, draft: Draft) -> list[InputFile]:
    """Return the file `name`, relative to here, to the file naming it or to a folder above."""
    folders = [Path(), main.path.parent, *main.path.absolute().parent.parents]
    places = [folder / name for folder in folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    try:
        content = _content(_text(path), str(path))
        if (found := _kind(content)) != kind:
            raise ConfigError("", [f"is not a {kind} file but {found}"])
    except ConfigError as error:
        for problem in error.problems:
            draft.problems.append(f"{path}, which {main.path} names: {problem}")
        return []
    return [InputFile(path, kind, content)]
