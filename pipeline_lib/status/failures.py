"""The last words of a snakemake with failed jobs: which, why, their logs, and what to type."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from pipeline_lib.core.errors import ERROR, LogEnd, end_of_log
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.run_record import tail
from pipeline_lib.core.text import cut, redact
from pipeline_lib.core.units import count

LOG_BYTES = 65536
MOST_FAILURES = 10
MOST_CHARS = 3000  # of one error
LAST_LINES = 5  # of a log that does not say why it ends
_STOPPED = N_("stopped by a signal while it was starting")
_KILLED = N_("it ended without an error message: it was killed, for example because memory ran out")


@dataclass(frozen=True)
class Failure:
    """A failed job: its title, its logs, the stage's own first, and the executor's word on its end.

    `is_stopped` if a signal stopped snakemake while it ran.
    """

    title: str
    logs: tuple[Path, ...]
    executor_message: str = ""
    is_stopped: bool = False

    @property
    def end(self) -> LogEnd | None:
        """The error that ends the stage's log; None if there is none."""
        return end_of_log(_text_of(self.logs[0])) if self.logs else None

    @property
    def is_interruption(self) -> bool:
        """Whether the same command continues without any change."""
        return self.is_stopped if self.end is None else self.end.is_interruption

    def lines(self) -> list[str]:
        """Return the title, the reason and the logs, one below the other."""
        reason = self._reason()
        below = [cut(redact(reason), MOST_CHARS)]
        for log in self.logs:
            if log.exists() and str(log) not in reason:
                below.append(_("log: {paths}").format(paths=log))
        return [f"- {self.title}", indent("\n".join(below), "    ")]

    def _reason(self) -> str:
        if self.end is not None:
            return self.end.message
        last = _text_of(self.logs[0]).splitlines()[-LAST_LINES:] if self.logs else []
        said = []
        if self.executor_message:
            said.append(self.executor_message)
        if self.is_stopped:
            said.append(_(_STOPPED))
        if not last:
            return "\n".join(said or [_("it ended, and its log is empty")])
        lines = said or [_(_KILLED)]
        lines.append(_("the last lines of its log:"))
        lines += [f"  {line}" for line in last]
        return "\n".join(lines)


def last_words(failures: Sequence[Failure], errors: Sequence[str], command: str) -> str:
    """Return what to show last when `command` did not finish.

    Without `failures`, the first of the `errors` that Snakemake itself reported is the reason. If
    there is none either, the user stopped it.
    """
    again = _("the same command continues: {command}").format(command=command)
    once_fixed = _("once the cause is fixed, ") + again
    if errors and not failures:
        return f"{_(ERROR)}{cut(redact(errors[0]), MOST_CHARS)}\n{once_fixed}"
    if not failures:
        return _("stopped before the end; ") + again
    shown = [one for one in failures if not one.is_interruption]
    if shown:
        lines = [_(ERROR) + _("{jobs} failed").format(jobs=count(len(shown), _("jobs")))]
        again = once_fixed
    else:
        jobs = count(len(failures), _("jobs"))
        lines = [_("stopped: {jobs} interrupted").format(jobs=jobs)]
        shown = list(failures)
    for one in shown[:MOST_FAILURES]:
        lines += one.lines()
    more = len(shown) - MOST_FAILURES
    if more > 0:
        lines.append(_("and {number} more").format(number=more))
    lines.append(again)
    return "\n".join(lines)


def _text_of(log: Path) -> str:
    return tail(log, LOG_BYTES)[0].decode(errors="replace")
