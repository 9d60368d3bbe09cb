"""Typed failures. Each message says what happened, where, what was expected and what to do.

Each type has an exit code. The codes follow sysexits.h where it has a fitting one, so that a batch
system can tell a mistake in the input (do not retry) from a lost peer (retry).
"""

from dataclasses import dataclass

from pipeline_lib.core.language import N_, _

CONTINUES = N_("run the same command again to continue")  # the advice in most Interrupted messages
ERROR = N_("error: ")  # starts the message of a command that fails
STOPPED = N_("stopped; ")  # starts the message of a command that its user stopped
# starts the last line of a command that hit an internal error
BUG = N_("error: this is a bug in pipeline_lib")
EXIT_LINE = "exit code: "  # starts the last log line of a stage that fails


def exit_line(exit_code: int) -> str:
    """Return the log line with a failed stage's exit code, for programs that read the log."""
    return f"{EXIT_LINE}{exit_code}"


class PipelineError(Exception):
    """Base of every failure that a user can meet; its text is shown without a traceback."""

    exit_code = 1


class ConfigError(PipelineError):
    """The configuration cannot be used. `problems` holds one line per problem."""

    exit_code = 2

    def __init__(self, source: str, problems: list[str]) -> None:
        """Store the source file and `problems`, each of which names its key."""
        self.source = source
        self.problems = problems
        title = _("{source}: 1 problem") if len(problems) == 1 else _("{source}: {count} problems")
        lines = [title.format(source=source, count=len(problems))]
        lines += [f"  - {line}" for line in problems]
        super().__init__("\n".join(lines))


class DataError(PipelineError):
    """The user's data cannot be used: the message names the file and the line or row."""

    exit_code = 65


class IntegrityError(PipelineError):
    """Bytes on disk are not the bytes that were sealed."""

    exit_code = 66


class HubError(PipelineError):
    """A hub refused a request or could not be reached.

    The message names the repository and what to do.
    """

    exit_code = 69


class HubOutOfReach(HubError):
    """There is no way to a hub now: no network, or the offline mode of its client."""


class ServerError(PipelineError):
    """A server of a model could not be reached, refused, or offers nothing that can be checked."""

    exit_code = 69


class ServedDiffers(PipelineError):
    """A server does not serve the model that it should: the message names what differs."""

    exit_code = 76


class NotToShip(PipelineError):
    """The benchmarks say that the tuned model is not what the section `ship` wants it to be."""

    exit_code = 77


class TooFewQuestions(PipelineError):
    """The benchmarks have too few questions to tell whether the tuned model may ship."""

    exit_code = 79


class TrainingError(PipelineError):
    """The numbers went wrong: a loss is not finite, or a merged model differs from training."""

    exit_code = 70


class Diverged(TrainingError):
    """The training diverged and would on any machine: its settings or data have to change."""


class Unreadable(PipelineError):
    """A file exists but is unreadable (permissions, disk, server); it may still be intact."""

    exit_code = 74


class DiskFull(PipelineError):
    """The disk has too little space for what has to be written."""

    exit_code = 74


class Interrupted(PipelineError):
    """Stopped from outside (a signal, a lost peer, another owner).

    Running the same command again continues.
    """

    exit_code = 75


class PeerLost(Interrupted):
    """A rank timed out waiting for another rank."""


class LockLost(Interrupted):
    """Another process took over or removed the lock: this process no longer owns the work."""


@dataclass(frozen=True)
class LogEnd:
    """The error that ends a stage's log. `exit_code` is None in logs that do not state it."""

    message: str
    exit_code: int | None

    @property
    def is_interruption(self) -> bool:
        """Whether the same command continues without any change."""
        return self.exit_code == Interrupted.exit_code or self.message.startswith(STOPPED)


def end_of_log(text: str) -> LogEnd | None:
    """Return the error that ends a stage's log `text`, as the command line prints it, or None.

    The message of an internal error begins with the last line of its traceback.
    """
    lines = text.splitlines()
    start = next(
        (
            index
            for index in reversed(range(len(lines)))
            if lines[index].startswith((ERROR, STOPPED))
        ),
        None,
    )
    if start is None:
        return None
    code = next(
        (line.removeprefix(EXIT_LINE) for line in lines[start:] if line.startswith(EXIT_LINE)), ""
    )
    message = [line for line in lines[start:] if not line.startswith(EXIT_LINE)]
    if lines[start].startswith(BUG):
        message = [*lines[max(0, start - 1) : start], *message]
    said = "\n".join(message).removeprefix(ERROR).strip()
    if not said:
        return None
    return LogEnd(said, int(code) if code.isdecimal() else None)
