"""The command `chat`: talk to a tuned model in the terminal, or ask it one question from a pipe."""

import argparse
import math
import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.cli.machines import positive
from pipeline_lib.config.compile import open_experiment
from pipeline_lib.config.dag import DEFAULT_CONFIG, RESULTS
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError
from pipeline_lib.core.language import _
from pipeline_lib.core.processes import importing
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Ref, Store
from pipeline_lib.core.text import did_you_mean

PROMPT = "> "


def add_to(commands: Any) -> None:
    """Add `chat` to the subparsers `commands`."""
    text = _("talk to a tuned model; a question from a pipe is answered once")
    sub = commands.add_parser("chat", help=text, description=text)
    sub.add_argument(
        "model",
        metavar="MODEL",
        help=_("a model folder such as results/NAME/model, an experiment's name, or a config"),
    )
    sub.add_argument("--experiment", metavar="NAME", help=_("name of the experiment in a sweep"))
    sub.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help=_("longest answer; default: tokenize.max_tokens of the training"),
    )
    sub.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help=_(
            "0 always takes the likeliest token, as the report does; default: that of "
            "generation_config.json"
        ),
    )
    sub.set_defaults(command=chat, when_stopped=_("nothing was changed"))


def temperature(text: str) -> float:
    """Parse a temperature. Raise ArgumentTypeError unless it is a number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def chat(arguments: argparse.Namespace) -> None:
    """Converse in a terminal, or answer standard input and write only answers to stdout."""
    store = Store.from_env(os.environ)
    folder = model_of(arguments.model, store, arguments.experiment)
    is_terminal = sys.stdin.isatty()
    question = "" if is_terminal else piped_question()
    if is_terminal:
        tell(f"loading {folder}")
    with importing():
        from pipeline_lib.evaluate.chat import AnswerLimits, Chat, converse

    limits = AnswerLimits(arguments.max_new_tokens, arguments.temperature)
    talk = Chat(folder, store, limits, partial(say, end=""), tell)
    if not is_terminal:
        if not talk.ask(question):
            raise KeyboardInterrupt
        return
    with suppress(ImportError):  # some builds of Python lack it
        import readline  # gives input() its line editing and its history

        # several lines that are pasted are one question
        readline.parse_and_bind("set enable-bracketed-paste on")
    tell(talk.describe())
    tell(
        "/base shows the base model's answer, /help all commands; Ctrl-C stops an answer, Ctrl-D "
        "ends"
    )
    converse(talk, lambda: input(PROMPT))


def tell(text: str) -> None:
    """Print a line that is no part of an answer."""
    print(text, file=sys.stderr, flush=True)


def piped_question() -> str:
    """Return the text on standard input. Raise DataError if it is empty, or not UTF-8."""
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: the question is not UTF-8 ({error})") from error
    if not question:
        raise DataError(
            "standard input: there is no question; pipe one, or start chat in a terminal"
        )
    return question


def model_of(text: str, store: Store, experiment: str | None = None) -> Path:
    """Return the model folder that `text` means: itself, or an experiment's or config file's.

    Raise ConfigError or DataError if it means none, IntegrityError if the experiment has no model
    yet.
    """
    path = Path(text)
    if (path / "config.json").is_file():
        return path
    if path.suffix in (".yaml", ".yml") and path.is_file():
        found = open_experiment(path, store, experiment)
        option = "" if path == DEFAULT_CONFIG else f" --configfile {shlex.quote(text)}"
        return _finished(found.name, found.ref("merge"), store, f"run `snakemake{option}` first")
    from pipeline_lib.status.catalog import Catalog, by_name, newest_with, said_of_newer, unreadable

    known = by_name(Catalog(store).experiments(all_of_them=True))
    if configs := known.get(_name_in(path)):
        frozen = newest_with("merge", configs, store)
        if frozen is not configs[0]:
            tell(said_of_newer(frozen, configs[0]))
        if "merge" not in frozen.parts:
            raise unreadable(frozen)
        status = f"`qwen3 status {shlex.quote(frozen.name)}` shows how far it is"
        how = f"run `qwen3 run CONFIG` with its config first; {status}"
        return _finished(frozen.name, Ref("merge", frozen.parts["merge"]), store, how)
    if (path / "adapter_config.json").is_file():
        raise DataError(
            f"{path}: an adapter alone; give the model folder around it, into which it is merged"
        )
    if path.is_dir():
        hint = f"; {path / 'model'} is one" if (path / "model" / "config.json").is_file() else ""
        raise DataError(f"{path}: no model folder, for it has no config.json{hint}")
    names = did_you_mean(text, known) or f"; experiments here: {', '.join(sorted(known)) or 'none'}"
    raise ConfigError("chat", [f"{text}: no such model folder, config file or experiment{names}"])


def _name_in(path: Path) -> str:
    """Return the NAME in `NAME`, `results/NAME` and `results/NAME/model`; empty for other paths."""
    with suppress(ValueError):
        path = path.absolute().relative_to(RESULTS.absolute())
    return path.parts[0] if path.parts and path.parts[1:] in ((), ("model",)) else ""


def _finished(name: str, merged: Ref, store: Store, how: str) -> Path:
    if not store.is_sealed(merged):
        raise IntegrityError(
            f"{store.sealed(merged)}: experiment {name!r} has no finished model; {how}"
        )
    return store.sealed(merged)
