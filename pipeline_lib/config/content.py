"""Hash local files and folders that a config names: specs depend on content and not on names.

A hash is cached with the path, size, inode and times of its file, so that a large file is read
once.
"""

import glob
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.deepspeed_json import content_of
from pipeline_lib.config.questions import QUESTIONS_NAME, read_questions
from pipeline_lib.config.schema import (
    Config,
    ExperimentModel,
    FileData,
    HubRepository,
    LocalAdapter,
    LocalModel,
    ModelSource,
    TinyModel,
)
from pipeline_lib.core.errors import ConfigError, DataError, DiskFull
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.store import (
    HASHED_AT_ONCE,
    MANIFEST_NAME,
    NOTHING_VERIFIED,
    Manifest,
    VerifiedFiles,
)

# Files used from a model folder: only data that affects the model's output. Code, pickles and notes
# are ignored.
WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json")
DATA_SUFFIXES = (
    ".json",
    ".jsonl",
    ".csv",
    ".json.gz",
    ".jsonl.gz",
    ".csv.gz",
    ".parquet",
    ".arrow",
)
MAIN_SPLIT = "train"
MOST_FOLDERS = 20_000  # that one pattern searches
HASHES_NAME = "hashes.json"  # of a HashCache
GENERATION_NAME = "generation_config.json"
# What serving a model of pictures, video and text needs beside; training does not read them.
MEDIA_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# of adapters, as peft saves them, and the folder that stages keep them in
ADAPTER_FOLDER = "adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")  # of a model; they decide no answer
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    GENERATION_NAME,
)
TEMPLATES_FOLDER = "additional_chat_templates"  # of named templates, such as tool_use.jinja
TEMPLATES_SUFFIX = ".jinja"

# Identifies content that is made from the running Python's documentation.
RUNNING_PYTHON = {"python": platform.python_version(), "platform": sys.platform}


@dataclass
class HashCache:
    """A cache of files' SHA-256, stored as JSON at `path`, which only this user can write.

    Without a path it is not saved. Another user's file could say that one file has the content of
    another. A file that is read is marked in `verified`, so that no stage on this machine reads it
    again for its hash.
    """

    path: Path | None
    verified: VerifiedFiles = NOTHING_VERIFIED
    entries: dict[str, list[Any]] = field(default_factory=dict)
    changed: bool = False

    @staticmethod
    def load(path: Path | None, verified: VerifiedFiles = NOTHING_VERIFIED) -> "HashCache":
        """Return the cache stored at `path`; an empty one if the file is missing or damaged."""
        entries = None
        if path is not None:
            with suppress(OSError, ValueError):
                entries = read_json(path)
        return HashCache(path, verified, entries if isinstance(entries, dict) else {})

    def sha256(self, file: Path) -> str:
        """Return the SHA-256 of `file`, from the cache if its size, inode and times are unchanged.

        Raises ConfigError if the file cannot be read.
        """
        try:
            key = str(file.resolve())
            stamp = _stamp(file)
            remembered = self.entries.get(key)
            if (
                isinstance(remembered, list)
                and len(remembered) == len(stamp) + 1
                and remembered[:-1] == stamp
            ):
                return str(remembered[-1])
            digest = self.verified.sha256(file, beside=Path(key).parent)
        except OSError as error:
            raise ConfigError(str(file), [f"cannot be read: {error.strerror}"]) from error
        self.entries[key] = [*stamp, digest]
        self.changed = True
        return digest

    def of_all(self, files: Sequence[Path]) -> list[str]:
        """Return the SHA-256 of each of `files`, several at a time: hashlib releases the GIL.

        Raises as `sha256`.
        """
        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            return list(pool.map(self.sha256, files))

    def remember(self, file: Path, sha256: str) -> None:
        """Remember that the hash of `file`, as its status is now, is `sha256`, if that is so.

        Raises OSError.
        """
        key = str(file.resolve())
        stamp = _stamp(file)
        if self.verified.has_sha256(file, sha256, beside=Path(key).parent):
            self.entries[key] = [*stamp, sha256]
            self.changed = True

    def forget(self, file: Path) -> None:
        """Forget the hash of `file`, so that it is computed again."""
        if self.entries.pop(str(file.resolve()), None) is not None:
            self.changed = True

    def save(self) -> None:
        """Write new entries to `path`. A failed write is ignored: it only costs hashing again."""
        if self.changed and self.path is not None:
            with suppress(OSError, DiskFull):
                write_json(self.path, self.entries)


