"""How numbers are written in prose: one function per kind of quantity, a plain word where there is none."""

import math

MINUS = "−"
SPACE = "\u00a0"  # between a number and its unit: never at the end of a line
UNKNOWN = "not measured"
SMALL = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def number(value: float | None, digits: int = 4) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}".replace("-", MINUS)


def small(value: float | None, digits: int = 4) -> str:
    """As `number`, with more digits where these would leave less than two significant ones."""
    if value is None or value == 0 or not math.isfinite(value):
        return number(value, digits)
    return number(value, min(10, max(digits, 1 - math.floor(math.log10(abs(value))))))


def signed(value: float | None, digits: int = 4) -> str:
    return UNKNOWN if value is None else f"{value:+,.{digits}f}".replace("-", MINUS)


def percent(share: float | None, digits: int = 1) -> str:
    """A share (a fraction) as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}{SPACE}%".replace("-", MINUS)


def signed_percent(share: float | None, digits: int = 1) -> str:
    return UNKNOWN if share is None else f"{100 * share:+.{digits}f}{SPACE}%".replace("-", MINUS)


def count(value: int | None) -> str:
    """A number of things in a sentence: in words up to twelve."""
    if value is None:
        return UNKNOWN
    return SMALL[value] if 0 <= value < len(SMALL) else f"{value:,d}"


def plural(value: int, one: str, many: str | None = None) -> str:
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def of(part: int, whole: int) -> str:
    """So many of so many: none of three."""
    return f"{'none' if part == 0 else count(part)} of {count(whole)}"


def milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{SPACE}ms"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 90:
        return f"{seconds:.0f}{SPACE}s"
    minutes = round(seconds / 60)
    return f"{minutes}{SPACE}min" if minutes < 90 else f"{minutes // 60}{SPACE}h {minutes % 60:02d}{SPACE}min"


def when(moment: str) -> str:
    """An ISO time to the minute."""
    return moment[:16].replace("T", " ")


def bytes_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g}{SPACE}{unit}"
    return f"{value:.0f} bytes"


def gigabytes_per_second(value: float | None) -> str:
    return "an unknown number of bytes" if value is None else f"{value:.1f}{SPACE}GB/s"


def interval(pair: list[float] | None, digits: int = 4) -> str:
    return UNKNOWN if pair is None else f"{number(pair[0], digits)} to {number(pair[1], digits)}"


def signed_interval(pair: list[float] | None, digits: int = 4) -> str:
    return UNKNOWN if pair is None else f"{signed(pair[0], digits)} to {signed(pair[1], digits)}"


def p_value(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"p = {value:.2g}" if value >= 1e-4 else "p < 0.0001"


def ratio(before: float | None, after: float | None) -> str:
    """How a path that takes `after` compares with native prefill that takes `before`: a verb phrase."""
    if not before or not after:
        return "has no time to compare with native's"
    factor = before / after
    if factor >= 1:
        return f"is {factor:.3g} times as fast as native"
    return f"takes {1 / factor:.3g} times as long as native"


def join(parts: list[str], comma: str = ", ") -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{comma.join(parts[:-1])} and {parts[-1]}" if parts else "none"


def factor(value: float | None) -> str:
    """A ratio within a sentence: 1.03 times."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} times" if value >= 1000 else f"{value:.3g} times"
