"""Files that git has not committed: commands that write tracked files print how to commit them."""

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def how_to_commit(paths: Sequence[Path], message: str) -> str | None:
    """Return the git command that commits those of `paths` that differ from the last commit.

    `paths` are files that were written or removed. Returns None if none differs, outside a git work
    tree, and for files that git ignores.
    """
    changed = []
    for path in map(str, paths):
        command = [
            "git",
            "--no-optional-locks",
            "--literal-pathspecs",
            "status",
            "--porcelain",
            "--",
            path,
        ]
        with suppress(FileNotFoundError):  # git is not installed
            if subprocess.run(command, capture_output=True, check=False).stdout:
                changed.append(path)
    if not changed:
        return None
    names = shlex.join(changed)
    return (
        f"git has not committed {', '.join(changed)}; to commit what changed:\n"
        f"  git add -- {names} && git commit -m {shlex.quote(message)} -- {names}"
    )