def _stamp(file: Path) -> list[int]:
    """Return what changes whenever the content of `file` does. Raises OSError."""
    status = file.stat()
    # The ctime reveals a change even if a tool resets the mtime (`rsync --inplace --times`).
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


@dataclass(frozen=True)
class Content:
    """Hashes by file name: of the model folder or tokenizer, and of each data source.

    Content made from the running Python is identified by the Python version and platform. A hub
    repository has no hashes: its commit identifies its content. `measured` is the content of the
    cluster.json that the config names, and `deepspeed_json` that of its DeepSpeed config, as JSON.
    `generation` has the hash of a local model's generation_config.json, which does not affect
    training. `questions` has those of each benchmark's file. `parent` is the content of the
    experiment whose model is trained on, and `adapter` has the hashes of adapters in a local folder.
    """

    model: dict[str, str]
    data: tuple[dict[str, str], ...]
    measured: dict[str, Any] | None = None
    deepspeed_json: str | None = None
    generation: dict[str, str] = field(default_factory=dict)
    questions: tuple[dict[str, str], ...] = ()
    parent: "Content | None" = None
    adapter: dict[str, str] = field(default_factory=dict)


def read_content(config: Config, config_path: Path, cache: HashCache | None) -> Content:
    """Find and hash every local file that `config` names. Raises ConfigError with every problem.

    Without `cache`, nothing is hashed: the hashes of files are empty strings, and the experiment
    that the config goes on from is left out.
    """
    problems: list[str] = []
    model: dict[str, str] = {}
    with _unreadable_noted(model_key(config.model), problems):
        model = _model_content(config.model, cache, problems)
    adapter: dict[str, str] = {}
    if isinstance(config.starting_adapter, LocalAdapter):
        with _unreadable_noted("model.adapter.path", problems):
            adapter = _adapter_content(config.starting_adapter, cache, problems)
    data = []
    for number, source in enumerate(config.data.sources):
        key = f"{config.data.key_of(number)}.path"
        with _unreadable_noted(key, problems):
            if isinstance(source, FileData):
                data.append(_file_content(source, key, cache, problems))
            else:
                data.append({} if isinstance(source, HubRepository) else dict(RUNNING_PYTHON))
    measured = None
    try:
        measured = measured_content(config)
    except ConfigError as error:
        problems += error.problems
    deepspeed_json = None
    if config.train.deepspeed_json is not None:
        try:
            deepspeed_json = content_of(config.train.deepspeed_json)
        except ConfigError as error:
            problems += [
                f"train.deepspeed_json: {error.source}: {problem}" for problem in error.problems
            ]
    questions = tuple(
        _question_content(benchmark, f"evaluate.benchmarks[{number}].path", cache, problems)
        for number, benchmark in enumerate(config.evaluate.benchmarks)
    )
    if problems:
        raise ConfigError(str(config_path), problems)
    if cache is not None:
        cache.save()
    generation = {}
    if isinstance(config.model, LocalModel) and GENERATION_NAME in model:
        generation[GENERATION_NAME] = model.pop(GENERATION_NAME)
    parent = None
    if config.parent is not None and cache is not None:
        parent = read_content(config.parent, config_path, cache)
    return Content(
        model, tuple(data), measured, deepspeed_json, generation, questions, parent, adapter
    )


@contextmanager
def _unreadable_noted(key: str, problems: list[str]) -> Iterator[None]:
    """Append an OSError of the block to `problems`, under `key`."""
    try:
        yield
    except OSError as error:
        problems.append(f"{key}: {str(error.filename)!r} cannot be read ({error.strerror})")


