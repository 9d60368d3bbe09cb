"""Which commit a branch or tag was when it was first looked up: `revisions.json` in the store.

A branch that moves changes no experiment: its entry stays until somebody deletes it or names another revision.
A revision that is a commit already needs neither the file nor the network.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DiskFull
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.hub.clients import resolve
from pipeline_lib.hub.repository import Repository, is_commit


@dataclass
class Revisions:
    """The commits that were looked up so far, by repository and revision, remembered in the file at `path`."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: bool = False

    @staticmethod
    def load(path: Path) -> "Revisions":
        """What is remembered at `path`; nothing if it is missing or damaged."""
        return Revisions(path, _read(path))

    def commit_of(self, repository: Repository, revision: str | None) -> str:
        """The commit of `revision`, or of the main branch: remembered, or asked of the hub. Raises HubError."""
        if revision is not None and is_commit(revision):
            return revision
        key = f"{repository} {revision or 'main branch'}"
        commit = self.entries.get(key, {}).get("commit")
        if isinstance(commit, str) and is_commit(commit):
            return commit
        commit = resolve(repository, revision)
        self.entries[key] = {"commit": commit, "looked_up": datetime.now(UTC).isoformat(timespec="seconds")}
        self.changed = True
        return commit

    def save(self) -> None:
        """Write what was learned. A store that cannot be written costs only the time of asking again.

        What another process learned meanwhile wins: its experiment may be running already.
        """
        if not self.changed:
            return
        self.entries |= _read(self.path)
        try:
            write_json(self.path, self.entries)
        except (OSError, DiskFull):
            return
        self.changed = False


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = dict(read_json(path))
    except (OSError, ValueError, TypeError):
        entries = {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}
