"""Threads for what waits for disks and copies, in which Python holds no lock."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# Of cached files, through page-locked memory to an H200: 6 GB/s by one, 18 by four, 26 by eight
# and by twelve.
READERS = 8


@contextmanager
def threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `count` threads; what has not begun when an error ends it never does."""
    pool = ThreadPoolExecutor(count, name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def call_all(calls: Iterable[Callable[[], object]], name: str) -> None:
    """Make all `calls`, READERS at a time. Raises what the first of them that fails raises."""
    with threads(READERS, name) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()
