"""What is said of experiments before anything runs: refusals, warnings and notes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline_lib.config.schema import Config
from pipeline_lib.config.strict_yaml import undotted
from pipeline_lib.config.sweep import having
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.language import N_, _

Kind = Literal["refusal", "warning", "note"]
_KINDS: tuple[Kind, ...] = ("refusal", "warning", "note")
_TITLES = {
    "refusal": N_("the training would be refused"),
    "warning": N_("warning"),
    "note": N_("note"),
}


@dataclass(frozen=True)
class Finding:
    """What is said of an experiment before anything runs.

    A refusal says why it cannot run, a warning what may not be meant, a note what is to come. `key`
    is the key or section of the config that it is about; it is empty if it is about none. `numbers`
    are those of the sentence, by names that have their units. `among` says which experiments of a
    sweep have it; it is empty if all have.
    """

    kind: Kind
    key: str
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict, compare=False)
    among: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """`KEY: SENTENCE`, as ConfigError has problems, and which experiments have it."""
        key = f"{self.key}: " if self.key else ""
        return f"{key}{self.sentence}{self.among}"

    @property
    def line(self) -> str:
        """The text after the word for its kind, as commands print it."""
        return _("{kind}: {text}").format(kind=_(_TITLES[self.kind]), text=self.text)


def finding_of(kind: Kind, text: str) -> Finding:
    """Return the finding that `text` says: `KEY: SENTENCE`, or a sentence about no key.

    What stands before the colon is a key only if the config has its section: it may also be the
    name of a host.
    """
    key, colon, sentence = text.partition(": ")
    keys = undotted(key)
    if colon and keys and keys[0] in Config.model_fields:
        return Finding(kind, key, sentence)
    return Finding(kind, "", text)


def refusals(problems: Iterable[str]) -> list[Finding]:
    """Return the refusals for such problems as ConfigError has."""
    return [finding_of("refusal", problem) for problem in problems]


def merged(found: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Return each distinct finding of a sweep once: refusals, then warnings, then notes.

    `found` has the findings of each experiment by its name.
    """
    distinct = [replace(finding, among=among) for finding, among in having(found)]
    return sorted(distinct, key=lambda finding: _KINDS.index(finding.kind))


def refuse(source: str, findings: Iterable[Finding]) -> None:
    """Raise ConfigError for `source` with all refusals among `findings`, if there are any."""
    problems = [finding.text for finding in findings if finding.kind == "refusal"]
    if problems:
        raise ConfigError(source, problems)
