"""The command line: one parser for all commands, and the only place that sets exit codes.

It turns errors into these codes.
"""

import argparse
import errno
import io
import os
import sys
import traceback
from typing import Any, NoReturn

from pipeline_lib.cli import (
    certify,
    chat,
    experiments,
    init,
    internal,
    machines,
    mcp_server,
    run,
    store,
)
from pipeline_lib.cli.help_parser import HelpParser, RawHelpFormatter
from pipeline_lib.core.errors import BUG, CONTINUES, ERROR, STOPPED, PipelineError, exit_line
from pipeline_lib.core.files import disk_full_named
from pipeline_lib.core.language import N_, _, language_of, speaking
from pipeline_lib.core.signals import Terminated, stops_interrupt
from pipeline_lib.core.text import did_you_mean, redact
from pipeline_lib.slurm.job import job_and_log

KEYBOARD_INTERRUPT_CODE = 130
INTERNAL_ERROR_CODE = 1
INPUT_OUTPUT_ERROR_CODE = 74  # EX_IOERR
ANY_OUTPUT = "the store, its runs/ or this output"

DESCRIPTION = N_(
    """\
Fine-tunes Qwen models: one config file in, a verified model and a report out.

  run        run an experiment, up to a stage, with other values, here or on a cluster

before a run
  init       make a project folder: a config to begin with, and what git and DVC need
  check      name all problems of a config
  plan       predict memory, time and disk, and choose the fastest way that fits
  import     make a config of another tool's files
  doctor     look at this machine, hosts or nodes: what they have, and what is wrong
  calibrate  measure this machine for the plan

during it
  status     the state of every experiment: stage, step, loss, time left
  rewind     let an unfinished training continue from an earlier checkpoint
  join       take part with this machine in a training that begins on another one

after it
  summary    the results of an experiment, or a line for each of several
  verdict    whether a tuned model may ship, by its benchmarks
  compare    which experiment is best, whether its lead is noise, and what differs
  chat       talk to a tuned model
  certify    ask a running server whether it serves the tuned model
  trace      where a model comes from, back to hub commits and data files
  record     save an experiment as one of DVC's
  publish    copy an experiment's small results to results/current, for DVC

for assistants
  mcp        serve check, plan, status, summary, compare and the documentation over stdio

what is kept
  store      list, measure, clean up and verify it"""
)
EXAMPLES = N_(
    """\
examples:
  qwen3 check my.yaml && qwen3 run my.yaml
  qwen3 run my.yaml train.lr=2e-4
  qwen3 compare my-first my-first-lr=2e-4

`qwen3 COMMAND --help` says more."""
)


def main() -> NoReturn:
    """Run the command in sys.argv and exit with its code.

    User errors print one message and no traceback.
    """
    _print_what_the_terminal_can_show()
    language = language_of(os.environ)
    with speaking(language):
        arguments = _parsed(sys.argv[1:])
    with speaking("en" if _is_for_programs(arguments) else language):
        _run(arguments)


def _is_for_programs(arguments: argparse.Namespace) -> bool:
    """Return whether programs read what a command says: rules, or by `--json` a user's own."""
    return (
        getattr(arguments, "is_internal", False)
        or getattr(arguments, "spec", None) is not None
        or bool(getattr(arguments, "json", False))
    )


def _run(arguments: argparse.Namespace) -> NoReturn:
    """Run a command and exit with its code."""
    try:
        # A stage may hear of a signal to its whole group, and again from Snakemake.
        with stops_interrupt(is_once=hasattr(arguments, "stage")), disk_full_named(ANY_OUTPUT):
            arguments.command(arguments)
    except PipelineError as error:
        # Messages quote files of unknown origin, whose unprintable characters could move a
        # terminal's cursor.
        text = "".join(
            char if char.isprintable() or char == "\n" else " " for char in redact(str(error))
        )
        print(f"{_(ERROR)}{text}", file=sys.stderr, flush=True)
        # of a rule alone: `plan` is also a user's command
        if getattr(arguments, "spec", None) is not None:
            if place := job_and_log(os.environ):
                print(place, file=sys.stderr, flush=True)
            print(exit_line(error.exit_code), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        where = error.filename or ANY_OUTPUT
        remedy = ""
        if error.errno == errno.EMFILE:
            remedy = _("; allow more of them: `ulimit -n 4096`")
        print(
            redact(f"{_(ERROR)}{where}: {error.strerror or error}{remedy}"),
            file=sys.stderr,
            flush=True,
        )
        sys.exit(INPUT_OUTPUT_ERROR_CODE)
    except (KeyboardInterrupt, Terminated):
        print(f"{_(STOPPED)}{arguments.when_stopped}", file=sys.stderr, flush=True)
        sys.exit(KEYBOARD_INTERRUPT_CODE)
    except Exception:  # the outermost boundary: any other error is a bug of this program
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        print(f"{_(BUG)}{_('; the traceback above says where')}", file=sys.stderr, flush=True)
        sys.exit(INTERNAL_ERROR_CODE)
    sys.exit(0)


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Return the arguments of the command line; end with what is wrong with them."""
    if run.is_run(argv):
        return run.parse(argv)
    root, commands = _parser_and_commands()
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        text = _("{word!r} is no command").format(word=argv[0])
        root.error(text + did_you_mean(argv[0], commands.choices))
    return root.parse_args(argv)


def _print_what_the_terminal_can_show() -> None:
    """Print characters that the output's encoding lacks as escapes, where Python would fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their arguments, but those of `run`."""
    return _parser_and_commands()[0]


def _parser_and_commands() -> tuple[argparse.ArgumentParser, Any]:
    root = HelpParser(
        prog="qwen3",
        usage="qwen3 COMMAND ...",
        description=_(DESCRIPTION),
        epilog=_(EXAMPLES),
        formatter_class=RawHelpFormatter,
    )
    root.set_defaults(when_stopped=_(CONTINUES))
    commands = root.add_subparsers(
        prog="qwen3", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for group in (run, init, experiments, chat, certify, store, machines, mcp_server):
        group.add_to(commands)
    of_people = set(commands.choices)
    experiments.add_those_for_rules(commands)
    internal.add_to(commands)
    for name in commands.choices.keys() - of_people:
        commands.choices[name].set_defaults(is_internal=True)
    return root, commands
