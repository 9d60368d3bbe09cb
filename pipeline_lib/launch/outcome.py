"""What happened to the ranks, as one message: each that fails leaves a report, unless killed."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from pipeline_lib.launch.heartbeat import LostRank, Sign, find_lost, read_signs
from pipeline_lib.launch.rank_report import Blame, Cause, RankReport, read_reports

# None: of a launcher that has an exit code of its own for whatever its ranks end with. NCCL's
# watchdog aborts a rank that waited in vain; launchers end the others by the rest.
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

    def __init__(self, message: str, lost: Sequence[LostRank]) -> None:
        """Carry the ranks, for the events."""
        super().__init__(message)
        self.lost = tuple(lost)


NO_REPORT = Blame.COMPLAINT + 1  # tells less than any report


@dataclass(frozen=True)
class _Evidence:
    """What ranks left that have ended; the rest is what `explain` is given."""

    launcher: str
    exit_code: int
    rank: int | None
    ranks: int
    run_dir: Path
    reports: Mapping[int, RankReport]
    signs: Mapping[int, Sign]

    @cached_property
    def first(self) -> RankReport | None:
        """The most telling report."""
        return min(
            self.reports.values(), key=lambda report: (report.blame, report.rank), default=None
        )

    @property
    def blame(self) -> int:
        """How telling that is; without a report, less than any."""
        return NO_REPORT if self.first is None else self.first.blame

    @property
    def has_no_cause(self) -> bool:
        """Whether no report tells more than that a peer was missing."""
        return self.blame >= Blame.COMPLAINT

    @property
    def without_report(self) -> list[int]:
        """The ranks that left no report."""
        return [rank for rank in range(self.ranks) if rank not in self.reports]

    @property
    def signal_number(self) -> int | None:
        """The signal behind the exit code."""
        return _signal_of(self.exit_code)


def explain(
    launcher: str, exit_code: int, rank: int | None, ranks: int, run_dir: Path
) -> PipelineError:
    """Return the most telling of the ranks' reports: a rank's own error before a peer's complaint.

    `exit_code` is that of `rank`, the first to fail, if the launcher tells which one that is. Else
    `rank` is None and `exit_code` the launcher's own. It is negative if a signal killed the
    process.
    """
    reports = read_reports(run_dir, ranks)
    evidence = _Evidence(
        launcher, exit_code, rank, ranks, run_dir, reports, read_signs(run_dir, ranks)
    )
    killed = _launcher_killed(evidence) or _ranks_waited_for(evidence) or _ranks_killed(evidence)
    if killed is not None:
        return killed
    if evidence.first is None:
        return _exit_code_alone(evidence)
    return _network_between_hosts(evidence, evidence.first) or _error_of_rank(evidence.first)


def _launcher_killed(evidence: _Evidence) -> PipelineError | None:
    """Return the end of all by a signal to the launcher, unless a rank had an error of its own."""
    if evidence.rank is not None or evidence.exit_code >= 0 or evidence.blame <= Blame.OWN_ERROR:
        return None
    name = signal.Signals(-evidence.exit_code).name
    how = how_to_continue(evidence.run_dir)
    return Interrupted(f"{evidence.launcher} was killed by {name}, and its ranks with it; {how}")


def _ranks_waited_for(evidence: _Evidence) -> PipelineError | None:
    """Return the loss of ranks whose signs stopped, if no cause is told and others ended for it.

    The first to fail is none of them: its silence before it was killed has that cause too.
    """
    may_be_others = evidence.rank in evidence.reports or evidence.signal_number in ENDED_WITH_OTHERS
    if not may_be_others or not evidence.has_no_cause:
        return None
    lost = []
    for one in find_lost(evidence.signs, evidence.ranks):
        if one.rank in evidence.without_report and one.rank != evidence.rank:
            lost.append(one)
    if not lost:
        return None
    named = "; ".join(map(str, lost[:3]))
    if len(lost) > 3:
        named += f"; so were ranks {', '.join(str(one.rank) for one in lost[3:])}"
    return RanksLost(f"{named}; {how_to_continue(evidence.run_dir)}", lost)


def _ranks_killed(evidence: _Evidence) -> PipelineError | None:
    """Return the first failing rank's end by a signal, unless a report says more.

    Else return the end of those without a report.
    """
    is_complaint = evidence.blame == Blame.COMPLAINT
    is_killed = is_complaint or evidence.signal_number is not None
    if not is_killed or not evidence.without_report or evidence.rank in evidence.reports:
        return None
    if evidence.blame <= Blame.KILLED:
        return None
    suspects = evidence.without_report if evidence.rank is None else [evidence.rank]
    signs = evidence.signs
    killed = []
    for rank in suspects:
        sign = signs.get(rank)
        killed.append(sign.lost("killed") if sign else LostRank(rank, "killed"))
    # Where the rank is a guess, SIGTERM is not taken for the cause: launchers end the other ranks
    # by it.
    is_guess = evidence.rank is None and evidence.signal_number == signal.SIGTERM
    return _killed(killed, None if is_guess else evidence.signal_number, evidence.run_dir)


def _exit_code_alone(evidence: _Evidence) -> PipelineError:
    """Return what the exit code alone tells."""
    who = evidence.launcher if evidence.rank is None else f"rank {evidence.rank}"
    ended = f"{who} ended with code {evidence.exit_code}{MEANINGS.get(evidence.exit_code, '')}"
    return RankFailed(f"{ended}; its output is above", max(1, evidence.exit_code))


def _network_between_hosts(evidence: _Evidence, first: RankReport) -> PipelineError | None:
    """Return a peer's complaint with the hosts whose network may be the cause, if several."""
    hosts = sorted({sign.host for sign in evidence.signs.values()})
    if first.blame != Blame.COMPLAINT or len(hosts) < 2:
        return None
    where = f"every rank was heard to the end: look at the network between {', '.join(hosts[:4])}"
    return Interrupted(f"{first.message}; {where}")


def _error_of_rank(first: RankReport) -> PipelineError:
    message = f"rank {first.rank}: {first.message}"
    if first.cause is Cause.DIVERGED:
        return Diverged(message)
    return RankFailed(message, first.exit_code)


def explain_lost_hosts(
    error: PipelineError, lost: Mapping[str, str], ranks: int, run_dir: Path
) -> PipelineError:
    """Return the loss of the `lost` hosts with the reason, unless a rank's `error` says more."""
    if not lost or error.exit_code != Interrupted.exit_code:
        return error
    signs = read_signs(run_dir, ranks)
    on_them = [sign.lost("silent", 0.0) for _, sign in sorted(signs.items()) if sign.host in lost]
    named = "; ".join(f"host {host} was lost: {reason}" for host, reason in lost.items())
    return RanksLost(f"{named}; {how_to_continue(run_dir)}", on_them)


def peer_is_lost(run_dir: Path, ranks: int) -> bool:
    """Return whether a rank has ended because another did not answer."""
    return any(report.blame == Blame.COMPLAINT for report in read_reports(run_dir, ranks).values())


def _killed(suspects: Sequence[LostRank], number: int | None, run_dir: Path) -> PipelineError:
    who = f"rank {' or '.join(str(one.rank) for one in suspects)}"
    if hosts := sorted({one.host for one in suspects if one.host}):
        who += f" on {' or '.join(hosts[:4])}"
    name = "ended without a word, as one that is killed"
    if number:
        name = f"was killed by {signal.Signals(number).name}"
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