def measured_content(config: Config) -> dict[str, Any] | None:
    """Return the content of the config's cluster.json; None if it names none.

    Raises ConfigError if it cannot be read. The content can be written as JSON again, as a spec is.
    Its meaning is not checked.
    """
    path = config.cluster.measured
    if path is None:
        return None
    try:
        content = dict(read_json(Path(path)))
        wrong = next(not_json(content), None)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        text = (
            f"cluster.measured: {path!r} does not read ({error}); `qwen3 "
            "calibrate CONFIG` writes it"
        )
        raise ConfigError("the config", [text]) from error
    if wrong is not None:
        text = f"cluster.measured: {path!r}: {wrong}; make it again with `qwen3 calibrate CONFIG`"
        raise ConfigError("the config", [text])
    return content


def model_key(model: ModelSource) -> str:
    """Return the config key that identifies the model, under which its problems are reported."""
    if isinstance(model, TinyModel):
        return "model.tokenizer"
    return "model.path" if isinstance(model, LocalModel) else "model.name"


def model_files(folder: Path) -> list[Path]:
    """Return a model folder's files that are used, sorted: those with known names or suffixes."""
    found = [*folder.iterdir(), *_templates(folder)]
    return sorted(path for path in found if is_model_file(name_in(folder, path)) and path.is_file())


def name_in(folder: Path, file: Path) -> str:
    """Return the name of `file` as the files of the model in `folder` are named."""
    return file.relative_to(folder).as_posix()


def tokenizer_files(folder: Path) -> list[str]:
    """Return the names of files in `folder` that decide a model's tokens, and generation config."""
    named = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return named + [name_in(folder, path) for path in _templates(folder)]


def _templates(folder: Path) -> list[Path]:
    return sorted(
        path for path in (folder / TEMPLATES_FOLDER).glob(f"*{TEMPLATES_SUFFIX}") if path.is_file()
    )


def data_files(pattern: str, split: str | None = None) -> list[Path]:
    """Return the files that a path or glob matches, sorted; of a `datasets` folder, `split`'s.

    A `datasets` folder is one that this library saved. Raises DataError if such a folder is not
    whole or has no such split, or if there are no splits to choose from.
    """
    folder = Path(pattern)
    splits_path = folder / "dataset_dict.json"
    if folder.is_dir() and splits_path.is_file():
        splits = _saved(splits_path, "splits")
        if (split or MAIN_SPLIT) not in splits:
            raise DataError(
                f"{pattern!r} has no split {split or MAIN_SPLIT!r}; give `split` one of "
                f"{_listed(splits)}"
            )
        folder /= split or MAIN_SPLIT
    elif split is not None:
        raise DataError(
            f"{pattern!r} is not a folder with several splits (`DatasetDict.save_to_disk`); remove "
            "`split`"
        )
    if folder.is_dir() and (folder / "state.json").is_file():
        return _saved_files(folder)
    if folder.is_file():  # a file name may contain glob characters
        return [folder]
    _refuse_endless(pattern)
    return sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())  # noqa: PTH207


