"""Options that hold several values with commas between them."""

from __future__ import annotations

from decoder.contracts.errors import SettingsError


def words(text: str) -> tuple[str, ...]:
    """The words between the commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The positive numbers between the commas, each once.

    Raises:
        SettingsError: none, or something else.
    """
    found = words(text)
    if not found or not all(word.isdecimal() and int(word) for word in found):
        raise SettingsError(f"{option} {text!r}: give positive numbers with commas between them.")
    return tuple(int(word) for word in found)
