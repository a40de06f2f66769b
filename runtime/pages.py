"""Cache pages: who holds which, and which finished ones can be found again by their content.

A page is page_size consecutive positions of one sequence: the target's latents and the drafter's
K/V of those tokens live under the same page number, so a prefix that is found again brings both.
Page 0 is the null page: dead rows point at it, and it is never handed out.

A page is in exactly one of three states:

    free     nobody holds it, its content means nothing
    held     one or more sequences hold it (a shared prefix has several holders)
    kept     nobody holds it, but its content is registered under a key; the longest unused goes first
             when free pages run out

Only the caller knows when content is final; `register` states it. Nothing here touches the device.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from runtime.types import I32

NULL_PAGE = 0


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or kept."""


def first_key(salt: bytes = b"") -> bytes:
    """The key before the first page: requests share prefixes only with those of an equal salt."""
    return hashlib.sha256(b"prefix:" + salt).digest()


def page_key(previous: bytes, tokens: I32) -> bytes:
    """The key of a full page: SHA-256 over the key before it and the page's token ids.

    A key thus names the whole path up to the page's end. A collision would hand one request the
    context of another, hence a cryptographic hash and not Python's.
    """
    return hashlib.sha256(previous + np.ascontiguousarray(tokens, dtype="<i4").tobytes()).digest()


class PagePool:
    """Accounting of `num_pages` pages, the null page included.

    take / release count holders; find and hold share a page whose key is known; register makes a page
    findable; forget undoes that. With caching off nothing is ever kept.
    """

    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages {num_pages}: page 0 is the null page, so at least 2 are needed")
        if page_size < 1:
            raise ValueError(f"page_size {page_size}: must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = caching
        self._holders = [0] * num_pages
        self._key: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: the page given back last is still in the L2 cache
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def capacity(self) -> int:
        """Pages that can be held: all but the null page."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        return self.capacity - self.available

    @property
    def kept(self) -> int:
        return len(self._kept)

    def pages_for(self, positions: int) -> int:
        """How many pages hold positions 0 … positions - 1."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages with one holder each, their content void; OutOfPages if there are fewer.

        Free pages go first; then kept ones, longest unused first, which thereby lose their key.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free and {len(self._kept)} kept of {self.capacity}")
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _unused = self._kept.popitem(last=False)
                self._drop_key(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder off each page; a registered page without holders is kept, another is free.

        Pages are released last first, so of one sequence the far end is evicted before its beginning:
        a page whose predecessor is gone can not be matched any more.
        """
        for page in reversed(list(pages)):
            if not NULL_PAGE < page < self.num_pages or self._holders[page] == 0:
                raise ValueError(f"page {page} is released but has no holder")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._kept[page] = None

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`; nothing changes, `hold` makes them stay."""
        found: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def unheld(self, pages: Iterable[int]) -> int:
        """How many of `pages` count as available now and no longer would once held."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page; they must be held already or kept (just found)."""
        for page in pages:
            if self._holders[page] == 0 and page not in self._kept:
                raise ValueError(f"page {page} is free: its content means nothing, it can only be taken")
            self._kept.pop(page, None)
            self._holders[page] += 1

    def register(self, page: int, key: bytes) -> None:
        """Makes a held page findable under `key`: its content is final from now on.

        Where another page already has the key (two sequences computed the same prefix side by side)
        the first stays the one that is found, and this one is free again after its holder.
        """
        if self._holders[page] == 0:
            raise ValueError(f"page {page} is registered but has no holder")
        if not self.caching or key in self._by_key:
            return
        if self._key[page] is not None:
            raise ValueError(f"page {page} is already registered under another key")
        self._key[page] = key
        self._by_key[key] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Makes pages unfindable, whoever holds them: their content is in doubt."""
        for page in pages:
            self._drop_key(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def clear(self) -> None:
        """Forgets every key; what is held stays held."""
        self.forget(list(self._by_key.values()))

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless every page is in one state and `tables` account for all holders.

        tables: the page lists of all live sequences. O(num_pages), for tests and post-mortems.
        """
        counted = [0] * self.num_pages
        for table in tables:
            for page in table:
                counted[page] += 1
        if counted != self._holders:
            wrong = [(page, counted[page], self._holders[page]) for page in range(self.num_pages) if counted[page] != self._holders[page]]
            raise AssertionError(f"(page, holders in the tables, holders on record): {wrong[:8]}")
        free, kept = set(self._free), set(self._kept)
        held = {page for page in range(self.num_pages) if self._holders[page] > 0}
        if len(free) != len(self._free) or NULL_PAGE in free | kept | held:
            raise AssertionError("a page is free twice, or the null page was handed out")
        if free & kept or free & held or kept & held or len(free) + len(kept) + len(held) != self.capacity:
            raise AssertionError(f"{len(free)} free + {len(kept)} kept + {len(held)} held pages, capacity {self.capacity}")
        keyed = {page: key for page, key in enumerate(self._key) if key is not None}
        if {key: page for page, key in keyed.items()} != self._by_key or not kept <= set(keyed) or free & set(keyed):
            raise AssertionError("keys and pages disagree")

    def _drop_key(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            del self._by_key[key]
            self._key[page] = None
