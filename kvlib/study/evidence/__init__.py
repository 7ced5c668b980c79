"""What is asked of the frozen map after its final evaluation: lengths, learning curves, ablations, content, power."""

from kvlib.study.evidence.stage import run_evidence

__all__ = ["run_evidence"]
