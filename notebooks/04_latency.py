# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 Time to first token
#
# What does the handoff save? The clock starts when the source's cache lies in memory and stops when the first
# new token's id is known; mapping, injection, the last prompt token's step and the choice of the token all
# count. A second, *cold* clock starts earlier, before the source has read the prompt.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
prefix_tokens = None  # type: list[int] prefix lengths, shortest first
warmups = None  # type: list[int] uncounted repetitions per length
repetitions = None  # type: list[int] counted repetitions per length, source cache resident
cold_repetitions = None  # type: list[int] counted repetitions per length, the source's prefill included
memory = None  # type: bool whether peak memory is measured too

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.prose import latency_facts
from kvlib.report.renderer import glue_facts, show, use_book_renderer
from kvlib.study.records import read_table
from kvlib.study.stages import open_run, run_latency

use_book_renderer()
overrides = {
    "latency.prefix_tokens": prefix_tokens,
    "latency.warmups": warmups,
    "latency.repetitions": repetitions,
    "latency.cold_repetitions": cold_repetitions,
    "latency.memory": memory,
}
study = open_run(profile, run, results=results, **overrides)
latency = run_latency(study)

# %% tags=["remove-cell"]
glue_facts(latency_facts(latency))
peaks = read_table(study.folder / "latency" / "memory.parquet")

# %% [markdown]
# Measured on {glue:text}`device` in {glue:text}`dtype`, with {glue:text}`threads` threads; the memory moves
# {glue:text}`bandwidth`. Paths are interleaved in random order, and real text fills the prefixes. Counted
# repetitions with a resident cache, by prefix length: {glue:text}`repetitions`; cold: {glue:text}`cold_repetitions`.
# Where they are few, read the medians as rough: every repetition is in the raw records. A 95th percentile is given
# only where there are enough repetitions for one.
#
# {glue:text}`resident_verdict` {glue:text}`resident_crossover`
#
# {glue:text}`cold_verdict` {glue:text}`cold_crossover`

# %% tags=["hide-input"]
show(
    figures.time_to_first_token(latency),
    "Median times; whiskers reach up to the 95th percentile where there is one. Where the learned "
    "handoff overtakes native prefill between two lengths, a dotted vertical line marks it. “Direct, stock attention” runs the same cache "
    "through"
    " the attention that the model ships with, so that no path wins by its attention code alone.",
    tables.latency(latency),
    "latency/summary.json; every repetition in latency/raw.parquet",
)

# %% [markdown]
# {glue:text}`overhead` How each path ran: {glue:text}`modes`. An absorbed map leaves the cache untouched and
# acts on the query and on the attention's output, so that its cost hardly grows with the prefix.
# {glue:text}`learned_mode`
#
# ## Memory
#
# Peak memory is counted above the state in which both models and the source's cache are resident; for native
# prefill, above the models alone. The source's cache itself is therefore not in these curves.

# %% tags=["hide-input"]
show(
    figures.peak_memory(peaks),
    "On a processor, one fresh process per path and length; on a GPU, the allocator's peak. Memory that a"
    " path needs only for a moment counts as much as what it keeps.",
    tables.memory(peaks),
    "latency/memory.parquet",
)
