import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import IO, Any

import pytest

from pipeline_lib.hosts.channel import MAX_LINE_BYTES, Channel, ChannelClosed
from tests.processes import wait_for

WAIT_S = 30.0
ECHO = """
import os
from pipeline_lib.hosts.channel import Channel, ChannelClosed
print("Welcome to gpu1", flush=True)  # as a login shell does
channel = Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
try:
    while True:
        message = channel.receive(60.0)
        print("about to answer", flush=True)
        channel.send({"answer": message})
except ChannelClosed as end:
    channel.send({"end": str(end)})
    channel.close()
"""


class Pipes:
    """A channel over pipes whose other ends the test holds."""

    def __init__(self) -> None:
        """Begin with nothing written."""
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        self.from_us = os.fdopen(their_input, "rb")
        self.to_us = os.fdopen(their_output, "wb", buffering=0)
        self.noise: list[str] = []
        self.channel = Channel(
            os.fdopen(our_input, "rb"), os.fdopen(our_output, "wb"), noise=self.noise.append
        )


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    for file in (made.to_us, made.from_us):
        file.close()


def end_of(channel: Channel) -> str:
    """Why the channel ended; its messages before that are dropped."""
    with pytest.raises(ChannelClosed) as end:
        while channel.receive(WAIT_S) is not None:
            pass
    return str(end.value)


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def files_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout is not None and process.stdin is not None
    return process.stdout, process.stdin


def test_a_process_answers_and_learns_of_the_end() -> None:
    noise: list[str] = []
    with start(ECHO) as process:
        channel = Channel(*files_of(process), noise=noise.append)
        message = {"text": "naïve ☃\n@agent {}", "list": [1, None, 2.5], "@agent ": {}}
        channel.send(message)

        assert channel.receive(WAIT_S) == {"answer": message}
        channel.close()
        assert channel.receive(WAIT_S) == {"end": "it closed the connection"}
        assert end_of(channel) == "it closed the connection"
        assert process.wait(WAIT_S) == 0
    assert noise == ["Welcome to gpu1", "about to answer"]


def test_a_killed_process_is_the_end_each_time_that_it_is_asked() -> None:
    with start(ECHO) as process:
        channel = Channel(*files_of(process))
        channel.send({})
        assert channel.receive(WAIT_S) == {"answer": {}}
        process.send_signal(signal.SIGKILL)

        assert [end_of(channel) for _ in range(2)] == ["it closed the connection"] * 2
        channel.send({"to": "nobody"})  # raises nothing: the reader tells
        channel.close()


def test_a_process_ends_well_while_the_other_side_still_listens() -> None:
    with start(ECHO.replace("while True", "for _ in range(1)") + "channel.close()") as process:
        channel = Channel(*files_of(process))
        channel.send({})

        assert channel.receive(WAIT_S) == {"answer": {}}
        assert process.wait(WAIT_S) == 0
        channel.close()


def test_messages_arrive_in_order_and_whole(pipes: Pipes) -> None:
    big = "x" * 100_000

    def send(name: str) -> None:
        for number in range(200):
            pipes.channel.send({"from": name, "n": number})

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipes.channel.send({"big": big})

    lines = [json.loads(pipes.from_us.readline().removeprefix(b"@agent ")) for _ in range(601)]
    assert all(
        [line["n"] for line in lines[:-1] if line["from"] == name] == list(range(200))
        for name in "abc"
    )
    assert lines[-1] == {"big": big}


def test_what_is_no_message_is_noise(pipes: Pipes) -> None:
    pipes.to_us.write(
        b"\nLast login: today\r\n {} \n@agen {}\n\xff\xfe\x00\n@agent [1, 2]\n@agent 7\n"
    )
    pipes.to_us.write(b'@agent {"a": 1}\r\n')

    assert pipes.channel.receive(WAIT_S) == {"a": 1}
    assert pipes.noise == ["", "Last login: today", " {} ", "@agen {}", "\ufffd\ufffd\x00"]


