"""What `dvc exp run -S FILE:KEY=VALUE` changed: refused if the run's config has no change."""

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from pipeline_lib.config.dag import DEFAULT_CONFIG
from pipeline_lib.core.errors import ConfigError

# `-fS` and `-qS` group it with options that take no value.
_SET_PARAM = re.compile(r"(?:-[fikpqsvPR]*S|--set-param)=?(?P<text>.*)", re.DOTALL)
_EXPERIMENT = re.compile(r"^experiment\s*:", re.MULTILINE)


def refuse_overrides(say: Callable[[str], None]) -> None:
    """Raise ConfigError if the `dvc exp run` of this process changes a file its run does not read.

    The command line of a worker of DVC's queue has no `-S`, so what differs from the commit in its
    copy counts. These may be edits that were not committed when the run was queued: if the config
    that the run reads is changed too, a warning says so.
    """
    named = list(_on_command_lines())
    changed = [] if named else _changed_in_a_copy()
    others = [(file, rest) for file, rest in named if Path(file) != DEFAULT_CONFIG]
    others += [
        (name, "KEY=VALUE")
        for name in changed
        if Path(name) != DEFAULT_CONFIG and _is_config(Path(name))
    ]
    problems = [_problem(file, rest) for file, rest in others]
    if str(DEFAULT_CONFIG) in changed:
        for problem in problems:
            say(f"warning: dvc exp run: {problem}")
    elif problems:
        raise ConfigError("dvc exp run", problems)


def _problem(file: str, rest: str) -> str:
    problem = (
        f"{file or 'params.yaml'} is changed, which this run does not read: it runs "
        f"{DEFAULT_CONFIG}; type -S '{DEFAULT_CONFIG}:{rest}'"
    )
    if not file or Path(file).parts[0] == "results":
        return problem
    return (
        f"{problem}, or edit {file}, run `snakemake --configfile {file}`, and then `record NAME "
        f"{file}`"
    )


def _on_command_lines() -> Iterator[tuple[str, str]]:
    """Yield FILE and KEY=VALUE of each `-S` of the `dvc exp run` that started this process."""
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "exp" in words and "run" in words:
            yield from overrides_in(words)


def overrides_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield FILE and KEY=VALUE of each `-S FILE:KEY=VALUE` in a command line; FILE may be empty."""
    following = iter(words)
    for word in following:
        if (match := _SET_PARAM.fullmatch(word)) is None:
            continue
        text = match["text"] or next(following, "")
        key, _, _ = text.partition("=")
        file, colon, _ = key.rpartition(":")
        yield file, text.removeprefix(file + colon)


def _changed_in_a_copy() -> list[str]:
    """Return the YAML files in DVC's copy that differ from the commit, except for results."""
    if not is_copy(Path.cwd()):
        return []
    command = ["git", "diff", "--name-only", "--relative", "HEAD", "--", "*.yaml", "*.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [name for name in done.stdout.splitlines() if Path(name).parts[0] != "results"]


def is_copy(folder: Path) -> bool:
    """Return whether `folder` is in a copy of the working tree by DVC: below `.dvc/tmp/exps`."""
    return any(parent.parts[-3:] == (".dvc", "tmp", "exps") for parent in folder.parents)


def _is_config(path: Path) -> bool:
    try:
        return _EXPERIMENT.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False
