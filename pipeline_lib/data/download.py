"""The download stage: bring a model or a source into the store, as the config was compiled.

Each source is a function that fills the directory of a job; `SOURCES` lists them.
"""

import fnmatch
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline_lib.arch.generation_config import take_generation_config
from pipeline_lib.arch.not_finite import refuse_not_finite
from pipeline_lib.arch.peft_adapter import refuse_unusable_adapters
from pipeline_lib.config.content import (
    ADAPTER_FOLDER,
    DATA_SUFFIXES,
    GENERATION_NAME,
    HASHES_NAME,
    LICENCE_FILES,
    PEFT_FILES,
    RUNNING_PYTHON,
    HashCache,
    data_files,
    is_data_file,
    is_model_file,
    missing_model_files,
    model_files,
    name_in,
    tokenizer_files,
)
from pipeline_lib.config.questions import QUESTIONS_NAME
from pipeline_lib.config.schema import HubAdapter, HubData, HubModel, PydocData, TinyModel
from pipeline_lib.config.section import read_settings
from pipeline_lib.core import arrival
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import list_files, require_space, sha256_text
from pipeline_lib.core.lock import locked
from pipeline_lib.core.stage import Job
from pipeline_lib.core.store import HASHED_AT_ONCE, VerifiedFiles
from pipeline_lib.core.text import Progress
from pipeline_lib.core.units import count
from pipeline_lib.data.agreement import refuse_differences
from pipeline_lib.data.demo import write_rows
from pipeline_lib.data.model_folder import problems_of
from pipeline_lib.data.tiny_model import build_tiny
from pipeline_lib.hub.names import some_of
from pipeline_lib.hub.repository import Repository, is_commit
from pipeline_lib.hub.snapshot import WEIGHTS_SUFFIX, Snapshot, is_edited_by_nobody
from pipeline_lib.hub.splits import files_of_split, is_aside

_IN_STORE = tuple(f"{ADAPTER_FOLDER}/{name}" for name in PEFT_FILES)
Source = Callable[[Job], None]
Bring = Callable[[Path, Path, str, VerifiedFiles], bool]  # of arrival


def run(job: Job) -> dict[str, Any]:
    """Fill `job.out` from the source in the spec, and return the number of files and bytes.

    With them is the name of the experiment that trained a model, as its config has it.

    Raises DataError if the source differs from what was hashed when the config was compiled, or is
    unusable.
    """
    kind = job.spec.settings["kind"]
    source = job.spec.settings["source"]
    SOURCES[kind, source](job)
    if kind in ("model", "generation") and source not in ("tiny", "experiment"):
        origin = job.spec.where.get("path", f"{source} model {job.spec.settings.get('name')}")
        _check_generation(job, origin)
        if kind == "model":
            _refuse_unusable_model(job.out, origin, Path(job.spec.where.get("path", job.out)))
    if kind == "adapter":
        refuse_unusable_adapters(job.out / ADAPTER_FOLDER, job.spec.settings.get("base"))
    names = list_files(job.out)
    # a file that is linked elsewhere may have been edited there
    for name in job.hashes.keys() & set(names):
        if not job.store.verified.has_sha256(job.out / name, job.hashes[name], beside=job.out):
            raise DataError(f"{source} {kind}: {name} changed while it was taken; run again")
    size_bytes = sum((job.out / name).stat().st_size for name in names)
    job.say(
        f"download: {kind} from {source}: {count(len(names), 'files')}, {size_bytes / 1e6:.1f} MB"
    )
    counts: dict[str, Any] = {"files": len(names), "bytes": size_bytes}
    if "experiment" in job.spec.where:
        counts["experiment"] = job.spec.where["experiment"]
    return counts


