"""The book's prose as far as it depends on the records: whatever the numbers are, it says what is so."""

from kvlib.report.prose.differences import difference_facts
from kvlib.report.prose.evidence import evidence_facts, evidence_headline
from kvlib.report.prose.evidence_map import evidence_map_facts
from kvlib.report.prose.making import confirmation_facts, pair_facts, screening_facts, text_facts
from kvlib.report.prose.pages import colophon_facts, first_token_sentence, front_facts
from kvlib.report.prose.planning import plan_facts
from kvlib.report.prose.results import (
    final_facts,
    latency_facts,
    paired_tests,
    paired_verdict,
    step_facts,
    times,
    top1_sentence,
)
from kvlib.report.prose.speed import speed_facts
from kvlib.report.prose.trust import first_step_sentence, trust_facts
from kvlib.report.prose.ways import ways_facts

__all__ = [
    "colophon_facts",
    "confirmation_facts",
    "difference_facts",
    "evidence_facts",
    "evidence_headline",
    "evidence_map_facts",
    "final_facts",
    "first_step_sentence",
    "first_token_sentence",
    "front_facts",
    "latency_facts",
    "pair_facts",
    "paired_tests",
    "paired_verdict",
    "plan_facts",
    "screening_facts",
    "speed_facts",
    "step_facts",
    "text_facts",
    "times",
    "top1_sentence",
    "trust_facts",
    "ways_facts",
]
