import numpy as np

from pipeline_lib.data.documents import bits, key_of, permutation


def test_the_bits_are_those_of_splitmix64() -> None:
    # The first outputs of the reference implementation for seed 0 and 1234567.
    assert bits(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert bits(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]


def test_a_stream_can_be_read_from_anywhere() -> None:
    assert np.array_equal(bits(7, 100)[40:60], bits(7, 20, start=40))


def test_keys_differ_by_value_and_by_order() -> None:
    keys = {key_of(a, b) for a in range(20) for b in range(20)} | {key_of(a) for a in range(20)}
    assert len(keys) == 20 * 20 + 20
    assert 0 <= key_of(-5, 1 << 70) < 1 << 64


def test_a_permutation_is_one_and_is_mixed() -> None:
    order = permutation(3, 10_000)
    assert np.array_equal(np.sort(order), np.arange(10_000))
    assert abs(float(np.corrcoef(order, np.arange(10_000))[0, 1])) < 0.05
