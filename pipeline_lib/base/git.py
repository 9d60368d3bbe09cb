"""What git has yet to commit: commands that write files which git tracks say so at their end."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path


def how_to_commit(paths: Sequence[Path], message: str) -> str | None:
    """The command that commits those of `paths`, written or removed, that differ from git's last commit.

    None where none does, outside a git work tree, and for files that git ignores.
    """
    changed = [str(path) for path in paths if _differs(path)]
    if not changed:
        return None
    names = shlex.join(changed)
    return (
        f"git has not committed {', '.join(changed)}; to commit what changed:\n"
        f"  git add -- {names} && git commit -m {shlex.quote(message)} -- {names}"
    )


def _differs(path: Path) -> bool:
    command = ["git", "--no-optional-locks", "--literal-pathspecs", "status", "--porcelain", "--", str(path)]
    try:
        return subprocess.run(command, capture_output=True, check=False).stdout != b""
    except FileNotFoundError:  # there is no git here
        return False
