"""Record a finished experiment in DVC: `publish`, optionally the model, then `dvc exp save`."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import DEFAULT_CONFIG
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import redact, shortened
from pipeline_lib.report.publish import (
    CURRENT,
    MODEL_NAME,
    RECORDING,
    in_one_file,
    model_pointer,
    publish,
    sealed_part,
    yaml_of,
)

# Patterns of DVC's errors with our remedies; other errors are shown in DVC's own words.
REMEDIES = (
    (
        r"not inside of a DVC repository|Only supported for Git repositories",
        "this folder is no git repository with DVC in it; run `git init` and `dvc init` here and "
        "commit",
    ),
    (
        r"Empty git repo",
        "the git repository has no commit yet, and an experiment hangs on one; commit first",
    ),
    (
        r"conflicts with existing experiment",
        "an experiment of this name is recorded; take another, or add --force",
    ),
    (
        r"Invalid exp name",
        "git does not take this name; use letters, digits, '.', '_', '-' and '='",
    ),
    (
        r"dvc\.yaml' (?:is invalid|validation failed)",
        "dvc.yaml does not read; `dvc exp show` says where",
    ),
)


def record(
    name: str,
    experiment: Experiment,
    store: Store,
    say: Callable[[str], None],
    with_model: bool = False,
    force: bool = False,
    is_of_default_config: bool = False,
) -> None:
    """Publish `experiment` and save the tree as the DVC experiment `name`, maybe with the model.

    DVC takes the parameters from DEFAULT_CONFIG. Unless it `is_of_default_config`, the experiment's
    config is saved in its place, so that DVC's parameters are those of the run and `dvc exp apply`
    brings them back.

    A lock allows one record at a time in a working tree. `dvc exp apply` and git write there too,
    so the saved files are read back, and the DVC experiment is dropped if they differ from what was
    published. Raise PipelineError with DVC's reason, ConfigError for a name that is empty or that
    of a file, IntegrityError if the experiment is not finished.
    """
    if not name:  # dvc would generate one
        raise ConfigError("record", ["the name is empty; give the experiment one"])
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        raise ConfigError(
            "record", [f"{name!r} is a file, and no name; type `record NAME {shlex.quote(name)}`"]
        )
    config_text = None if is_of_default_config else _as_config(experiment)
    with locked(RECORDING, say):
        published = publish(experiment, store)
        added = _add_model(experiment, store, say) if with_model else []
        published |= {path: path.read_text(encoding="utf-8") for path in added}
        options = [f"--name={name}", "--json"]
        if force:
            options.append("--force")
        for path in published:
            options += ["--include-untracked", str(path)]
        output = _dvc("exp", "save", *options, what=f"record {name!r}")
        try:
            commit = str(json.loads(output[output.index("{") :])["ref"])
        except (ValueError, KeyError) as error:
            raise PipelineError(
                f"record {name!r}: dvc does not say what it saved, but {shortened(output, 200)!r}; "
                "look at `dvc exp show`, and record again with --force"
            ) from error
        refs = _git(
            "for-each-ref", "--format=%(refname)", "--points-at", commit, "refs/exps"
        ).split()
        if config_text is not None:
            published[DEFAULT_CONFIG] = config_text
            saved = commit
            commit = _with_config(commit, config_text)
            for ref in refs:
                _git("update-ref", ref, commit, saved)
        saved_texts = {path: _git("show", f"{commit}:./{path.as_posix()}") for path in published}
        if saved_texts != published:
            for ref in refs:
                _git("update-ref", "-d", ref)
            raise PipelineError(
                f"record {name!r}: something else wrote to {CURRENT} meanwhile, so nothing was "
                "recorded; record again"
            )
    say(f"recorded experiment {experiment.name!r} as {name}; see `dvc exp show`")
    if with_model and not _has_remote():
        say(
            "warning: DVC has no remote, and `dvc exp push` looks for it in what was recorded: it "
            "would send no model; type `dvc remote add --default NAME FOLDER-OR-URL`, then record "
            f"{name} again with --force"
        )


def _as_config(experiment: Experiment) -> str:
    """Return the experiment's config as a file with the set keys, by their names in a file."""
    keys = in_one_file(
        experiment.config, lambda config: config.model_dump(mode="json", exclude_unset=True)
    )
    return f"# Experiment {experiment.name}, recorded from another config.\n{yaml_of(keys)}"


def _with_config(commit: str, text: str) -> str:
    """Return a commit like `commit` with `text` as DEFAULT_CONFIG; empty if git fails.

    The file in the working tree is left alone: another run may be reading it.
    """
    author, email, message = _git("log", "-1", "--format=%an%n%ae%n%B", commit).split("\n", 2)
    people = {"GIT_AUTHOR_NAME": author, "GIT_AUTHOR_EMAIL": email}
    people |= {"GIT_COMMITTER_NAME": author, "GIT_COMMITTER_EMAIL": email}
    place = f"{_git('rev-parse', '--show-prefix').strip()}{DEFAULT_CONFIG.as_posix()}"
    with TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git("read-tree", commit, **index)
        blob = _git("hash-object", "-w", "--stdin", text=text).strip()
        _git("update-index", "--add", "--cacheinfo", f"100644,{blob},{place}", **index)
        tree = _git("write-tree", **index).strip()
    return _git("commit-tree", tree, "-p", f"{commit}^", "-m", message.strip(), **people).strip()


def _has_remote() -> bool:
    return bool(_dvc("remote", "list", what="list the remotes").strip())


def _git(*arguments: str, text: str = "", **environment: str) -> str:
    """Return git's output for the input `text` with variables `environment`; empty if it fails."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, "git", *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, encoding="utf-8", check=False
    )
    return done.stdout


def _add_model(experiment: Experiment, store: Store, say: Callable[[str], None]) -> list[Path]:
    """Copy the sealed model to DVC's cache and to results/current/model; return git's files."""
    sealed = sealed_part(experiment, store, "merge")
    model = CURRENT / MODEL_NAME
    if model.exists():
        raise PipelineError(
            f"{model}: this is no model that `record` put there; move it away and record again"
        )
    say(f"adding {sealed} to DVC's cache as {model}")
    _dvc("add", "--out", str(model), str(sealed.resolve()), what=f"add the model {sealed}")
    return [path for path in (model_pointer(CURRENT), CURRENT / ".gitignore") if path.exists()]


def _dvc(*arguments: str, what: str) -> str:
    """Run dvc and return its output. Raise PipelineError with the remedy if it fails."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    for pattern, remedy in REMEDIES:
        if re.search(pattern, done.stderr):
            raise PipelineError(f"cannot {what}: {remedy}")
    mark = "ERROR: "
    errors = [line for line in done.stderr.splitlines() if line.startswith(mark)]
    text = " ".join(line.removeprefix(mark) for line in errors) or done.stderr.strip()
    raise PipelineError(f"cannot {what}: dvc says: {redact(text)}")
