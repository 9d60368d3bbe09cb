"""The command `store`: list, measure, clean up, verify and restore what is in the store."""

import argparse
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.config.dag import RESULTS
from pipeline_lib.core.errors import IntegrityError, Interrupted
from pipeline_lib.core.language import _
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import count
from pipeline_lib.slurm.queue import QueuedJob, queued_jobs
from pipeline_lib.status.watch import SILENT_QUEUE


def add_to(commands: Any) -> None:
    """Add `store` to the subparsers `commands`."""
    text = _("list, measure, clean up and verify the store")
    parser = commands.add_parser("store", help=text, description=text)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    ls = _action(
        actions, "ls", list_store, _("list the experiments; with names, also their directories")
    )
    ls.add_argument(
        "names", nargs="*", metavar="NAME", help=_("experiments, or patterns such as 'lr-*'")
    )
    ls.add_argument("--all", action="store_true", help=_("list every directory"))
    du = _action(actions, "du", measure, _("show the disk space of stages and experiments"))
    du.add_argument(
        "names", nargs="*", metavar="NAME", help=_("experiments, or patterns such as 'lr-*'")
    )
    gc = _action(
        actions, "gc", collect, _("delete everything that no kept experiment and no job needs")
    )
    keep = _(
        "experiments, or patterns such as 'lr-*'; by default all are kept, and only unused "
        "files are deleted"
    )
    gc.add_argument("--keep-experiments", nargs="+", metavar="NAME", help=keep)
    gc.add_argument(
        "--newest",
        action="store_true",
        help=_("of each kept name, keep only the newest config and the newest finished one"),
    )
    gc.add_argument(
        "--older-than",
        type=days,
        default=0.0,
        metavar="DAYS",
        help=_("delete only what was last used before that"),
    )
    gc.add_argument("--dry-run", action="store_true", help=_("only show what would be deleted"))
    gc.add_argument(
        "--ignore-queue",
        action="store_true",
        help=_("if squeue does not answer and no job uses this store"),
    )
    gc.set_defaults(
        when_stopped=_(
            "every directory is still whole or gone from the store; the same command continues"
        )
    )
    check = _action(
        actions, "verify", verify, _("check every file against its hash, and all references to it")
    )
    check.add_argument(
        "names", nargs="*", metavar="NAME", help=_("experiments, or patterns such as 'lr-*'")
    )
    check.set_defaults(when_stopped=_("nothing was changed"))
    back = _action(actions, "restore", restore, _("bring back a checkpoint that was set aside"))
    which = _("runs/DIGEST/set-aside/step-N, or runs/DIGEST/checkpoints/rejected-step-N")
    back.add_argument("checkpoint", type=Path, help=which)


def days(text: str) -> float:
    """Parse a number of days. Raise ArgumentTypeError outside 0 to 36500."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 36500:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return value


def list_store(arguments: argparse.Namespace) -> None:
    """List the experiments; with names also their directories, with --all every directory."""
    from pipeline_lib.upkeep.inventory import Inventory
    from pipeline_lib.upkeep.lines import directory_lines, experiment_lines
    from pipeline_lib.upkeep.usage import shares, used_by

    inventory = Inventory.read(Store.from_env(os.environ))
    now_s = time.time()
    found, digests = used_by(inventory, arguments.names, "store ls")
    lines = []
    if not arguments.all:
        lines += experiment_lines(
            [one for one in shares(inventory) if one.name in found], inventory, now_s
        )
    if arguments.all or arguments.names:
        lines += [*([""] if lines else []), *directory_lines(inventory, digests, now_s)]
    say("\n".join(lines))


def measure(arguments: argparse.Namespace) -> None:
    """Show the bytes that stages and experiments take."""
    from pipeline_lib.status.at_rest import LOGS
    from pipeline_lib.upkeep.inventory import Inventory
    from pipeline_lib.upkeep.lines import use_lines
    from pipeline_lib.upkeep.usage import shares, used_by

    inventory = Inventory.read(Store.from_env(os.environ))
    found, _ = used_by(inventory, arguments.names, "store du")
    chosen = [one for one in shares(inventory) if one.name in found]
    say("\n".join(use_lines(inventory, LOGS, chosen, is_named=bool(arguments.names))))


def collect(arguments: argparse.Namespace) -> None:
    """Remove what nothing needs, or with --dry-run show it."""
    from pipeline_lib.core.lock import locked
    from pipeline_lib.upkeep.garbage import CleanupRequest, find_garbage
    from pipeline_lib.upkeep.inventory import Inventory
    from pipeline_lib.upkeep.lines import garbage_lines, removal_lines
    from pipeline_lib.upkeep.live import DAY_S
    from pipeline_lib.upkeep.removal import Removal

    store = Store.from_env(os.environ)
    names = arguments.keep_experiments
    request = CleanupRequest(
        tuple(names) if names else None, arguments.newest, arguments.older_than * DAY_S
    )
    jobs = partial(known_jobs, arguments.ignore_queue)
    if arguments.dry_run:
        garbage = find_garbage(
            Inventory.read(store), request, jobs(is_asked_only=True), time.time()
        )
        say("\n".join([*garbage_lines(garbage, names is None), "nothing was removed: --dry-run"]))
        return
    with locked(store.lock_path("gc"), say):
        garbage = find_garbage(
            Inventory.read(store), request, jobs(is_asked_only=False), time.time()
        )
        say("\n".join(garbage_lines(garbage, names is None)))
        removal = Removal(garbage, RESULTS)
        removal.run()
    say("\n".join(removal_lines(removal)))
    removal.raise_failed()


def known_jobs(is_ignored: bool, is_asked_only: bool) -> list[QueuedJob]:
    """Return the jobs in SLURM's queue; none without SLURM or if ignored.

    If squeue does not answer, raise Interrupted, or with `is_asked_only` warn and return none.
    """
    jobs = [] if is_ignored else queued_jobs()
    if jobs is None and shutil.which("squeue"):
        silent = _(SILENT_QUEUE)
        if not is_asked_only:
            remedy = _("run the same command again, or add --ignore-queue if none uses this store")
            raise Interrupted(f"{silent}; {remedy}")
        say(_("{reason}: this list may contain files that they need").format(reason=silent))
    return jobs or []


def verify(arguments: argparse.Namespace) -> None:
    """Verify all sealed directories, or those that some experiments use.

    Raise IntegrityError with all damage found.
    """
    from pipeline_lib.upkeep.check import damaged, progress_on, to_verify, verify_all
    from pipeline_lib.upkeep.inventory import Inventory
    from pipeline_lib.upkeep.usage import used_by

    store = Store.from_env(os.environ)
    inventory = Inventory.read(store)
    _, digests = used_by(inventory, arguments.names, "store verify")
    found = to_verify(inventory, digests)
    with progress_on(sys.stderr, sum(one.bytes for one in found)) as advance:
        problems = verify_all(found, store, lambda one: advance(one.bytes))
    problems = [*damaged(inventory, digests), *problems]
    if problems:
        raise IntegrityError(
            "\n".join(
                [
                    f"{store.root}: {count(len(problems), 'problems')}",
                    *(f"  - {one}" for one in problems),
                ]
            )
        )
    say(f"{store.root}: {len(found)} sealed directories are whole")


def restore(arguments: argparse.Namespace) -> None:
    """Restore the name of a checkpoint that was set aside."""
    from pipeline_lib.core import run_folder

    path = run_folder.restore(arguments.checkpoint.absolute())
    say(f"{path}: whole; the next training of this run continues from the newest checkpoint")


def _action(actions: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser
