"""Messages between the training stage and an agent: JSON in lines, over pipes or a socket.

Neither side ever blocks on the other: a thread writes what was sent, and a thread reads what
arrives. A cut link shows as silence, and only an orderly end as `ChannelClosed`.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Protocol

from pipeline_lib.core.errors import PipelineError

MAX_LINE_BYTES = 1 << 20
_MARK = "@agent "  # a login shell may print lines of its own


class ChannelClosed(PipelineError):
    """The other side has ended, or its messages cannot be trusted."""

    exit_code = 75


class Codec(Protocol):
    """How a message becomes a line and a line a message."""

    def encode(self, text: str) -> str:
        """Return the line, without its end, that carries `text`."""
        ...

    def decode(self, line: str) -> str | None:
        """Return the text in `line`; None if the line is no message.

        Raise ChannelClosed if it is forged.
        """
        ...


class Marked:
    """A codec for pipes, whose ends trust each other: a mark tells messages from other output."""

    def encode(self, text: str) -> str:
        """Put the mark before `text`."""
        return _MARK + text

    def decode(self, line: str) -> str | None:
        """Remove the mark; None without one."""
        return line.removeprefix(_MARK) if line.startswith(_MARK) else None


class Channel:
    """One end. `noise` gets the lines that are no messages.

    A process that gives its standard input must give a duplicate of it, `os.fdopen(os.dup(0),
    "rb")`: Python aborts at its end if a thread still reads `sys.stdin`. `hang_up` tells the other
    side that nothing follows, where closing the writer does not: at a socket that is read.
    """

    def __init__(
        self,
        reader: IO[bytes],
        writer: IO[bytes],
        codec: Codec | None = None,
        noise: Callable[[str], None] = lambda _: None,
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to read from `reader` and to write to `writer`."""
        self._reader = reader
        self._writer = writer
        self._codec = codec or Marked()
        self._noise = noise
        self._hang_up = hang_up
        self._outgoing: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[dict[str, Any] | ChannelClosed] = queue.SimpleQueue()
        self._end: ChannelClosed | None = None
        self._heard_s = time.monotonic()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def silent_s(self) -> float:
        """For how long nothing has arrived, in seconds."""
        return time.monotonic() - self._heard_s

    def send(self, message: dict[str, Any]) -> None:
        """Queue `message` for the other side.

        Whether it arrives shows in the answer, or in silence.
        """
        self._outgoing.put(json.dumps(message))

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None if none arrives within `timeout_s`.

        Raise ChannelClosed at the end.
        """
        if self._end is not None:
            raise self._end
        try:
            found = self._incoming.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(found, ChannelClosed):
            self._end = found
            raise found
        return found

    def close(self, flush_s: float = 2.0) -> None:
        """Write what is queued, for at most `flush_s`, and close the writing side."""
        self._outgoing.put(None)
        self._threads[1].join(flush_s)
        self._hang_up()

    def _read(self) -> None:
        reason = "its messages could not be read"
        try:
            while line := self._reader.readline(MAX_LINE_BYTES):
                self._heard_s = time.monotonic()
                self._take(line)
            reason = "it closed the connection"
        except ChannelClosed as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:  # the file was closed
            reason = str(error)
        finally:  # whatever happens here, the owner must learn that nothing follows
            self._incoming.put(ChannelClosed(reason))

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise ChannelClosed(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
        # else the connection was cut in the line
        content = self._codec.decode(text) if line.endswith(b"\n") else None
        if content is None:
            self._noise(text)
            return
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ChannelClosed(f"it sent a message that cannot be read ({error})") from error
        if isinstance(message, dict):
            self._incoming.put(message)

    def _write(self) -> None:
        with suppress(OSError, ValueError):  # the reader learns of the end
            while (text := self._outgoing.get()) is not None:
                self._writer.write(self._codec.encode(text).encode() + b"\n")
                self._writer.flush()
        with suppress(OSError, ValueError):
            self._writer.close()