def local_model(job: Job) -> None:
    """Take the files of a Hugging Face model folder here, without its generation_config.json.

    Its licence comes too, where it has one. That decides no answer, and is in no digest.
    """
    folder = Path(job.spec.where["path"])
    files = model_files(folder) if folder.is_dir() else []
    named = {name_in(folder, file): file for file in files if file.name != GENERATION_NAME}

    def bring(source: Path, target: Path, sha256: str, verified: VerifiedFiles) -> bool:
        """Link weights, as edits in place would change the sealed file too; copy other files.

        Nobody edits weights in place.
        """
        may_link = source.suffix == WEIGHTS_SUFFIX and is_edited_by_nobody(source, job.store.root)
        if may_link:
            return arrival.link(source, target, sha256, verified)
        return arrival.copy(source, target, sha256, verified)

    _take(named, job, bring)
    for name in LICENCE_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, job.out / name)


def experiment_model(job: Job) -> None:
    """Link the files of the model that another experiment has merged."""
    _link_merged(job, lambda name: is_model_file(name) or name in LICENCE_FILES)


def experiment_adapter(job: Job) -> None:
    """Link the files of the adapters that another experiment has trained, in their folder."""
    _link_merged(job, lambda name: name in _IN_STORE)


def _link_merged(job: Job, is_wanted: Callable[[str], bool]) -> None:
    """Link files of the merge of another experiment, by the hashes of its seal.

    Raises IntegrityError if one is not as it was sealed.
    """
    merged = job.inputs["merge"]
    for name, entry in merged.manifest.files.items():
        if not is_wanted(name):
            continue
        (job.out / name).parent.mkdir(exist_ok=True)
        is_same = arrival.link(merged.path / name, job.out / name, entry.sha256, job.store.verified)
        if not is_same:
            raise IntegrityError(
                f"{merged.path / name}: content differs from what was sealed; delete "
                f"{merged.path} and run snakemake again"
            )
        job.hashes[name] = entry.sha256


def local_adapter(job: Job) -> None:
    """Copy the adapters in a folder on this machine."""
    folder = Path(job.spec.where["path"])
    _take({f"{ADAPTER_FOLDER}/{name}": folder / name for name in PEFT_FILES}, job)


def hub_adapter(job: Job) -> None:
    """Fetch the adapters of a hub at their pinned commit."""
    source = read_settings(HubAdapter, _own_settings(job))
    repository = Repository(source.source, "model", source.name)
    with _snapshot(job, repository, source.revision) as snapshot:
        missing = [name for name in PEFT_FILES if name not in snapshot.files]
        if missing:
            raise DataError(
                f"{snapshot}: it has no {', '.join(missing)}, which peft saves; other formats of "
                "weights are not read: they can carry code"
            )
        _fetch(job, snapshot, PEFT_FILES)
    (job.out / ADAPTER_FOLDER).mkdir()
    for name in PEFT_FILES:
        (job.out / name).rename(job.out / ADAPTER_FOLDER / name)
        if name in job.hashes:
            job.hashes[f"{ADAPTER_FOLDER}/{name}"] = job.hashes.pop(name)


def local_generation(job: Job) -> None:
    """Copy the generation_config.json of a Hugging Face folder on this machine, if it has one."""
    file = Path(job.spec.where["path"]) / GENERATION_NAME
    files = {file.name: file} if file.is_file() else {}
    _take(files, job)


def tiny_model(job: Job) -> None:
    """Build a small Qwen3 with random weights, with the tokenizer at `where` or one made here."""
    settings = read_settings(TinyModel, _own_settings(job))
    tokenizer = job.spec.where.get("tokenizer")
    if tokenizer is None:
        _require_same_python(job)
    else:
        _take({name: Path(tokenizer) / name for name in tokenizer_files(Path(tokenizer))}, job)
    build_tiny(settings, job.out, job.say)


def local_files(job: Job) -> None:
    """Copy conversation files on this machine."""
    # Copied, not linked: people edit these files, and an edit through a hard link would change
    # sealed content.
    files = data_files(job.spec.where["path"], job.spec.where.get("split"))
    _take({file.name: file for file in files}, job)


def local_questions(job: Job) -> None:
    """Copy a benchmark's file of questions on this machine."""
    _take({QUESTIONS_NAME: Path(job.spec.where["path"])}, job)


