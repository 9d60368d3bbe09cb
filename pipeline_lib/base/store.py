"""Where everything lies: sealed directories and their pointers in the store, working state beside it."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, IntegrityError
from pipeline_lib.base.fsio import (
    is_there,
    read_json,
    sha256_file,
    unreadable_named,
    unwritable,
    write_json,
    write_text,
)
from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.verified import NOTHING_VERIFIED, VerifiedFiles


@dataclass(frozen=True)
class Store:
    """A folder of sealed directories, `STAGE/DIGEST/`, each with a pointer file `STAGE/DIGEST.ok`.

    Snakemake's declared outputs are the pointers: it deletes outputs when a job starts, fails or is rerun,
    and sealed data must survive exactly that.
    """

    root: Path
    verified: VerifiedFiles = field(default=NOTHING_VERIFIED, compare=False)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "Store":
        """`$PIPELINE_STORE`, else `$DVC_ROOT/store`, else `./store`."""
        dvc_root = environ.get("DVC_ROOT")
        root = environ.get("PIPELINE_STORE") or (Path(dvc_root) / "store" if dvc_root else "store")
        return Store(Path(root), VerifiedFiles.from_env(environ))

    @staticmethod
    def around(frozen: Path, environ: Mapping[str, str]) -> "Store":
        """That in which `frozen` lies, a spec or an experiment."""
        return Store(frozen.parent.parent, VerifiedFiles.from_env(environ))

    def require_writable(self) -> None:
        """Raise ConfigError if nothing can be written where the store is or will be, or if its path has a wildcard."""
        if set("{}") & set(str(self.root)):
            text = "its path holds a brace, which Snakemake takes for a wildcard; set PIPELINE_STORE to one without"
            raise ConfigError(f"the store {self.root}", [text])
        if problem := unwritable(self.root):
            raise ConfigError(f"the store {self.root}", [f"{problem}; set PIPELINE_STORE to a folder that can be"])

    def blamed(self, error: OSError) -> ConfigError:
        """What to tell of `error`: in the store another store is the remedy, elsewhere the file says enough."""
        file = Path(os.fsdecode(error.filename or ""))
        if file.absolute().is_relative_to(self.root.absolute()):
            remedy = "set PIPELINE_STORE to a folder that can be written"
            return ConfigError(f"the store {self.root}", [f"{error}; {remedy}"])
        where = error.filename or f"the store {self.root}, or the folder of this output"
        return ConfigError(str(where), [error.strerror or str(error)])

    def spec_path(self, digest: str) -> Path:
        """The frozen spec of a stage instance."""
        return self.root / "specs" / f"{digest}.json"

    def sealed(self, ref: Ref) -> Path:
        """The sealed directory of a stage instance."""
        return self.root / ref.stage / ref.digest

    def is_sealed(self, ref: Ref) -> bool:
        """Whether that directory is there, whole unless somebody damaged it since. Raises Unreadable."""
        path = self.sealed(ref) / MANIFEST_NAME
        with unreadable_named(path):
            return is_there(path)

    def pointer(self, ref: Ref) -> Path:
        """The file that tells Snakemake that the sealed directory is there."""
        return self.root / ref.stage / f"{ref.digest}.ok"

    def run_dir(self, digest: str) -> Path:
        """Working state that is not sealed: checkpoints in progress, events, quarantined rows."""
        return self.root.parent / "runs" / digest

    def lock_path(self, digest: str) -> Path:
        """The lock that the one process working on `digest` holds."""
        return self.root.parent / "runs" / "locks" / digest

    def write_specs(self, specs: Iterable[Spec]) -> None:
        """Freeze `specs`; a queued job reads its own, so later edits of the YAML change nothing for it."""
        for spec in specs:
            path = self.spec_path(spec.digest)
            try:
                known = Spec.from_json(read_json(path), str(path))
            except (OSError, ValueError, IntegrityError):
                known = None
            if known != spec:
                write_json(path, spec.to_json())

    def read_spec(self, path: Path) -> Spec:
        """The spec frozen at `path`, checked against the digest that is its name."""
        try:
            spec = Spec.from_json(read_json(path), str(path))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{path}: cannot read the spec ({error}); run snakemake to write it anew") from error
        if spec.digest != path.stem:
            raise IntegrityError(f"{path}: its content has digest {spec.digest}; delete it and run snakemake again")
        return spec

    def write_pointer(self, ref: Ref) -> None:
        """Tell Snakemake that the sealed directory of `ref` is complete."""
        write_text(self.pointer(ref), sha256_file(self.sealed(ref) / MANIFEST_NAME) + "\n")

    def drop_dangling_pointers(self, specs: Iterable[Spec]) -> None:
        """Remove pointers whose sealed directory is not there, and those of what was made from such a directory.

        Snakemake then makes it again, also where its pointer was lost with it; without the second half it would find
        the end result and do nothing. Pointers that hold no hash go too: their stage verifies its directory and writes
        them anew. `specs` come in the order of the stages.
        """
        lost: set[Ref] = set()
        for spec in specs:
            pointer = self.pointer(spec.ref)
            with unreadable_named(pointer):
                is_garbled = is_there(pointer) and not is_hash(pointer.read_bytes())
            if not self.is_sealed(spec.ref) or lost & set(spec.inputs.values()):
                lost.add(spec.ref)
                pointer.unlink(missing_ok=True)
            elif is_garbled:
                pointer.unlink(missing_ok=True)


def is_hash(content: bytes) -> bool:
    """Whether the content of a pointer is a sha256, as `write_pointer` writes it."""
    return re.fullmatch(rb"[0-9a-f]{64}\n?", content) is not None
