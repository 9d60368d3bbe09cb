"""Bytes that leave the machine: once each, whichever interfaces pass them on."""

from pathlib import Path

import pytest

from pipeline_lib.train.sent_bytes import SYS, SentMeter, sent_bytes

ETHERNET, INFINIBAND, LOOPBACK = 1, 32, 772


def interface(
    sys: Path, name: str, sent: int, kind: int = ETHERNET, is_hardware: bool = False
) -> None:
    folder = sys / "net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "type").write_text(f"{kind}\n")
    (folder / "statistics" / "tx_bytes").write_text(f"{sent}\n")
    if is_hardware:
        (folder / "device").mkdir(exist_ok=True)


def port(sys: Path, name: str, words: str) -> None:
    counters = sys / "infiniband" / name / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text(words)


def test_hardware_counts_and_not_what_passes_its_bytes_on(tmp_path: Path) -> None:
    interface(tmp_path, "lo", 5000, LOOPBACK)
    interface(tmp_path, "eth0", 100, is_hardware=True)
    interface(tmp_path, "eth1", 20, is_hardware=True)
    interface(tmp_path, "bond0", 120)
    interface(tmp_path, "docker0", 7)
    assert sent_bytes(tmp_path) == 120


def test_a_container_has_no_hardware_and_counts_what_it_has(tmp_path: Path) -> None:
    interface(tmp_path, "lo", 5000, LOOPBACK)
    interface(tmp_path, "eth0", 33)
    assert sent_bytes(tmp_path) == 33


def test_a_port_of_infiniband_counts_words_and_the_interface_over_it_is_not_counted_twice(
    tmp_path: Path,
) -> None:
    interface(tmp_path, "ib0", 4000, INFINIBAND, is_hardware=True)
    interface(tmp_path, "eth0", 10, is_hardware=True)
    port(tmp_path, "mlx5_0", "1000\n")
    port(tmp_path, "mlx5_1", "N/A (no PMA)\n")
    assert sent_bytes(tmp_path) == 4010


def test_where_nothing_counts_nothing_is_known(tmp_path: Path) -> None:
    assert sent_bytes(tmp_path) is None
    meter = SentMeter(True, tmp_path)
    assert meter.take() == meter.take() == {}


def test_steps_have_what_was_sent_between_them_if_there_is_anyone_to_send_to(
    tmp_path: Path,
) -> None:
    interface(tmp_path, "eth0", 100)
    alone, meter = SentMeter(False, tmp_path), SentMeter(True, tmp_path)
    assert meter.take() == {}
    interface(tmp_path, "eth0", 350)
    assert meter.take() == {"node_sent_bytes": 250}
    interface(tmp_path, "eth0", 50)
    assert meter.take() == {}  # begun anew
    interface(tmp_path, "eth0", 60)
    assert meter.take() == {"node_sent_bytes": 10}
    assert alone.take() == alone.take() == {}


@pytest.mark.skipif(not any(SYS.glob("net/*/statistics/tx_bytes")), reason="no /sys here")
def test_this_machine_is_read() -> None:
    first = sent_bytes()
    assert first is None or 0 <= first <= (sent_bytes() or 0)
