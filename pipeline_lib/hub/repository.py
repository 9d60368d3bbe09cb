"""Types for repositories of a hub, the interface of a hub client, checks of names, and errors."""

import json
import multiprocessing
import re
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, TypeVar
from urllib.request import getproxies

from pipeline_lib.core.errors import (
    DataError,
    DiskFull,
    HubError,
    HubOutOfReach,
    IntegrityError,
    PipelineError,
)
from pipeline_lib.core.files import is_disk_full
from pipeline_lib.core.store import MANIFEST_NAME
from pipeline_lib.core.text import shortened
from pipeline_lib.core.units import count

# Repositories, their files, and the interface of a hub client. The clients in `huggingface` and
# `modelscope` are thin layers over the hub's own package, which is imported only when something is
# looked up or fetched.

Hub = Literal["huggingface", "modelscope"]
Kind = Literal["model", "dataset"]
Arrived = Callable[[int], None]  # receives the number of bytes since the last call; may be negative

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Return whether `revision` is a full commit ID (40 hex digits), which needs no lookup."""
    return _COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True)
class Repository:
    """A repository of a hub; `name` is `owner/name`."""

    hub: Hub
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.hub} {self.kind} {self.name}"


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it: its size in bytes and its hash.

    `algorithm` is `sha256`, or `git` for the SHA-1 of a git blob. `chunked` means that the hub also
    serves it by its own accelerated protocol.
    """

    name: str
    size: int
    algorithm: Literal["sha256", "git"]
    digest: str
    chunked: bool = False
    is_link: bool = False


class HubClient(Protocol):
    """The interface of a hub client.

    Its methods raise the package's own errors, which are among `errors`; `explain` turns them into
    errors for the user. Conditions that may pass with time are raised as Busy.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The error types that the hub's package raises."""

    def resolve(self, repository: Repository, revision: str | None) -> str:
        """Return the current commit of `revision` (None: main branch); from the cache if there."""

    def list_files(self, repository: Repository, commit: str) -> list[RemoteFile]:
        """Return all files at `commit`, including symbolic links and submodules."""

    def download(
        self, repository: Repository, commit: str, file: RemoteFile, work: Path, arrived: Arrived
    ) -> Path:
        """Download one file, resuming if partial; return its path in the cache or below `work`."""

    def explain(self, repository: Repository, error: Exception) -> PipelineError:
        """Return the user's error: what happened and what to do, without queries or secrets.

        Secrets are tokens and passwords.
        """


# Checks of untrusted names, before anything is written. A name that leads out of its folder makes
# the whole repository unacceptable. A name that cannot be stored (too long, or equal to another
# except for case) does so only if wanted.

_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_BYTES = 255  # per path component
_LONGEST_PATH_BYTES = 1024  # leaves room within PATH_MAX (4096) for the path of the target folder


def check_names(
    repository: Repository, listed: Iterable[RemoteFile], wanted: Collection[RemoteFile]
) -> None:
    """Raise DataError with the name if a listed name is hostile or a wanted one unstorable."""
    for file in listed:
        if why := _leads_out(file.name):
            raise DataError(
                f"{repository}: refused, nothing was written: the file name {file.name!r} {why}"
            )
    for file in wanted:
        if why := _unusable(file):
            raise DataError(f"{repository}: refused, nothing was written: {file.name!r} {why}")
    seen: dict[str, str] = {}
    for file in wanted:
        for path in (PurePosixPath(file.name), *PurePosixPath(file.name).parents):
            known = seen.setdefault(str(path).casefold(), str(path))
            if known != str(path):
                raise DataError(
                    f"{repository}: refused, nothing was written: {known!r} and {str(path)!r} are "
                    "one file where disks ignore case"
                )


