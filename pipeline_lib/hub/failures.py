"""Words for what goes wrong with a hub: which repository, why, what to do; never a query, a token or a password."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline_lib.base.errors import DiskFull, HubError, PipelineError
from pipeline_lib.base.fsio import is_disk_full
from pipeline_lib.base.redact import shortened
from pipeline_lib.hub.repository import Repository

_QUERY_OR_USER = re.compile(r"\?[^\s'\")]*|(?<=://)[^/\s@]*@")
_LONGEST = 300


@dataclass(frozen=True)
class Credentials:
    """The variable that would hold the token, and the token that is used, if any."""

    variable: str
    token: str | None = field(repr=False)

    def __str__(self) -> str:
        return f"{self.variable} is not set" if self.token is None else f"{self.variable} is set, but may not read it"


def refused(repository: Repository, status: int, page: str, credentials: Credentials, hint: str = "") -> HubError:
    """The error for an answer 401, 403 or 404. `page` is the repository's page, `hint` what the hub says of it."""
    name, page = credentials.variable, plain(page)
    if hint == "gated":
        what = f"is gated: accept its licence at {page} and set {name} to a token of that account ({credentials})"
    elif hint == "revision":
        what = "has no such revision; give `revision` a commit, tag or branch that it has"
    elif hint == "file":
        what = "has no such file at this commit, though it may be listed; give another `revision`"
    elif hint == "repository" or status == 404:
        what = f"does not exist, or is private; check `name` at {page} ({credentials})"
    else:
        what = f"may not be read with these credentials; see {page} ({credentials})"
    return HubError(f"{repository}: HTTP {status}: it {what}")


@contextmanager
def answers_read(repository: Repository, known: tuple[type[Exception], ...]) -> Iterator[None]:
    """Around calls of a hub's package: what else it raises than the errors that it means, `known`, is a HubError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # By name: where simplejson is installed, requests raises that one's.
        is_no_json = any(kind.__name__ == "JSONDecodeError" for kind in type(error).__mro__)
        if isinstance(error, known) and not is_no_json:
            raise
        raise HubError(
            f"{repository}: the hub's answer makes no sense ({type(error).__name__}: {plain(str(error))}); check the "
            "mirror's address and run again; if it stays so, report it with this line"
        ) from error


def broken(repository: Repository, error: BaseException, credentials: Credentials) -> PipelineError:
    """The error for a connection that fails."""
    if is_disk_full(error):
        return DiskFull(f"{repository}: the disk is full; free some space and run again, what has arrived is kept")
    text = plain(str(error), credentials.token)
    if "CERTIFICATE" in text.upper() or "SSL" in text.upper():
        remedy = "the hub's TLS certificate is not trusted here: check the mirror's address, the proxy, SSL_CERT_FILE"
    elif "redirect" in text.lower():
        remedy = "the hub redirects in a circle: check the mirror's address"
    else:
        remedy = "check the network, the proxy and the mirror's address; run again, what has arrived is kept"
    return HubError(f"{repository}: {type(error).__name__}: {text or 'no reason given'}; {remedy}")


def plain(text: str, secret: str | None = None) -> str:
    """The first line of `text`, shortened, without the queries and users of its URLs and without `secret`."""
    line = _QUERY_OR_USER.sub("", (text.strip().splitlines() or [""])[0])
    return shortened(line.replace(secret, "***") if secret else line, _LONGEST)
