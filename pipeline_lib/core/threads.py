"""Threads for what waits for disks and copies, in which Python holds no lock."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# one reads 4 GB/s of cached files to a GPU, and the file system and the bus can do more
READERS = 4


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
