"""How far the few repetitions behind a median lie apart: ranges of times, and of ratios to native prefill."""

from dataclasses import dataclass

import pandas as pd

from kvlib.report.wording import milliseconds

FEW = 5  # up to so many repetitions a ratio is called rough, or written as a range


@dataclass(frozen=True)
class Times:
    """Repetitions of one path at one length. All in ms."""

    median: float
    low: float
    high: float
    repetitions: int

    @property
    def said(self) -> str:
        """The median with the number of repetitions and, where these are few, their range."""
        spread = (
            f", {milliseconds(self.low)} to {milliseconds(self.high)}" if 1 < self.repetitions <= FEW else ""
        )
        return f"{milliseconds(self.median)} (n = {self.repetitions}{spread})"


def times_of(raw: pd.DataFrame, tokens: int, path: str, residency: str = "resident") -> Times | None:
    """raw: `latency/raw.parquet`. None where the path was not timed."""
    rows = _rows(raw, tokens, residency)
    ms = rows.loc[rows["path"] == path, "ms"]
    return Times(float(ms.median()), float(ms.min()), float(ms.max()), len(ms)) if len(ms) else None


def source_prefills(raw: pd.DataFrame, tokens: int) -> Times | None:
    """The source's own prefill at one length, from the cold repetitions of every path: the same work each time."""
    rows = _rows(raw, tokens, "cold")
    rows = rows[rows["path"] != "native"]
    ms = (rows["ms"] - rows["handoff_ms"]).dropna()
    return Times(float(ms.median()), float(ms.min()), float(ms.max()), len(ms)) if len(ms) else None


def ratio_range(raw: pd.DataFrame, tokens: int, residency: str) -> tuple[float, float] | None:
    """native ÷ learned at one length: the smallest and the largest that its repetitions allow.

    Cold, every source prefill of that length counts, whichever path it was timed for: with one repetition of its own the
    learned path would seem not to vary at all.
    """
    native, learned = times_of(raw, tokens, "native"), times_of(raw, tokens, "learned", residency)
    if native is None or learned is None:
        return None
    low, high = learned.low, learned.high
    source = source_prefills(raw, tokens) if residency == "cold" else None
    if source is not None:
        rows = _rows(raw, tokens, "cold")
        after = rows.loc[rows["path"] == "learned", "handoff_ms"].median()
        low, high = min(low, source.low + after), max(high, source.high + after)
    return native.low / high, native.high / low


def factor_text(raw: pd.DataFrame, tokens: int, residency: str) -> str | None:
    """native ÷ learned for a headline: "about" where repetitions are few, and cold the range that they allow."""
    native, learned = times_of(raw, tokens, "native"), times_of(raw, tokens, "learned", residency)
    if native is None or learned is None:
        return None
    ratio = native.median / learned.median
    if min(native.repetitions, learned.repetitions) > FEW:
        return f"{ratio:.3g}"
    if residency == "cold":
        low, high = (f"{end:.2f}" for end in ratio_range(raw, tokens, residency))
        return low if low == high else f"{low} to {high}"
    return f"about {ratio:.3g}"


def _rows(raw: pd.DataFrame, tokens: int, residency: str) -> pd.DataFrame:
    return raw[(raw["prefix_tokens"] == tokens) & (raw["residency"] == residency)]