def pydoc_rows(job: Job) -> None:
    """Write conversations generated from the documentation of the running Python."""
    settings = read_settings(PydocData, _own_settings(job))
    _require_same_python(job)
    rows = write_rows(job.out / "rows.jsonl", settings.max_rows)
    job.say(
        f"download: {count(rows, 'conversations')} from the documentation of Python "
        f"{RUNNING_PYTHON['python']}"
    )


def hub_model(job: Job) -> None:
    """Fetch a model of a hub at its pinned commit; only the files that decide its answers."""
    source = read_settings(HubModel, _own_settings(job))
    with _snapshot(
        job, Repository(source.source, "model", source.name), source.revision
    ) as snapshot:
        names = [name for name in snapshot.files if is_model_file(name) or name in LICENCE_FILES]
        if missing := missing_model_files(names):
            raise DataError(
                f"{snapshot}: it has no {', '.join(missing)}; another repository may have it "
                "converted"
            )
        _fetch(job, snapshot, names)


_EXPORTED = (
    "take rows that were exported. Hugging Face keeps those of many data sets as parquet: set "
    "revision: "
    "refs/convert/parquet and files: [SUBSET/SPLIT/*.parquet]. Or export them with the version of "
    "`datasets` that runs "
    "the script (dataset.save_to_disk), and name that folder as {source: file, path: ...}"
)


def hub_data(job: Job) -> None:
    """Fetch a hub's data set at its pinned commit: one split's files, or those of the globs."""
    source = read_settings(HubData, _own_settings(job))
    with _snapshot(
        job, Repository(source.source, "dataset", source.name), source.revision
    ) as snapshot:
        names = [name for name in snapshot.files if is_data_file(name) and not is_aside(name)]
        script = f"{source.name.rpartition('/')[2]}.py"
        if script in snapshot.files and not source.files:
            raise DataError(
                f"{snapshot}: a script makes its rows ({script}), and none is run here: {_EXPORTED}"
            )
        if not names:
            suffixes = sorted({Path(name).suffix for name in snapshot.files} - {""})
            raise DataError(
                f"{snapshot}: it has no file that rows are read from ({', '.join(DATA_SUFFIXES)}), "
                f"only {', '.join(suffixes) or 'none with a suffix'}; {_EXPORTED}"
            )
        if source.files:
            # `*` also matches `/`
            matched = {pattern: fnmatch.filter(names, pattern) for pattern in source.files}
            for pattern, files in matched.items():
                if not files:
                    raise DataError(
                        f"{snapshot}: no data file matches {pattern!r}; it has {some_of(names)}"
                    )
            chosen = sorted(set().union(*matched.values()))
        else:
            chosen = files_of_split(snapshot, names, source.subset, source.split)
        job.say(f"download: {snapshot}: {len(chosen)} of its {len(names)} data files are wanted")
        _fetch(job, snapshot, chosen)


SOURCES: Mapping[tuple[str, str], Source] = {
    ("model", "local"): local_model,
    ("model", "experiment"): experiment_model,
    ("adapter", "experiment"): experiment_adapter,
    ("adapter", "local"): local_adapter,
    ("adapter", "huggingface"): hub_adapter,
    ("adapter", "modelscope"): hub_adapter,
    ("generation", "local"): local_generation,
    ("model", "tiny"): tiny_model,
    ("model", "huggingface"): hub_model,
    ("model", "modelscope"): hub_model,
    ("data", "file"): local_files,
    ("data", "pydoc"): pydoc_rows,
    ("data", "huggingface"): hub_data,
    ("data", "modelscope"): hub_data,
    ("questions", "file"): local_questions,
}


@contextmanager
def _snapshot(job: Job, repository: Repository, commit: str | None) -> Iterator[Snapshot]:
    """Yield the repository at its commit, under a lock: one job at a time fetches from it.

    Fetched files are kept while other jobs may need them, and if a job failed.
    """
    if commit is None or not is_commit(commit):
        raise IntegrityError(
            f"{repository}: the spec names no commit but {commit!r}; run snakemake again"
        )
    digest = sha256_text(f"{repository} at {commit}")[: len(job.spec.digest)]
    folder = job.store.run_dir(digest)
    mine = folder / "jobs" / job.spec.digest
    mine.mkdir(parents=True, exist_ok=True)
    with locked(job.store.lock_path(digest), job.say):
        snapshot = Snapshot(repository, commit, folder / "arrived", job.say, job.store.verified)
        yield snapshot
        with suppress(FileNotFoundError):
            mine.rmdir()
        if not any(mine.parent.iterdir()):
            snapshot.close()


