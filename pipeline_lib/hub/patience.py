"""Retries of a busy hub (429 and 5xx answers) within one budget, with the waits that the hub asks for.

Failures inside a transfer (a lost connection, a short body, a silent server) are retried and
resumed by the hubs' own clients only.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool
from typing import TypeVar

from pipeline_lib.core.errors import HubError

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