def _refuse_endless(pattern: str) -> None:
    """Raise DataError for a `**` pattern that leads through very many folders, as of a disk."""
    above, recursive, _ = pattern.partition("**")
    if not recursive:
        return
    for root in glob.iglob(above or "."):  # noqa: PTH207
        walked = os.walk(root, followlinks=True)  # as `**` follows links
        if any(number == MOST_FOLDERS for number, _ in enumerate(walked)):
            raise DataError(
                f"{pattern!r} leads through more than {MOST_FOLDERS:,} folders; write the folder "
                "that holds the files"
            )


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a saved data set.

    There may be others beside them: caches, and leftovers of older saves.
    """
    state = folder / "state.json"
    if _saved(state, "_indices_data_files"):
        raise DataError(
            f"{str(state)!r}: an old version of `datasets` saved a selection of the rows beside "
            "them (_indices_data_files), which is not read; load it there, and save "
            "dataset.flatten_indices()"
        )
    files = [folder / name for name in _saved(state, "_data_files")]
    if not files:
        raise DataError(f"{str(folder)!r} is a data set without rows; save it again with some")
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"{str(state)!r} lists {_listed(missing)}, which is not there; save or copy the data "
            "set again"
        )
    return files


def _saved(path: Path, key: str) -> list[str]:
    """Return the names that a file of `datasets` lists under `key`.

    Raises DataError if they are no names of files.
    """
    try:
        entries = dict(read_json(path)).get(key) or []
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} does not read ({error}); save or copy the data set again"
        ) from error
    if strange := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise DataError(
            f"{str(path)!r} lists {strange[0]!r:.100}, which is not a file name in that folder; "
            "save it again"
        )
    return names


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:10])
    if len(names) > 10:
        listed += f" and {len(names) - 10} more"
    return listed


def is_model_file(name: str) -> bool:
    """Return whether a file with this name in a model's folder or repository is used."""
    folder, _, last = name.rpartition("/")
    if folder:
        return folder == TEMPLATES_FOLDER and last.endswith(TEMPLATES_SUFFIX)
    return name.endswith(WEIGHTS_SUFFIXES) or name in (
        "config.json",
        *TOKENIZER_FILES,
        *MEDIA_FILES,
    )


def missing_model_files(names: Iterable[str]) -> list[str]:
    """Return the required files that a model with files of these `names` lacks."""
    there = set(names)
    missing = [name for name in ("config.json", "tokenizer.json") if name not in there]
    if not any(name.endswith(".safetensors") for name in there):
        missing.append("*.safetensors (other weight formats are not read: they can carry code)")
    return missing


def is_data_file(name: str) -> bool:
    """Return whether rows are read from a file with this name, by its suffix."""
    return name.lower().endswith(DATA_SUFFIXES)


