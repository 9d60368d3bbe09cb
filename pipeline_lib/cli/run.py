"""`run`: start snakemake with the project's rules, from any folder, and say where the result is."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline_lib.cli.help_parser import HelpParser, RawHelpFormatter
from pipeline_lib.config import strict_yaml
from pipeline_lib.config.dag import COMMAND_VARIABLE, OVERRIDES
from pipeline_lib.config.stages import STAGES
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.text import did_you_mean

# Where the Snakefile and the profiles are: in the clone, or where a wheel installs them.
RULES = (Path(__file__).resolve().parents[2], Path(sys.prefix) / "share" / "qwen3-pipeline")
SNAKEFILE = Path("workflow/Snakefile")
TARGETS = (*STAGES, "rehearse")
_WHAT = N_("run an experiment: from its data to a verified model and a report")
EXAMPLES = N_("""\
examples:
  qwen3 run my.yaml                      the whole experiment, on this machine
  qwen3 run my.yaml train                up to the end of a stage
  qwen3 run my.yaml train.lr=2e-4        with another value, as an experiment of its own
  qwen3 run my.yaml -n                   what would run
  qwen3 run my.yaml --gpus 2,3           on these GPUs
  qwen3 run my.yaml --slurm              as jobs of a SLURM cluster
  qwen3 run my.yaml -- --cores 4         with further options of snakemake
""")


def add_to(commands: Any) -> None:
    """Add `run` to the subparsers `commands`, for their list; `parse` reads its arguments."""
    commands.add_parser("run", help=_(_WHAT), add_help=False)


def is_run(argv: Sequence[str]) -> bool:
    """Return whether `argv` is `run ...`, or a stage that a person means: rules give a spec.

    `plan CONFIG` is a command of its own.
    """
    if argv[:1] == ["run"]:
        return True
    is_of_a_rule = any(word.startswith(("--spec", "--frozen")) for word in argv)
    return bool(argv) and argv[0] in TARGETS and argv[0] != "plan" and not is_of_a_rule


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `argv`, of which `is_run` is true, for `run`.

    Options may stand between the words, and snakemake's behind `--`.
    """
    own = list(argv)
    options: list[str] = []
    if "--" in own:
        end = own.index("--")
        options = own[end + 1 :]
        own = own[:end]
    name = own.pop(0)
    arguments = _parser().parse_intermixed_args(own)
    if name != "run":
        arguments.words.append(name)
    arguments.options = options
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = HelpParser(
        prog="qwen3 run",
        # Intermixed arguments would cut it out of a help that they take for English.
        usage="qwen3 run [-h] [-n] [--slurm] [--gpus 0,1] CONFIG [STAGE | KEY=VALUE ...]",
        description=_(_WHAT),
        epilog=_(EXAMPLES),
        formatter_class=RawHelpFormatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help=_("the config file"))
    stages = ", ".join(TARGETS)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="STAGE | KEY=VALUE",
        help=_(
            "the last stage to run ({stages}; all by default); values in place of the file's"
        ).format(stages=stages),
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help=_("only say what would run"))
    parser.add_argument("--slurm", action="store_true", help=_("run stages as jobs of a cluster"))
    parser.add_argument(
        "--gpus", metavar="0,1", help=_("use these GPUs, as CUDA_VISIBLE_DEVICES says")
    )
    parser.set_defaults(command=run, when_stopped=_("nothing was started"))
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Replace this process by snakemake's, which people and systems then signal and wait for."""
    stages = [word for word in arguments.words if "=" not in word]
    _refuse_wrong_words(stages)
    # What this cannot read, snakemake would end with a traceback of.
    strict_yaml.load(arguments.config)
    environ = dict(os.environ)
    environ[COMMAND_VARIABLE] = shlex.join(["qwen3", *sys.argv[1:]])
    if arguments.gpus is not None:
        environ["CUDA_VISIBLE_DEVICES"] = arguments.gpus
    command = [sys.executable, "-m", "snakemake", *_arguments(arguments, stages)]
    sys.stdout.flush()
    os.execve(sys.executable, command, environ)  # noqa: S606 - a list of arguments, no shell


def _refuse_wrong_words(stages: Sequence[str]) -> None:
    """Raise ConfigError unless `stages` has at most one word, a stage's name."""
    names = ", ".join(TARGETS)
    problems = [
        f"{word!r} is no stage ({names}){did_you_mean(word, TARGETS)}"
        for word in stages
        if word not in TARGETS
    ]
    if len(stages) > 1:
        problems.append(f"one stage is the last to run, not {len(stages)}: {', '.join(stages)}")
    if problems:
        raise ConfigError("qwen3 run", problems)


def _arguments(arguments: argparse.Namespace, stages: Sequence[str]) -> list[str]:
    """Return snakemake's arguments: a target stands before the options that take several values."""
    settings = [word for word in arguments.words if "=" in word]
    rules = rules_folder()
    made = [*stages, "--snakefile", str(rules / SNAKEFILE)]
    made += ["--configfile", str(arguments.config)]
    made += ["--workflow-profile", str(rules / "profiles" / "default")]
    if arguments.slurm:
        made += ["--profile", str(rules / "profiles" / "slurm")]
    if settings:
        made += ["--config", f"{OVERRIDES}={json.dumps(settings)}"]
    if arguments.dry_run:
        made.append("--dry-run")
    return [*made, *arguments.options]


def rules_folder() -> Path:
    """Return the folder of RULES that has SNAKEFILE. Raises ConfigError."""
    for folder in RULES:
        if (folder / SNAKEFILE).is_file():
            return folder
    places = " nor ".join(map(str, RULES))
    remedy = "install the clone (`pip install -e .`) or its wheel"
    raise ConfigError("qwen3", [f"{SNAKEFILE} is neither in {places}; {remedy}"])
