"""A spec says what one stage computes; its digest is the cache key and names everything made from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import canonical_json, sha256_text

DIGEST_CHARS = 16


@dataclass(frozen=True)
class Ref:
    """A stage instance, by name and digest."""

    stage: str
    digest: str


@dataclass(frozen=True)
class Spec:
    """The settings that decide what a stage computes, its version, and the digests of what it reads.

    `settings` holds only what differs from the defaults of that stage version, so that a new option
    changes no old digest. `where` tells where the content lies on this machine; it is not hashed.
    """

    stage: str
    version: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Ref] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of all that decides what is computed, the digests of the inputs included."""
        keyed = {key: value for key, value in self.to_json().items() if key != "where"}
        return sha256_text(canonical_json(keyed))[:DIGEST_CHARS]

    @property
    def ref(self) -> Ref:
        """How other specs name this one."""
        return Ref(self.stage, self.digest)

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON, the form that is stored."""
        return {
            "stage": self.stage,
            "version": self.version,
            "settings": dict(self.settings),
            "inputs": {name: {"stage": ref.stage, "digest": ref.digest} for name, ref in self.inputs.items()},
            "where": dict(self.where),
        }

    @staticmethod
    def from_json(value: Any, where: str) -> "Spec":
        """Parse what `to_json` made; raises IntegrityError naming `where`."""
        try:
            inputs = {name: Ref(ref["stage"], ref["digest"]) for name, ref in value["inputs"].items()}
            settings, places = dict(value["settings"]), dict(value["where"])
            return Spec(str(value["stage"]), int(value["version"]), settings, inputs, places)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"{where}: not a stage spec ({error!r}); run snakemake to write it anew") from error
