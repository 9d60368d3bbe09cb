"""The certificate of a served model: all checks in order, its page, and its JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_lib.certify.checks import (
    ANSWERS,
    END,
    GIVEN_NATS,
    NOT_THE_BASE,
    Check,
    CheckVerdict,
    ask,
    check_answers,
    check_base,
    check_end,
    check_given_nats,
    check_own_nats,
    check_template,
    check_tokenizer,
    given_nats,
)
from pipeline_lib.certify.questions import KINDS, questions_of
from pipeline_lib.certify.reference import reference_of
from pipeline_lib.certify.server import Server
from pipeline_lib.certify.tolerances import TOLERANCES
from pipeline_lib.core.errors import ServedDiffers, ServerError
from pipeline_lib.core.files import json_text
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import one_line

_STYLES = {
    CheckVerdict.SAME: "green",
    CheckVerdict.DIFFERS: "bold red",
    CheckVerdict.NOT_CHECKED: "yellow",
}
_OTHER_PROMPT = "the server asks the model another prompt: see the template"
_ANOTHER_MODEL = "this is another model"
_OF_PROMPT = ("tokenizer", "template")  # how the names of the checks of a prompt begin
_OTHER_WEIGHTS = "other weights, weights of fewer bits than --weights says, or other sampling"


@dataclass(frozen=True)
class Certificate:
    """Whether `model`, served at `endpoint`, is the model in `folder`."""

    folder: str
    endpoint: str
    model: str
    weights: str
    checks: list[Check]

    def of(self, verdict: CheckVerdict) -> list[Check]:
        """Return the checks with this verdict."""
        return [check for check in self.checks if check.verdict is verdict]

    @property
    def verdict(self) -> CheckVerdict:
        """Differs if any check does; the same if at least one is, and none differs."""
        for verdict in (CheckVerdict.DIFFERS, CheckVerdict.SAME):
            if self.of(verdict):
                return verdict
        return CheckVerdict.NOT_CHECKED

    @property
    def difference(self) -> str:
        """What the checks that differ come to: other weights, another prompt, or no end."""
        differing = {check.name for check in self.of(CheckVerdict.DIFFERS)}
        same = {check.name for check in self.of(CheckVerdict.SAME)}
        if differing & {GIVEN_NATS, NOT_THE_BASE}:
            return _ANOTHER_MODEL
        is_asked_otherwise = any(name.startswith(_OF_PROMPT) for name in differing)
        if is_asked_otherwise and GIVEN_NATS in same:
            return "the weights are the model's, and they are asked another prompt"
        if is_asked_otherwise:
            return "the model is asked another prompt, so its weights were not told"
        if differing == {END}:
            return "this is the model, and its answers do not end where they should"
        return _ANOTHER_MODEL

    def raise_unless_same(self) -> None:
        """Raise ServedDiffers if a check differs, ServerError if nothing could be checked."""
        where = f"{self.endpoint}: {self.model}"
        if differing := self.of(CheckVerdict.DIFFERS):
            lines = [f"{where} does not serve {self.folder} as it is: {self.difference}"]
            for check in differing:
                cause = f"; likely {check.cause}" if check.cause else ""
                lines.append(f"  - {check.name}: {check.found}{cause}")
            raise ServedDiffers("\n".join(lines))
        if not self.of(CheckVerdict.SAME):
            [reason] = [check.found for check in self.checks if check.name == ANSWERS]
            raise ServerError(f"{where}: the server offers nothing that can be checked ({reason})")


def certify(
    folder: Path,
    store: Store,
    server: Server,
    weights: str,
    prompts: int,
    max_new_tokens: int,
    say: Say,
) -> Certificate:
    """Return the certificate of what `server` serves, held in `weights`, a key of TOLERANCES.

    Raises DataError if the model in `folder` cannot be asked, ConfigError without a name to ask
    for, ServerError if the server cannot be reached.
    """
    model = server.choose_model()  # before the model is loaded, which takes long
    questions = questions_of(folder, store, prompts)
    reference = reference_of(folder, store, questions, max_new_tokens, say)
    tokenizer = reference.tokenizer
    tolerance = TOLERANCES[weights]
    say(f"asking {server.endpoint} {len(questions)} questions")
    served = [ask(server, each, max_new_tokens) for each in reference.expected]
    given = given_nats(server, reference.expected)
    checks = [check_tokenizer(server, reference.expected, tokenizer)]
    checks += [check_template(server, kind, served, tokenizer) for kind in KINDS]
    checks.append(check_answers(served, tokenizer, tolerance))
    checks.append(check_own_nats(served, tokenizer, tolerance))
    checks.append(check_given_nats(given, reference.expected, tolerance))
    checks.append(check_end(served, tokenizer))
    checks.append(check_base(reference.base, served, given, tokenizer))
    return Certificate(str(folder), server.endpoint, one_line(model), weights, _with_causes(checks))


def _with_causes(checks: Sequence[Check]) -> list[Check]:
    """Return `checks` with the likely cause of each that differs: what other checks tell of it."""
    *others, base = checks
    cause = _OTHER_WEIGHTS
    for check in others:
        if check.verdict is CheckVerdict.DIFFERS and check.name.startswith("template"):
            cause = _OTHER_PROMPT
    if base.verdict is CheckVerdict.DIFFERS:
        cause = base.cause
    found = []
    for check in checks:
        has_none = check.verdict is CheckVerdict.DIFFERS and not check.cause
        found.append(replace(check, cause=cause) if has_none else check)
    return found


def show(certificate: Certificate, stream: TextIO) -> None:
    """Write the page to `stream`: what is compared, a line for each check, and the verdict."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    tolerance = TOLERANCES[certificate.weights]
    console.print(
        f"{certificate.endpoint} serves {certificate.model}; expected {certificate.folder}, with "
        f"the tolerances of {certificate.weights} ({tolerance.reason})",
        soft_wrap=True,
    )
    table = Table("check", "verdict", "by", "found")
    for check in certificate.checks:
        found = f"{check.found}; likely {check.cause}" if check.cause else check.found
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        table.add_row(check.name, verdict, Text(check.by), Text(found))
    console.print(table)
    console.print(_conclusion(certificate), soft_wrap=True)


def _conclusion(certificate: Certificate) -> Text:
    verdict = certificate.verdict
    left = certificate.of(CheckVerdict.NOT_CHECKED)
    text = {
        CheckVerdict.SAME: f"all that was checked is the same ({len(certificate.of(verdict))} checks",
        CheckVerdict.DIFFERS: f"{certificate.difference} ({len(certificate.of(verdict))} checks differ",
        CheckVerdict.NOT_CHECKED: "nothing could be checked (0 checks",
    }[verdict]
    return Text(f"{text}, {len(left)} not checked)", style=_STYLES[verdict])


def to_json(certificate: Certificate) -> str:
    """Return the certificate as a JSON object."""
    return json_text({"verdict": certificate.verdict, **asdict(certificate)})
