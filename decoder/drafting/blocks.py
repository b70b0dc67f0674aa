"""Buddy allocator for tables that grow inside one array."""

from __future__ import annotations


class Blocks:
    """Blocks of an array whose sizes are powers of two, split and merged as buddies."""

    def __init__(self, length: int) -> None:
        """All ``length`` entries of the array are free, in as few blocks as they make."""
        self._free = [set[int]() for _ in range(length.bit_length())]
        for size in range(len(self._free)):
            if length >> size & 1:
                self._free[size].add(length >> (size + 1) << (size + 1))

    def allocate(self, size: int) -> int:
        """Allocate a block of 2**``size``: its start, from the lowest of the smallest free blocks
        that fit, or -1 if none does. Mutates."""
        for larger in range(size, len(self._free)):
            if self._free[larger]:
                begin = min(self._free[larger])
                self._free[larger].remove(begin)
                for half in range(size, larger):
                    self._free[half].add(begin + (1 << half))
                return begin
        return -1

    def free(self, begin: int, size: int) -> None:
        """Free a block that :meth:`allocate` returned. Mutates."""
        while begin ^ (1 << size) in self._free[size]:
            self._free[size].remove(begin ^ (1 << size))
            begin &= ~(1 << size)
            size += 1
        self._free[size].add(begin)
