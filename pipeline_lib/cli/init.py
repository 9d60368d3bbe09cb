"""`init`: make a folder for one's own experiments, in a repository of one's own."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from pipeline_lib.cli.run import rules_folder
from pipeline_lib.config.dag import DEFAULT_CONFIG
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.language import N_, _

IGNORED_BY_GIT = """\
.venv/
.snakemake/
/store/
/runs/
/logs/
/results/?*
!/results/current/
/results/current/model/
/dvc_plots/
"""
_WHAT = N_("make a project folder: a config to begin with, and what git and DVC need")
_DATA = Path("config/demo.jsonl")
_QUESTIONS = Path("config/demo-questions.jsonl")
_COPIED = (DEFAULT_CONFIG, _DATA, _QUESTIONS, Path("dvc.yaml"), Path(".dvcignore"))


def add_to(commands: Any) -> None:
    """Add `init` to the subparsers `commands`."""
    sub = commands.add_parser("init", help=_(_WHAT), description=_(_WHAT))
    sub.add_argument("folder", type=Path, metavar="DIR", help=_("`.` is this folder"))
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    make_project(folder)
    print(f"made {folder / DEFAULT_CONFIG}, which runs as it is, and what git and DVC need:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print(f"  qwen3 run {DEFAULT_CONFIG}")
    print(f"then put your model and data into {DEFAULT_CONFIG}, and check it:")
    print(f"  qwen3 check {DEFAULT_CONFIG}")
    print("to record results with DVC: git init && dvc init, then commit (docs/dvc.md)")


def make_project(folder: Path) -> None:
    """Write the demo's config and the files of DVC and git into `folder`, which may be missing.

    Lines are added to a .gitignore that is there. Raises ConfigError, before anything is written,
    if one of the others is there.
    """
    rules = rules_folder()
    there = [str(folder / name) for name in _COPIED if (folder / name).exists()]
    if there:
        remedy = "move it away, or take another folder"
        raise ConfigError("qwen3 init", [f"{path} is there already; {remedy}" for path in there])
    for name in _COPIED:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(rules / name, target)
    _run_by_qwen3(folder / "dvc.yaml")
    _ignore(folder / ".gitignore")


def _run_by_qwen3(path: Path) -> None:
    """Let the stage of dvc.yaml at `path` find the rules, which `snakemake` finds in a clone."""
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("&& snakemake &&", f"&& qwen3 run {DEFAULT_CONFIG} &&"), encoding="utf-8"
    )


def _ignore(path: Path) -> None:
    """Add the lines of IGNORED_BY_GIT that the .gitignore at `path` lacks."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and not text.endswith("\n"):
        text += "\n"
    known = text.splitlines()
    missing = [line for line in IGNORED_BY_GIT.splitlines() if line not in known]
    path.write_text(text + "".join(f"{line}\n" for line in missing), encoding="utf-8")
