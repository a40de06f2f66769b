from __future__ import annotations

import numpy as np
import pytest

from runtime.ops import EXACT, Tolerance
from tests.compare import check_bitwise, check_close, compare

TOLERANCE = Tolerance(1e-3, 1e-2, cosine=0.999)


@pytest.fixture
def expected(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(6, 50)).astype(np.float32)


def test_equal_arrays_pass_and_use_nothing(expected: np.ndarray) -> None:
    found = check_close(expected.copy(), expected, EXACT)
    assert (found.used, found.failing) == (0.0, 0)


def test_share_of_tolerance(expected: np.ndarray) -> None:
    actual = expected.astype(np.float64) + 0.5 * (1e-3 + 1e-2 * np.abs(expected.astype(np.float64)))
    assert check_close(actual, expected, TOLERANCE).used == pytest.approx(0.5)


def one_off(a: np.ndarray) -> None:
    a[4, 7] += 0.1


def one_nan(a: np.ndarray) -> None:
    a[4, 7] = np.nan


def one_infinity(a: np.ndarray) -> None:
    a[4, 7] = -np.inf


@pytest.mark.parametrize("mutate", [one_off, one_nan, one_infinity])
def test_one_wrong_element_is_found_and_named(expected: np.ndarray, mutate) -> None:
    actual = expected.copy()
    mutate(actual)
    with pytest.raises(AssertionError, match=r"\[4, 7\]"):
        check_close(actual, expected, TOLERANCE)


def test_nan_in_the_same_place_is_equal_and_elsewhere_is_not(expected: np.ndarray) -> None:
    expected[0, 0] = np.nan
    check_close(expected.copy(), expected, TOLERANCE)
    moved = expected.copy()
    moved[0, [0, 1]] = moved[0, [1, 0]]
    assert "NaN at 2 different position(s)" in str(compare(moved, expected, TOLERANCE))


def test_signs_of_infinity_differ(expected: np.ndarray) -> None:
    expected[1, 1] = np.inf
    actual = expected.copy()
    actual[1, 1] = -np.inf
    assert not compare(actual, expected, TOLERANCE).ok


def test_cosine_catches_what_elements_allow(expected: np.ndarray) -> None:
    loose = Tolerance(1.0, 0.0, cosine=0.999)
    small = expected * np.float32(0.1)
    assert compare(-small, small, loose).failing == 0
    assert not compare(-small, small, loose).ok


def test_shapes_must_agree(expected: np.ndarray) -> None:
    assert "shape [50, 6]" in str(compare(expected.T, expected, TOLERANCE))


def test_bitwise(expected: np.ndarray) -> None:
    expected[0, 0] = np.nan
    check_bitwise(expected.copy(), expected)
    for at, value in (((2, 3), np.nextafter(expected[2, 3], np.float32(9))), ((0, 1), np.float32(-0.0))):
        actual, wanted = expected.copy(), expected.copy()
        wanted[0, 1] = 0.0
        actual[0, 1] = 0.0
        actual[at] = value
        with pytest.raises(AssertionError, match=rf"first \[{at[0]}, {at[1]}\]"):
            check_bitwise(actual, wanted)
    with pytest.raises(AssertionError, match="float64"):
        check_bitwise(expected.astype(np.float64), expected)