def check_index(repository: Repository, index: Path, name: str, listed: Collection[str]) -> None:
    """Check that the safetensors index at `index`, listed as `name`, names only files of `listed`.

    Raises DataError if it does not parse or names anything but a weights file beside it,
    IntegrityError if named files are missing.
    """
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        shards = sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{repository}: {name} is no safetensors index ({type(error).__name__}: {error})"
        ) from error
    for shard in shards:
        if (
            not isinstance(shard, str)
            or "/" in shard
            or _leads_out(shard)
            or not shard.endswith(".safetensors")
        ):
            raise DataError(
                f"{repository}: refused: {name} names {shard!r}, which is no weights file beside it"
            )
    if missing := [shard for shard in shards if shard not in listed]:
        raise IntegrityError(
            f"{repository}: {name} names {count(len(missing), 'files')} that the repository does "
            f"not have, {missing[0]!r} first; give another `revision`"
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first ten of `names` and the number of the others, for messages."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "none") + more


def _leads_out(name: str) -> str | None:
    parts = name.split("/")
    if not name or name.startswith("/") or _DRIVE.match(name):
        return "is an absolute path"
    if "\\" in name:
        return "has a backslash"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "has control characters"
    if ".." in parts or "." in parts or "" in parts:
        return "leads out of its folder"
    if any(part.casefold() == ".git" for part in parts):
        return "is a part of git's own folder"
    return None


def _unusable(file: RemoteFile) -> str | None:
    if file.is_link:
        return "is a symbolic link or submodule"
    if max(len(part.encode()) for part in file.name.split("/")) > _LONGEST_BYTES:
        return f"has a name of more than {_LONGEST_BYTES} bytes"
    if len(file.name.encode()) > _LONGEST_PATH_BYTES:
        return f"has a path of more than {_LONGEST_PATH_BYTES} bytes"
    if file.name.casefold() == MANIFEST_NAME:
        return "has a name that is reserved here"
    if file.size < 0 or not file.digest:
        return "has no size and hash on the hub, so it cannot be verified"
    return None


# Errors for users: which repository, why, what to do; never a query, a token or a password.

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
        return (
            f"{self.variable} is not set"
            if self.token is None
            else f"{self.variable} is set, but may not read it"
        )


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


# Retries of a busy hub (429 and 5xx answers) within one budget, with the waits that the hub asks
# for. Failures inside a transfer (a lost connection, a short body, a silent server) are retried and
# resumed by the hubs' own clients only.

BUSY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
ATTEMPTS = 5
BUDGET_S = 300.0
FIRST_WAIT_S = 1.0
DEADLINE_S = 1800.0  # for a lookup or a listing, including waits

Result = TypeVar("Result")


class Busy(Exception):
    """The hub cannot answer now. `wait_s` is the wait in seconds that it asks for, if any."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        """Store the reason, without addresses or secrets, and the wait."""
        super().__init__(reason)
        self.wait_s = wait_s


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return a Retry-After header's wait in seconds; None if it is missing or invalid.

    The header holds seconds or a date.
    """
    value = next(
        (text.strip() for name, text in headers.items() if name.lower() == "retry-after"), ""
    )
    if value.isdecimal():
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def patiently(call: Callable[[], Result], doing: str, say: Callable[[str], None]) -> Result:
    """Return the result of `call`; retry while the hub is Busy.

    Raises HubError when the budget is spent.
    """
    attempt, waited_s = 1, 0.0
    while True:
        try:
            return call()
        except Busy as busy:
            wait_s = FIRST_WAIT_S * 2 ** (attempt - 1) if busy.wait_s is None else busy.wait_s
            if attempt == ATTEMPTS or waited_s + wait_s > BUDGET_S:
                asked = "" if busy.wait_s is None else f" and asks to wait {busy.wait_s:.0f} s"
                times = "once" if attempt == 1 else f"{attempt} times"
                raise HubError(
                    f"{doing}: {busy}{asked}; tried {times}; run again later, what has arrived is "
                    "kept"
                ) from busy
            say(f"{doing}: {busy}; trying again in {wait_s:.0f} s")
        time.sleep(wait_s)
        attempt = attempt + 1
        waited_s = waited_s + wait_s


def in_time(call: Callable[[], Result], doing: str) -> Result:
    """Return the result of `call`.

    Raises HubError after DEADLINE_S; the thread of the call is left behind.
    """
    with ThreadPool(1) as pool:
        try:
            return pool.apply_async(call).get(DEADLINE_S)
        except multiprocessing.TimeoutError as error:
            raise HubError(
                f"{doing}: no whole answer within {DEADLINE_S:.0f} s; run again later"
            ) from error
