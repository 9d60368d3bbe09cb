"""What `dvc exp run -S FILE:KEY=VALUE` changed: refused where it is not in the config that the run reads."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from pipeline_lib.config.dag import DEFAULT_CONFIG
from pipeline_lib.core.errors import ConfigError

_SET_PARAM = re.compile(r"(?:-S|--set-param)=?(?P<text>.*)", re.DOTALL)
_EXPERIMENT = re.compile(r"^experiment\s*:", re.MULTILINE)


def refuse_overrides() -> None:
    """Raise ConfigError if the `dvc exp run` that this process belongs to changes a file that its run does not read."""
    named = [(file, rest) for file, rest in _on_command_lines() if Path(file) != DEFAULT_CONFIG]
    named = named or [(file, "KEY=VALUE") for file in _changed_in_a_copy()]
    if named:
        raise ConfigError("dvc exp run", [_problem(file, rest) for file, rest in named])


def _problem(file: str, rest: str) -> str:
    problem = (
        f"{file or 'params.yaml'} is changed, which this run does not read: it runs {DEFAULT_CONFIG}; "
        f"type -S '{DEFAULT_CONFIG}:{rest}'"
    )
    if not file or Path(file).parts[0] == "results":
        return problem
    return f"{problem}, or edit {file}, run `snakemake --configfile {file}`, and then `record NAME {file}`"


def _on_command_lines() -> Iterator[tuple[str, str]]:
    """Yield FILE and KEY=VALUE of each `-S` of the `dvc exp run` among the processes that started this one."""
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "exp" in words and "run" in words:
            yield from overrides_in(words)


def overrides_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield FILE and KEY=VALUE of each `-S FILE:KEY=VALUE` in a command line; FILE is empty if there is none."""
    following = iter(words)
    for word in following:
        if (match := _SET_PARAM.fullmatch(word)) is None:
            continue
        text = match["text"] or next(following, "")
        key, _, _ = text.partition("=")
        file, colon, _ = key.rpartition(":")
        yield file, text.removeprefix(file + colon)


def _changed_in_a_copy() -> list[str]:
    """Return the other configs that differ from the commit, in the copy where a worker of DVC's queue runs.

    The worker's command line has no `-S`, and a copy has no edits but those that were queued.
    """
    if not is_copy(Path.cwd()):
        return []
    command = ["git", "diff", "--name-only", "--relative", "HEAD", "--", "*.yaml", "*.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    changed = done.stdout.splitlines()
    if str(DEFAULT_CONFIG) in changed:
        return []
    return [name for name in changed if Path(name).parts[0] != "results" and _is_config(Path(name))]


def is_copy(folder: Path) -> bool:
    """Return whether `folder` is in a copy of the working tree that DVC made: below `.dvc/tmp/exps`."""
    return any(parent.parts[-3:] == (".dvc", "tmp", "exps") for parent in folder.parents)


def _is_config(path: Path) -> bool:
    try:
        return _EXPERIMENT.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False
