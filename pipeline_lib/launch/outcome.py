"""What happened to the ranks, as one message: each leaves a report when it fails, and who leaves none was killed."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline_lib.core.errors import (
    CONTINUES,
    DataError,
    DiskFull,
    Diverged,
    IntegrityError,
    Interrupted,
    PipelineError,
    TrainingError,
)
from pipeline_lib.core.run_folder import CHECKPOINTS, sealed_steps
from pipeline_lib.launch.heartbeat import Lost, find_lost, read_signs
from pipeline_lib.launch.rank_report import Blame, Cause, read_reports

# None: of a launcher that has an exit code of its own for whatever its ranks end with. NCCL's watchdog aborts a rank
# that waited in vain; launchers end the others by the rest.
ENDED_WITH_OTHERS = (None, signal.SIGABRT, signal.SIGTERM, signal.SIGKILL)
# What an exit code of ours means, where no report says more.
MEANINGS = {
    DataError.exit_code: ", as where data cannot be used",
    IntegrityError.exit_code: ", as where files are not what was sealed",
    TrainingError.exit_code: ", as where the numbers go wrong",
    DiskFull.exit_code: ", as where the disk is full or a file cannot be written",
    Interrupted.exit_code: ", as one that was stopped",
}


class RankFailed(PipelineError):
    """A rank ended with a message of its own; its exit code becomes ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Carry the rank's message and exit code."""
        super().__init__(message)
        self.exit_code = exit_code


class RanksLost(Interrupted):
    """The ranks in `lost` were killed, or their peers waited for them in vain."""

    def __init__(self, message: str, lost: Sequence[Lost]) -> None:
        """Carry the ranks, for the events."""
        super().__init__(message)
        self.lost = tuple(lost)


def explain(launcher: str, exit_code: int, rank: int | None, ranks: int, run_dir: Path) -> PipelineError:
    """Return the most telling of what the ranks left: a rank's own error before a peer's complaint about its absence.

    `exit_code` is that of `rank`, the first to fail, if the launcher tells which one that is. Else `rank` is None and
    `exit_code` the launcher's own. It is negative if a signal killed the process.
    """
    reports = read_reports(run_dir, ranks)
    silent = [number for number in range(ranks) if number not in reports]
    first = min(reports.values(), key=lambda report: (report.blame, report.rank), default=None)
    if rank is None and exit_code < 0 and (first is None or first.blame > Blame.OWN_ERROR):
        name = signal.Signals(-exit_code).name
        return Interrupted(f"{launcher} was killed by {name}, and its ranks with it; {how_to_continue(run_dir)}")
    is_complaint = first is not None and first.blame == Blame.COMPLAINT
    signs = read_signs(run_dir, ranks)
    number = _signal_of(exit_code)
    may_be_others = rank in reports or number in ENDED_WITH_OTHERS
    lost = [one for one in find_lost(signs, ranks) if one.rank in silent]
    if lost and may_be_others and (first is None or is_complaint):
        named = "; ".join(map(str, lost[:3]))
        if len(lost) > 3:
            named += f"; so were ranks {', '.join(str(one.rank) for one in lost[3:])}"
        return RanksLost(f"{named}; {how_to_continue(run_dir)}", lost)
    is_killed = is_complaint or number is not None
    if is_killed and silent and rank not in reports and (first is None or first.blame > Blame.KILLED):
        suspects = [rank] if rank is not None else silent
        killed = [signs[one].lost("killed") if one in signs else Lost(one, "killed") for one in suspects]
        # Where the rank is a guess, SIGTERM is not taken for the cause: launchers end the other ranks by it.
        return _killed(killed, None if rank is None and number == signal.SIGTERM else number, run_dir)
    if first is None:
        who = launcher if rank is None else f"rank {rank}"
        ended = f"{who} ended with code {exit_code}{MEANINGS.get(exit_code, '')}"
        return RankFailed(f"{ended}; its output is above", max(1, exit_code))
    if is_complaint and len(hosts := sorted({sign.host for sign in signs.values()})) > 1:
        where = f"every rank was heard to the end: look at the network between {', '.join(hosts[:4])}"
        return Interrupted(f"{first.message}; {where}")
    message = f"rank {first.rank}: {first.message}"
    return Diverged(message) if first.cause is Cause.DIVERGED else RankFailed(message, first.exit_code)


def explain_lost_hosts(error: PipelineError, lost: Mapping[str, str], ranks: int, run_dir: Path) -> PipelineError:
    """Return the loss of the hosts in `lost`, by name with the reason, unless `error` is a rank's own and says more."""
    if not lost or error.exit_code != Interrupted.exit_code:
        return error
    signs = read_signs(run_dir, ranks)
    on_them = [sign.lost("silent", 0.0) for _, sign in sorted(signs.items()) if sign.host in lost]
    named = "; ".join(f"host {host} was lost: {reason}" for host, reason in lost.items())
    return RanksLost(f"{named}; {how_to_continue(run_dir)}", on_them)


def peer_is_lost(run_dir: Path, ranks: int) -> bool:
    """Return whether a rank has ended because another did not answer."""
    return any(report.blame == Blame.COMPLAINT for report in read_reports(run_dir, ranks).values())


def _killed(suspects: Sequence[Lost], number: int | None, run_dir: Path) -> PipelineError:
    who = f"rank {' or '.join(str(one.rank) for one in suspects)}"
    if hosts := sorted({one.host for one in suspects if one.host}):
        who += f" on {' or '.join(hosts[:4])}"
    name = f"was killed by {signal.Signals(number).name}" if number else "ended without a word, as one that is killed"
    hint = " (out of memory?)" if number in (None, signal.SIGKILL) else ""
    return RanksLost(f"{who} {name}{hint}; {how_to_continue(run_dir)}", suspects)


def _signal_of(exit_code: int) -> int | None:
    """Return the signal behind an exit code: subprocess says -9, a shell and srun 137."""
    for number in (-exit_code, exit_code - 128):
        if number in signal.valid_signals() and 0 < number < 32:
            return int(number)
    return None


def how_to_continue(run_dir: Path) -> str:
    """Return what is saved and how to continue, in words for the end of a message."""
    steps = sealed_steps(run_dir / CHECKPOINTS)
    saved = f"step {steps[-1][0]} is saved" if steps else "nothing was saved yet"
    return f"{saved}; {CONTINUES}"
