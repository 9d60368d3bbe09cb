"""Typed failures. Each says what happened, where, what was expected and what to do, and has an exit code.

The codes follow sysexits.h where it has a fitting one, so that a batch system can tell a mistake
in the input (do not retry) from a lost peer (retry).
"""

CONTINUES = "run the same command again to continue"  # the advice of most messages of an Interrupted
BUG = "error: this is a bug in pipeline_lib"  # begins the last line of a command that met an error of ours
EXIT_LINE = "exit code: "  # begins the last line that a stage which fails leaves in its log


def exit_line(exit_code: int) -> str:
    """The line of a stage's log that says what the stage ended with, for programs that read it."""
    return f"{EXIT_LINE}{exit_code}"


class PipelineError(Exception):
    """Base of every failure that a user can meet; its text is shown without a traceback."""

    exit_code = 1


class ConfigError(PipelineError):
    """The configuration cannot be used. `problems` holds one line per problem."""

    exit_code = 2

    def __init__(self, source: str, problems: list[str]) -> None:
        """Keep `problems`, each naming its key, for the file `source`."""
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {line}" for line in problems)]))


class DataError(PipelineError):
    """The user's data cannot be used: the message names the file and the line or row."""

    exit_code = 65


class IntegrityError(PipelineError):
    """Bytes on disk are not the bytes that were sealed."""

    exit_code = 66


class HubError(PipelineError):
    """A hub refused or could not be reached: the message names the repository, and what to do."""

    exit_code = 69


class TrainingError(PipelineError):
    """The numbers went wrong: a loss that is not finite, a merged model that differs from the trained one."""

    exit_code = 70


class Diverged(TrainingError):
    """The steps of a training cannot be trusted, wherever it runs: its settings or its data have to change."""


class Unreadable(PipelineError):
    """A file is there and cannot be read (permissions, disk, file server): it may well be whole."""

    exit_code = 74


class DiskFull(PipelineError):
    """There is no room for what has to be written."""

    exit_code = 74


class Interrupted(PipelineError):
    """Stopped from outside (a signal, a lost peer, another owner). Running the same command again continues."""

    exit_code = 75


class PeerLost(Interrupted):
    """A rank waited in vain for another one."""


class LockLost(Interrupted):
    """The lock on the work was lost, to another process or to nobody: the work is not ours any more."""