def _fetch(job: Job, snapshot: Snapshot, names: Sequence[str]) -> None:
    progress = Progress(job.say, f"download: {snapshot}", "MB")
    hashes = snapshot.fetch(
        names, job.out, lambda here, total: progress.update(here // 1_000_000, here / max(1, total))
    )
    job.hashes.update(hashes)


def _own_settings(job: Job) -> dict[str, Any]:
    return {
        key: value
        for key, value in job.spec.settings.items()
        if key not in ("kind", "content", "base")
    }


def _take(files: Mapping[str, Path], job: Job, bring: Bring = arrival.copy) -> None:
    """Bring files by name into the job's directory with `bring`; check names and hashes.

    The spec holds both. A file that is as it was hashed when the config was compiled is not read
    for its hash again.

    Raises DataError if they differ, DiskFull before anything is copied.
    """
    wanted: Mapping[str, str] = job.spec.settings["content"]
    place = next(iter(job.spec.where.values()))
    remedy = "run again to take it as it is now"
    if differing := sorted(files.keys() ^ wanted.keys()):
        raise DataError(
            f"{place}: changed since the config was read ({', '.join(differing)} came or went); "
            f"{remedy}"
        )
    total_bytes = sum(file.stat().st_size for file in files.values())
    require_space(job.out, total_bytes, f"a copy of {place}")
    progress = Progress(job.say, f"download: {place}", "MB")
    verified = job.store.verified
    hashes = HashCache.load(job.store.remembered(HASHES_NAME), verified)
    for name in files:
        (job.out / name).parent.mkdir(exist_ok=True)
    done_bytes = 0
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        brought = pool.map(
            lambda name: bring(files[name], job.out / name, wanted[name], verified), files
        )
        for (name, file), is_same in zip(files.items(), brought, strict=True):
            if not is_same:
                hashes.forget(file)
                hashes.save()
                raise DataError(f"{file}: changed since the config was read; {remedy}")
            # the link changed the ctime: else the next snakemake would hash it
            if (job.out / name).samefile(file):
                hashes.remember(file, wanted[name])
            job.hashes[name] = wanted[name]
            done_bytes += file.stat().st_size
            progress.update(done_bytes // 1_000_000, done_bytes / max(1, total_bytes))
    hashes.save()


def _check_generation(job: Job, origin: str) -> None:
    """Raise DataError for an unusable local generation_config.json; delete a hub's instead.

    The user cannot mend a hub's file.
    """
    try:
        take_generation_config(job.out)
    except DataError as error:
        text = str(error).replace(str(job.out), origin)
        if "path" in job.spec.where:
            raise DataError(
                f"{text}; mend that, or delete the file, and run snakemake again"
            ) from error
        (job.out / GENERATION_NAME).unlink()
        job.say(f"download: warning: {text}; it is left out, and nothing of it is published")


def _refuse_unusable_model(folder: Path, origin: str, taken_from: Path) -> None:
    try:
        if problems := problems_of(folder):
            raise DataError(
                "\n".join(
                    ["this model cannot be trained:", *(f"  - {problem}" for problem in problems)]
                )
            )
        refuse_differences(folder, taken_from)
        refuse_not_finite(folder)
    except DataError as error:
        raise DataError(str(error).replace(str(folder), origin)) from error


def _require_same_python(job: Job) -> None:
    compiled = job.spec.settings["content"]
    if compiled != RUNNING_PYTHON:
        raise DataError(
            f"the config was compiled under Python {compiled.get('python')}, and this is "
            f"{RUNNING_PYTHON['python']}; run both with the same Python"
        )