def not_json(value: Any, key: str = "") -> Iterator[str]:
    """Yield a problem with its key for values that JSON forbids: NaN, infinity, lone surrogate."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: {value} is no finite number"
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        yield f"{key}: {ascii(value)} holds half of a surrogate pair"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from not_json(name, f"the key {ascii(name)}")
            yield from not_json(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from not_json(inner, f"{key}[{index}]")


def _model_content(
    model: ModelSource, cache: HashCache | None, problems: list[str]
) -> dict[str, str]:
    if isinstance(model, HubRepository | ExperimentModel):
        return {}
    if isinstance(model, TinyModel):
        if model.tokenizer is None:
            return dict(RUNNING_PYTHON)
        folder = Path(model.tokenizer)
        if not (folder / "tokenizer.json").is_file():
            problems.append(f"model.tokenizer: {str(folder)!r} holds no tokenizer.json")
            return {}
        return _hashes({name: folder / name for name in tokenizer_files(folder)}, cache)
    folder = Path(model.path)
    if not folder.is_dir():
        problems.append(
            f"model.path: {str(folder)!r} is not a folder here ({Path.cwd()}){_hint(model.path)}"
        )
        return {}
    files = model_files(folder)
    if missing := missing_model_files(file.name for file in files):
        problems.append(f"model.path: {str(folder)!r} {_not_a_model(folder, missing)}")
        return {}
    hashes = _hashes({name_in(folder, file): file for file in files}, cache)
    if cache is not None:
        problems += _not_as_sealed(folder, hashes)
    return hashes


def _adapter_content(
    adapter: LocalAdapter, cache: HashCache | None, problems: list[str]
) -> dict[str, str]:
    folder = Path(adapter.path)
    missing = [name for name in PEFT_FILES if not (folder / name).is_file()]
    if missing:
        here = "" if folder.is_dir() else f", which is no folder here ({Path.cwd()})"
        lacking = f"no {' and no '.join(missing)} in {str(folder)!r}{here}"
        problems.append(f"model.adapter.path: {lacking}; name the folder that peft saved")
        return {}
    return _hashes({f"{ADAPTER_FOLDER}/{name}": folder / name for name in PEFT_FILES}, cache)


def _not_a_model(folder: Path, missing: Sequence[str]) -> str:
    """Return what the model folder `folder`, which lacks the files `missing`, is or lacks."""
    if (folder / "adapter_config.json").is_file():
        return (
            "is an adapter and no whole model: give the model that it was trained on, and this "
            "folder as its `adapter`, or merge it into that one first (peft: merge_and_unload)"
        )
    return f"has no {', '.join(missing)}"


def _not_as_sealed(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Return how a model folder differs from its manifest, as after a damaged or unverified copy.

    A manifest that this pipeline did not write is ignored.
    """
    path = folder / MANIFEST_NAME
    mend = (
        f"get {str(folder)!r} again, or delete its {MANIFEST_NAME} if you changed the model "
        "yourself"
    )
    try:
        content = read_json(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        return [
            f"model.path: {str(path)!r} cannot be read ({error}), so the model cannot be verified; "
            f"{mend}"
        ]
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError:
        is_ours = isinstance(content, dict) and {"stage", "digest", "files"} <= content.keys()
        if not is_ours:
            return []
        return [f"model.path: {str(path)!r} is damaged, so the model cannot be verified; {mend}"]
    sealed = {name: entry.sha256 for name, entry in manifest.files.items() if is_model_file(name)}
    return [
        f"model.path: {str(folder / name)!r} does not match {MANIFEST_NAME}; {mend}"
        for name in sorted(sealed.keys() | hashes.keys())
        if sealed.get(name) != hashes.get(name)
    ]


def _hint(path: str) -> str:
    """Return what the writer of a path that is not there may not know."""
    encoding = sys.getfilesystemencoding()
    if "$" in path:
        return "; variables are not replaced here: write the path out, or begin it with ~"
    if not path.isascii() and encoding != "utf-8":
        return (
            f"; by the locale, this process takes file names for {encoding}: `export "
            "PYTHONUTF8=1` makes it UTF-8"
        )
    return ""


def _file_content(
    source: FileData, key: str, cache: HashCache | None, problems: list[str]
) -> dict[str, str]:
    try:
        files = data_files(source.path, source.split)
    except DataError as error:
        problems.append(f"{key}: {error}")
        return {}
    if not files and Path(source.path).exists():
        problems.append(
            f"{key}: {source.path!r} is neither a file nor a folder saved by `datasets`; name the "
            "files in it, as in 'folder/*.jsonl'"
        )
    elif not files:
        problems.append(
            f"{key}: no file matches {source.path!r} here ({Path.cwd()}){_hint(source.path)}"
        )
    for file in files:
        if not is_data_file(file.name):
            problems.append(f"{key}: {str(file)!r} is none of {', '.join(DATA_SUFFIXES)}")
        elif file.name == MANIFEST_NAME or not file.name.isprintable():
            problems.append(f"{key}: {file.name!r} cannot be the name of a data file; rename it")
    names = [file.name for file in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{key}: {source.path!r} matches several files called {name!r}; rename one")
    return _hashes({file.name: file for file in files}, cache)


def _question_content(
    benchmark: Benchmark, key: str, cache: HashCache | None, problems: list[str]
) -> dict[str, str]:
    """Return the hash of a benchmark's file, whose questions have to be such of its `score`."""
    path = Path(benchmark.path)
    if not path.is_file():
        problems.append(f"{key}: {str(path)!r} is no file here ({Path.cwd()}){_hint(str(path))}")
        return {}
    try:
        read_questions(path, benchmark)
    except DataError as error:
        problems.append(f"{key}: {error}")
        return {}
    return _hashes({QUESTIONS_NAME: path}, cache)


def _hashes(files: Mapping[str, Path], cache: HashCache | None) -> dict[str, str]:
    if cache is None:
        return dict.fromkeys(files, "")
    return dict(zip(files, cache.of_all(list(files.values())), strict=True))
