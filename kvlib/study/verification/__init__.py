"""Every published number of a run recomputed from its raw records, every hash taken again, every mismatch named."""

from kvlib.study.verification.checking import Check
from kvlib.study.verification.verify import summary, verify

__all__ = ["Check", "summary", "verify"]