def test_silence_is_no_end(pipes: Pipes) -> None:
    begin_s = monotonic()

    assert pipes.channel.receive(0.2) is None
    assert monotonic() - begin_s >= 0.19
    assert pipes.channel.receive(-5.0) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"@agent {\n", "it sent a message that cannot be read (Expecting property name"),
        (
            b"@agent " + b"x" * MAX_LINE_BYTES + b"\n",
            f"it sent a line of more than {MAX_LINE_BYTES} bytes",
        ),
        (b"noise without an end " * 100_000, f"it sent a line of more than {MAX_LINE_BYTES} bytes"),
        (
            b'@agent {"a": ' + b"[" * 200_000 + b"\n",
            "it sent a message that cannot be read (maximum recursion",
        ),
        (
            b'@agent {"a": ' + b"7" * 10_000 + b"}\n",
            "it sent a message that cannot be read (Exceeds the limit",
        ),
    ],
    ids=["no JSON", "long message", "long noise", "nested", "long number"],
)
def test_what_cannot_be_read_ends_the_channel_with_a_reason(
    pipes: Pipes, content: bytes, reason: str
) -> None:
    pipes.to_us.write(b'@agent {"before": 1}\n')
    writer = threading.Thread(target=lambda: pipes.to_us.write(content), daemon=True)
    writer.start()

    assert pipes.channel.receive(WAIT_S) == {"before": 1}
    assert end_of(pipes.channel).startswith(reason)


def test_a_message_that_is_cut_off_is_no_message(pipes: Pipes) -> None:
    pipes.to_us.write(b'@agent {"whole": 1}\n@agent {"cut": 1}')
    pipes.to_us.close()

    assert pipes.channel.receive(WAIT_S) == {"whole": 1}
    assert end_of(pipes.channel) == "it closed the connection"


def test_a_fault_of_the_owner_of_the_noise_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads dies of it; the owner must not wait for it for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    our_input, their_output = os.pipe()

    def fail(line: str) -> None:
        raise ZeroDivisionError(line)

    with (
        os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb") as sink,
        os.fdopen(our_input, "rb") as reader,
    ):
        channel = Channel(reader, sink, noise=fail)
        os.write(their_output, b"noise\n")
        assert end_of(channel) == "its messages could not be read"
        channel.close()
    os.close(their_output)


def test_a_peer_that_does_not_read_blocks_nobody(pipes: Pipes) -> None:
    def soon(action: Callable[[], None], limit_s: float) -> None:
        begin_s = monotonic()
        action()
        assert monotonic() - begin_s < limit_s

    def send() -> None:
        for number in range(100):
            pipes.channel.send({"number": number, "text": "x" * 100_000})

    soon(send, 5.0)
    pipes.to_us.write(b'@agent {"still": "read"}\n')
    assert pipes.channel.receive(WAIT_S) == {"still": "read"}
    soon(lambda: pipes.channel.close(flush_s=0.3), 3.0)
    for number in range(100):  # nothing was lost
        assert json.loads(pipes.from_us.readline().removeprefix(b"@agent "))["number"] == number
    assert pipes.from_us.read() == b"", "the writing side is closed once all is written"


def test_closing_writes_what_is_queued(pipes: Pipes) -> None:
    for number in range(1000):
        pipes.channel.send({"number": number})
    pipes.channel.close()

    assert len(pipes.from_us.readlines()) == 1000


def test_a_message_that_is_no_json_fails_where_it_is_sent(pipes: Pipes) -> None:
    unsendable: dict[str, Any] = {"path": object()}
    with pytest.raises(TypeError):
        pipes.channel.send(unsendable)
    pipes.channel.send({"next": 1})

    assert pipes.from_us.readline() == b'@agent {"next": 1}\n'


def test_threads_end_with_the_connection(pipes: Pipes) -> None:
    before = threading.active_count()
    pipes.channel.close()
    pipes.to_us.close()

    wait_for(lambda: threading.active_count() <= before - 2, "the end of the threads")
