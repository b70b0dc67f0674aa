"""Parts of an array, as tables that grow need them."""

from __future__ import annotations


class Blocks:
    """Parts of an array whose sizes are powers of two, split and joined as buddies."""

    def __init__(self, size: int) -> None:
        """One free block of 2**``size``."""
        self._free: list[set[int]] = [set() for _ in range(size)] + [{0}]

    def take(self, size: int) -> int:
        """Where a free block of 2**``size`` begins, -1 if there is none; the first of the smallest
        that will do. Mutates."""
        for larger in range(size, len(self._free)):
            if self._free[larger]:
                begin = min(self._free[larger])
                self._free[larger].remove(begin)
                for half in range(size, larger):
                    self._free[half].add(begin + (1 << half))
                return begin
        return -1

    def give(self, begin: int, size: int) -> None:
        """Give back what was taken. Mutates."""
        while begin ^ (1 << size) in self._free[size]:
            self._free[size].remove(begin ^ (1 << size))
            begin &= ~(1 << size)
            size += 1
        self._free[size].add(begin)
