"""Errors of hubs for users: which repository, why, what to do; never a query, a token or a password."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.request import getproxies

from pipeline_lib.core.errors import DiskFull, HubError, HubOutOfReach, PipelineError
from pipeline_lib.core.files import is_disk_full
from pipeline_lib.core.text import shortened
from pipeline_lib.hub.repository import Repository

_QUERY_OR_USER = re.compile(r"\?[^\s'\")]*|(?<=://)[^/\s@]*@")
_LONGEST = 300
_NO_SOCKS = (
    "a SOCKS proxy is set: name an http:// proxy in ALL_PROXY and HTTPS_PROXY, or `pip "
    "install socksio pysocks`"
)


@dataclass(frozen=True)
class Credentials:
    """The variable that holds the token, and the token in use, if any."""

    variable: str
    token: str | None = field(repr=False)

    def __str__(self) -> str:
        if self.token is None:
            return f"{self.variable} is not set"
        return f"{self.variable} is set, but may not read it"


def refuse_impossible_token(credentials: Credentials) -> None:
    """Raise HubError for a token with characters that no token has and no request can carry."""
    strange = [
        char for char in credentials.token or "" if not char.isascii() or not char.isprintable()
    ]
    if strange:
        raise HubError(
            f"{credentials.variable} holds {strange[0]!r}, which no token has; set it again, "
            "without quotes or other characters that came with a copy"
        )


def not_set_up(hub: str, error: Exception) -> HubError:
    """Return the error for a client that failed to start: proxies and certificates decide it.

    They come from the environment.
    """
    proxies = getproxies()
    if any(address.startswith("socks") for address in proxies.values()):
        remedy = _NO_SOCKS
    elif isinstance(error, OSError):
        remedy = (
            "SSL_CERT_FILE or SSL_CERT_DIR names certificates that cannot be read: correct it or "
            "unset it"
        )
    else:
        names = ", ".join(f"{name.upper()}_PROXY" for name in sorted(proxies))
        remedy = f"check the addresses in {names or 'the environment'}"
    kind = type(error).__name__
    text = plain(str(error))
    return HubError(f"{hub}: no connection can be set up ({kind}: {text}); {remedy}")


def refused(
    repository: Repository, status: int, page: str, credentials: Credentials, hint: str = ""
) -> HubError:
    """Return the error for status 401, 403 or 404.

    `page` is the repository's page, `hint` the hub's reason.
    """
    name = credentials.variable
    page = plain(page)
    if hint == "gated":
        what = (
            f"is gated: accept its licence at {page} and set {name} to a token of that account "
            f"({credentials})"
        )
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
    """Turn the failure of a hub's package to parse an answer into a HubError.

    The package's own errors, `known`, pass through unless they are JSON errors.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # Compared by name: requests raises simplejson's class where that is installed.
        is_no_json = any(kind.__name__ == "JSONDecodeError" for kind in type(error).__mro__)
        if isinstance(error, known) and not is_no_json:
            raise
        raise HubError(
            f"{repository}: the hub's answer makes no sense ({type(error).__name__}: "
            f"{plain(str(error))}); check the "
            "mirror's address and run again; if it stays so, report it with this line"
        ) from error


def broken(repository: Repository, error: BaseException, credentials: Credentials) -> PipelineError:
    """Return the error for a failed connection or a full disk, with what to do."""
    if is_disk_full(error):
        return DiskFull(
            f"{repository}: the disk is full; free some space and run again, what has arrived is "
            "kept"
        )
    text = plain(str(error), credentials.token)
    kind = HubError
    if "CERTIFICATE" in text.upper() or "SSL" in text.upper():
        what = "the mirror's address, the proxy, SSL_CERT_FILE and REQUESTS_CA_BUNDLE"
        remedy = f"the hub's TLS certificate is not trusted here: check {what}"
    elif "SOCKS" in text.upper():
        remedy = _NO_SOCKS
    elif "redirect" in text.lower():
        remedy = "the hub redirects in a circle: check the mirror's address"
    elif "protocol" in text.lower():
        remedy = "the mirror's address begins with https://: check it"
    else:
        kind = HubOutOfReach
        remedy = (
            "check the network, the proxy and the mirror's address; run again, what has "
            "arrived is kept"
        )
    return kind(f"{repository}: {type(error).__name__}: {text or 'no reason given'}; {remedy}")


def plain(text: str, secret: str | None = None) -> str:
    """Return `text`'s first line, shortened, without `secret` and its URLs' queries and users."""
    line = _QUERY_OR_USER.sub("", (text.strip().splitlines() or [""])[0])
    return shortened(line.replace(secret, "***") if secret else line, _LONGEST)
