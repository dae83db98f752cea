"""Numbers and texts as people read them."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = "–"
"""shown where there is no number"""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval over `cases` (groups) and `repetitions`. One case says nothing about
    other prompts, one repetition nothing about the machine's noise."""

    value: float
    low: float
    high: float
    cases: int = 0
    repetitions: int = 0


def speedup(interval: Interval | None) -> str:
    """Its value, to two places.

    >>> speedup(Interval(2.104, 2.0, 2.2)), speedup(None)
    ('2.10x', '–')
    """
    return NOTHING if interval is None else f"{interval.value:.2f}x"


def bounds(interval: Interval | None) -> str:
    """Its two ends, to two places; nothing where there is only one.

    >>> bounds(Interval(2.104, 2.0, 2.2))
    '2.00 to 2.20'
    """
    if interval is None or interval.high - interval.low < 1e-9:  # of a single run nothing can be said
        return NOTHING
    return f"{interval.low:.2f} to {interval.high:.2f}"


def rate(interval: Interval | None) -> str:
    """Tokens per second, to three digits.

    >>> rate(Interval(24.96, 24.0, 25.5)), rate(Interval(123.4, 1, 2)), rate(Interval(3.14159, 3, 4))
    ('25.0', '123', '3.14')
    """
    return NOTHING if interval is None else digits(interval.value)


def digits(value: float) -> str:
    """A positive number to three digits, but whole from 100 on."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(share: float | None, places: int = 0) -> str:
    """A share of 1.

    >>> percent(0.042, 1), percent(None)
    ('4.2 %', '–')
    """
    return NOTHING if share is None else f"{100 * share:.{places}f} %"


def milliseconds(seconds: float | None) -> str:
    """A short time, to three digits."""
    return NOTHING if seconds is None else f"{digits(1000 * seconds)} ms"


def time(seconds: float) -> str:
    """A time of up to some seconds, to three digits.

    >>> time(0.0123), time(1.25)
    ('12.3 ms', '1.25 s')
    """
    return f"{digits(seconds)} s" if seconds >= 1 else milliseconds(seconds)


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "token"), counted(2, "token")
    ('1 token', '2 tokens')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gigabytes(size: float | None) -> str:
    """Bytes as people count them: 1 GB is 10^9 of them.

    >>> gigabytes(1_117_000_000), gigabytes(98_000_000), gigabytes(596)
    ('1.12 GB', '98 MB', '0.60 kB')
    """
    if size is None:
        return NOTHING
    if size >= 995_000_000:
        return f"{digits(size / 1e9)} GB"
    if 0 < size < 99_500:
        return f"{digits(size / 1e3)} kB"
    return f"{size / 1e6:.0f} MB" if size >= 9_950_000 or not size else f"{digits(size / 1e6)} MB"


def short_count(number: float) -> str:
    """Parameters or tokens, to three digits.

    >>> short_count(1_777_088_000), short_count(134_500_000), short_count(999)
    ('1.78B', '134M', '999')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{digits(number / size)}{unit}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """A long time, in its two largest units.

    >>> duration(41.4), duration(150), duration(2460), duration(32700)
    ('41 s', '2 min 30 s', '41 min', '9 h 5 min')
    """
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    if seconds < 600:
        return _units(round(seconds), 60, "min", "s")
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else _units(minutes, 60, "h", "min")


def _units(amount: int, size: int, large: str, small: str) -> str:
    whole, rest = divmod(amount, size)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def readable(text: str) -> str:
    r"""A text without control characters but line breaks and tabs: models, file names and GGUF files may
    contain what steers a terminal.

    >>> readable("a\x1b[31mb")
    'a[31mb'
    """
    return text.translate(_CONTROLS)
