"""The record of a finished experiment in DVC: `publish`, the model if asked for, and then `dvc exp save`."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, PipelineError
from pipeline_lib.base.lock import locked
from pipeline_lib.base.redact import redact, shortened
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment
from pipeline_lib.publish.record import CURRENT, MODEL_NAME, RECORDING, model_pointer, publish, sealed_part

# What DVC says where the remedy is ours to name; of the rest its own words are shown.
TOLD = (
    (
        r"not inside of a DVC repository|Only supported for Git repositories",
        "this folder is no git repository with DVC in it; run `git init` and `dvc init` here and commit",
    ),
    (r"Empty git repo", "the git repository has no commit yet, and an experiment hangs on one; commit first"),
    (r"conflicts with existing experiment", "an experiment of this name is recorded; take another, or add --force"),
    (r"Invalid exp name", "git does not take this name; use letters, digits, '.', '_', '-' and '='"),
    (r"dvc\.yaml' (?:is invalid|validation failed)", "dvc.yaml does not read; `dvc exp show` says where"),
)


def record(
    name: str,
    experiment: Experiment,
    store: Store,
    say: Callable[[str], None],
    with_model: bool = False,
    force: bool = False,
) -> None:
    """Publish `experiment` and save the working tree as the DVC experiment `name`; its model too if asked for.

    One at a time in a working tree. What was saved is read again, and dropped if it is not what was published here:
    `dvc exp apply` and git write there too. Raises PipelineError saying what DVC refused, ConfigError for no
    name, IntegrityError if the experiment is not finished.
    """
    if not name:  # dvc would make one up
        raise ConfigError("record", ["the name is empty; give the experiment one"])
    with locked(RECORDING, say):
        published = publish(experiment, store)
        added = _add_model(experiment, store, say) if with_model else []
        published |= {path: path.read_text(encoding="utf-8") for path in added}
        include = [argument for path in published for argument in ("--include-untracked", str(path))]
        options = [f"--name={name}", "--json", *(["--force"] if force else []), *include]
        commit = _commit(_dvc("exp", "save", *options, what=f"record {name!r}"), name)
        if any(_git("show", f"{commit}:./{path.as_posix()}") != text for path, text in published.items()):
            for ref in _git("for-each-ref", "--format=%(refname)", "--points-at", commit, "refs/exps").split():
                _git("update-ref", "-d", ref, commit)
            raise PipelineError(
                f"record {name!r}: something else wrote to {CURRENT} meanwhile, so nothing was recorded; record again"
            )
    say(f"recorded experiment {experiment.name!r} as {name}; see `dvc exp show`")


def _commit(said: str, name: str) -> str:
    """The commit that `dvc exp save --json` names. Raises PipelineError."""
    try:
        return str(json.loads(said[said.index("{") :])["ref"])
    except (ValueError, KeyError) as error:
        raise PipelineError(
            f"record {name!r}: dvc does not say what it saved, but {shortened(said, 200)!r}; look at "
            "`dvc exp show`, and record again with --force"
        ) from error


def _git(*arguments: str) -> str:
    """What git says; empty if it refuses."""
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False).stdout


def _add_model(experiment: Experiment, store: Store, say: Callable[[str], None]) -> list[Path]:
    """Copy the sealed model into DVC's cache and out of it to results/current/model; the files for git."""
    sealed, model = sealed_part(experiment, store, "merge"), CURRENT / MODEL_NAME
    if model.exists():
        raise PipelineError(f"{model}: this is no model that `record` put there; move it away and record again")
    say(f"adding {sealed} to DVC's cache as {model}")
    _dvc("add", "--out", str(model), str(sealed.resolve()), what=f"add the model {sealed}")
    return [path for path in (model_pointer(CURRENT), CURRENT / ".gitignore") if path.exists()]


def _dvc(*arguments: str, what: str) -> str:
    """Run dvc; what it said. Raises PipelineError with the remedy."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    for pattern, told in TOLD:
        if re.search(pattern, done.stderr):
            raise PipelineError(f"cannot {what}: {told}")
    said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    raise PipelineError(f"cannot {what}: dvc says: {redact(' '.join(said) or done.stderr.strip())}")
