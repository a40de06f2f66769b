"""Page accounting: states, holders, the prefix cache and its order of eviction."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.pages import NULL_PAGE, OutOfPages, PagePool, first_key, page_key


def keys_of(tokens: list[int], size: int, salt: bytes = b"") -> list[bytes]:
    keys, key = [], first_key(salt)
    for i in range(0, len(tokens) // size * size, size):
        key = page_key(key, np.array(tokens[i : i + size], np.int32))
        keys.append(key)
    return keys


def test_null_page_is_never_given() -> None:
    pool = PagePool(5, 4)
    assert sorted(pool.take(4)) == [1, 2, 3, 4] and pool.available == 0
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free and 0 kept of 4"):
        pool.take(1)
    with pytest.raises(ValueError, match="page 0"):
        pool.release([NULL_PAGE])


def test_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(4, 2)
    [page] = pool.take(1)
    pool.hold([page])
    pool.release([page])
    assert pool.held == 1
    pool.release([page])
    assert pool.held == 0
    with pytest.raises(ValueError, match="no holder"):
        pool.release([page])
    with pytest.raises(ValueError, match="is free"):
        pool.hold([page])


def test_registered_pages_are_found_as_far_as_the_prefix_is_equal() -> None:
    pool = PagePool(10, 2)
    keys = keys_of([1, 2, 3, 4, 5, 6], 2)
    pages = pool.take(3)
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    pool.release(pages)
    assert pool.kept == 3 and pool.available == 9
    assert pool.find(keys_of([1, 2, 3, 4, 9, 9], 2)) == pages[:2]
    assert pool.find(keys_of([9, 9, 3, 4, 5, 6], 2)) == [], "the same page after another beginning is another page"
    assert pool.find(keys_of([1, 2, 3, 4, 5, 6], 2, b"salt")) == [], "another salt is another cache"
    assert pool.unheld(pages) == 3
    pool.hold(pages)
    assert pool.kept == 0 and pool.held == 3
    pool.check([pages])


def test_key_names_path_and_tokens() -> None:
    a, b = np.array([1, 2], np.int32), np.array([1, 3], np.int32)
    start = first_key()
    assert len({page_key(start, a), page_key(start, b), page_key(page_key(start, a), a), page_key(first_key(b"x"), a), start}) == 5
    assert page_key(start, a) == page_key(start, a.astype(np.int64))


def test_free_pages_go_before_kept_ones_and_far_ends_before_beginnings() -> None:
    pool = PagePool(6, 1)
    old, new = pool.take(2), pool.take(2)
    for page, key in zip([*old, *new], keys_of([1, 2], 1) + keys_of([3, 4], 1), strict=True):
        pool.register(page, key)
    pool.release(old)
    pool.release(new)
    [free] = pool.take(1)
    assert free not in old + new
    assert pool.take(1) == [old[1]], "the longest unused, and of it the far end"
    assert pool.find(keys_of([1, 2], 1)) == [old[0]]
    assert pool.take(3) == [old[0], new[1], new[0]] and pool.kept == 0
    assert pool.find(keys_of([3, 4], 1)) == []


def test_use_makes_a_kept_page_young() -> None:
    pool = PagePool(3, 1)
    a, b = pool.take(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.hold([a])
    pool.release([a])
    assert pool.take(1) == [b]


def test_second_page_of_a_key_is_not_found_and_falls_free() -> None:
    pool = PagePool(4, 1)
    a, b = pool.take(2)
    pool.register(a, b"k")
    pool.register(b, b"k")
    assert pool.find([b"k"]) == [a]
    pool.release([a, b])
    assert pool.kept == 1
    pool.check()
    with pytest.raises(ValueError, match="no holder"):
        pool.register(a, b"other")


def test_forgotten_pages_are_not_found_whoever_holds_them() -> None:
    pool = PagePool(4, 1)
    a, b, c = pool.take(3)
    for page in (a, b):
        pool.register(page, bytes([page]))
    pool.release([b])
    pool.forget([a, b, c])
    assert pool.find([bytes([a])]) == [] and pool.find([bytes([b])]) == []
    assert pool.kept == 0 and pool.available == 1
    pool.check([[a, c]])


def test_without_caching_nothing_is_kept() -> None:
    pool = PagePool(3, 1, caching=False)
    pages = pool.take(2)
    pool.register(pages[0], b"k")
    pool.release(pages)
    assert pool.kept == 0 and pool.find([b"k"]) == []


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_the_accounts(seed: int) -> None:
    """Sequences come, share prefixes, grow, register and go; after the last one every page is available."""
    rng = np.random.default_rng(seed)
    pool = PagePool(24, 2)
    tables: list[tuple[list[int], list[bytes]]] = []
    hits = 0
    for _ in range(600):
        action = rng.integers(4)
        if action == 0:
            keys = keys_of(rng.integers(0, 2, 12).tolist(), 2)
            found = pool.find(keys)
            if pool.available - pool.unheld(found) >= 6 - len(found):
                pool.hold(found)
                hits += len(found)
                tables.append((found + pool.take(6 - len(found)), keys))
        elif tables:
            pages, keys = tables[int(rng.integers(len(tables)))]
            if action == 1:
                for page, key in list(zip(pages, keys, strict=False))[: int(rng.integers(1, 7))]:
                    if pool.find([key]) != [page]:
                        pool.register(page, key)
            elif action == 2:
                pool.release(pages)
                tables.remove((pages, keys))
            elif pool.available and len(pages) < 9:
                pages += pool.take(1)
        pool.check([pages for pages, _ in tables])
    assert hits > 50
    for pages, _ in tables:
        pool.release(pages)
    pool.check()
    assert pool.available == pool.capacity == 23


def test_check_finds_wrong_accounts() -> None:
    pool = PagePool(4, 1)
    a, b = pool.take(2)
    with pytest.raises(AssertionError, match="holders"):
        pool.check([[a]])
    with pytest.raises(AssertionError, match="holders"):
        pool.check([[a, b, b]])
    pool._free.append(a)
    with pytest.raises(AssertionError):
        pool.check([[a, b]])


def test_sizes_are_checked() -> None:
    for args, text in (((1, 4), "num_pages 1"), ((4, 0), "page_size 0")):
        with pytest.raises(ValueError, match=text):
            PagePool(*args)
