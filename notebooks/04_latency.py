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
# count. This is the {term}`time to first token`, with the source's cache {term}`resident`. A second, {term}`cold` clock
# starts earlier, before the source has read the prompt.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
prefix_tokens = None  # type: list[int] prefix lengths, shortest first
warmups = None  # type: list[int] uncounted repetitions per length
repetitions = None  # type: list[int] counted repetitions per length, source cache resident
native_repetitions = None  # type: list[int] counted repetitions per length of native prefill; [] for as many as the others
cold_repetitions = None  # type: list[int] counted repetitions per length, the source's prefill included
memory = None  # type: bool whether peak memory is measured too
modes = None  # type: list[str] the learned map's other ways that are timed: materialised, in_place, absorbed, background, compiled
breakdown = None  # type: bool whether the shortest and the longest step are taken apart by a profiler
pipeline_repetitions = None  # type: list[int] counted repetitions per length of the cold pipeline; [] for none
gpu_results = None  # type: str a JSON file that benchmarks/gpu.py wrote, to be shown at the end

# %% tags=["hide-input"]
from kvlib.report import figures, gpu, speed, tables
from kvlib.report.agreement import read_raw_tables
from kvlib.report.prose import first_token_sentence, latency_facts, speed_facts, ways_facts
from kvlib.report.renderer import glue_facts, show, show_table, show_tables, use_book_renderer
from kvlib.study.records import read_table
from kvlib.study.run import read_summary
from kvlib.study.stages import open_run, run_latency

use_book_renderer("04_latency")
overrides = {
    "latency.prefix_tokens": prefix_tokens,
    "latency.warmups": warmups,
    "latency.repetitions": repetitions,
    "latency.native_repetitions": native_repetitions,
    "latency.cold_repetitions": cold_repetitions,
    "latency.memory": memory,
    "latency.modes": modes,
    "latency.breakdown": breakdown,
    "latency.pipeline_repetitions": pipeline_repetitions,
}
study = open_run(profile, run, results=results, **overrides)
latency = run_latency(study)
final = read_summary(study.stage("frozen_evaluation"))
measured_on_gpu = gpu.read_results(gpu_results)
targets = speed.targets(latency, speed.read_targets())

# %% tags=["remove-cell"]
glue_facts(latency_facts(latency) | speed_facts(final, latency, targets) | gpu.gpu_facts(measured_on_gpu))
peaks = read_table(study.folder / "latency" / "memory.parquet")
raw = read_raw_tables(study.folder)
glue_facts(ways_facts(latency) | {"first_tokens": first_token_sentence(raw)})

# %% [markdown]
# Measured on {glue:text}`device` in {glue:text}`dtype`, with {glue:text}`threads` threads; the memory moves
# {glue:text}`bandwidth`. Paths are interleaved in random order, and real text fills the prefixes. Counted
# repetitions with a resident cache, by prefix length: {glue:text}`repetitions`; of native prefill:
# {glue:text}`native_repetitions`; cold: {glue:text}`cold_repetitions`.
# Where they are few, read the medians as rough: every repetition is in the raw records. A 95th percentile is given
# only where there are enough repetitions for one.
#
# {glue:text}`resident_verdict` {glue:text}`resident_crossover`
#
# {glue:text}`cold_verdict` {glue:text}`cold_crossover`

# %% tags=["hide-input"]
show(
    figures.time_to_first_token(latency),
    "Median times; whiskers reach up to the 95th percentile where there is one. Where the learned handoff overtakes native prefill"
    " between two lengths, a dotted vertical line marks it. “Direct, stock attention” runs the same cache through the attention"
    " that the model ships with, so that no path wins by its attention code alone. The memory floor is what one step must read,"
    " over the memory bandwidth of this run; native prefill is no single step and is not held against it.",
    tables.latency(latency),
    "latency/summary.json, latency/raw.parquet",
)

# %% [markdown]
# The cold differences are small beside decades of a logarithmic axis, and rest on few repetitions. Here each one is held
# against native prefill's median at its length: below one, that repetition was sooner than native.

# %% tags=["hide-input"]
show(
    figures.cold_ratio(raw.latency),
    "One marker per repetition, native's own among them: their spread is what a difference has to be held against. The source's"
    " prefill counts.",
    tables.cold(raw.latency),
    "latency/raw.parquet",
)

# %% [markdown]
# {glue:text}`overhead` How each path ran: {glue:text}`modes`. An {term}`absorbed` map leaves the cache untouched and
# acts on the query and on the attention's output, so that its cost hardly grows with the prefix.
# {glue:text}`learned_mode`
#
# ## Is the first token the right one?
#
# Fidelity was measured on other prompts, at one prefix length. What the timed repetitions can say of it is whether the token at
# which the clock stopped is the one that native prefill gave on the same prompt. {glue:text}`first_tokens`

# %% tags=["hide-input"]
show_table(
    tables.first_tokens(raw.latency),
    "Prompts, not repetitions; only those on which native prefill was timed too. The source's cache is resident.",
    "latency/raw.parquet",
)

# %% [markdown]
# ## The frontier again
#
# The study finds a trade-off: its correction brings the target closer to native, and the first token comes later
# than with direct reuse. Its figures look like the price of writing a corrected cache before the step, which the
# correction itself does not need. The chart therefore has the learned map twice, at one and the same fidelity:
# written out into a second cache, which is what the study's figures suggest, and as it is handed over here.
#
# {glue:text}`moved` {glue:text}`stock` {glue:text}`native_ratio`

# %% tags=["hide-input"]
show(
    figures.moved_frontier(final, latency),
    "Fidelity against time, the source's cache resident. KL32 was measured at one prefix length, in the final evaluation of this"
    " run; the slider moves the times. The arrow leads from the learned map written out into a second cache to the same map as it"
    " is handed over: both give the target the same corrected keys and values, up to rounding, so both have one KL32.",
    tables.moved_frontier(final, latency),
    "frozen_evaluation/summary.json, latency/summary.json",
)

# %% [markdown]
# ## One map, several ways
#
# The same learned map can be applied in several ways, and what is chosen need not be taken on trust: the others were
# timed in the same rounds as the paths above. {term}`Written out <materialised>` makes a second, corrected cache
# first. {term}`In place <in place>` corrects the cache that was handed over, without a second one.
# {term}`Background <background>`, where it was asked for, starts absorbed and folds the correction into the cache
# while decoding goes on; its first token is that of the absorbed way. {term}`Compiled <compiled>`,
# where it was asked for and a compiler was there, is in place by a pass that was compiled before any clock ran.
#
# {glue:text}`ways` {glue:text}`chosen` {glue:text}`twice` {glue:text}`left_out`

# %% tags=["hide-input"]
show_table(
    tables.modes(latency),
    "Medians with the source's cache resident. “As handed over” is the learned path of the first chart, the others are the same map in"
    " a way that was asked for by name. A compiled pass is kept on disk: where getting it took a few milliseconds it had been made before,"
    " and that time is not what compiling costs.",
    "latency/summary.json, latency/raw.parquet",
)

# %% [markdown]
# ## Where the time goes
#
# One step of direct reuse and of the learned correction, taken apart by torch's profiler. An operator's own time goes to
# the part that it runs in; “Python and launching” is what is left of the wall clock: Python, the launching of operators,
# and part of the profiler's own work, which also slows operators. Nothing is rescaled; the parts add up to the profiled step.
#
# {glue:text}`parts` {glue:text}`profiler`

# %% tags=["hide-input"]
show(
    figures.step_parts(latency),
    "Each bar is one profiled step, of a few repetitions the one that took the median time. “Attaching and leaving” counts what"
    " a handoff does before and"
    " after the model runs, Python included. On a processor an operator counts with the time for which its caller waits, on a GPU"
    " with that of its kernels. Attention that is compiled applies an absorbed map in its own pass, so that the map is no part of"
    " its own there.",
    tables.step_parts(latency),
    "latency/breakdown.parquet",
)

# %% [markdown]
# No step can be faster than reading what it must read, its {term}`floor <floor, memory>`: the weights once and the cache once.
#
# {glue:text}`floor`

# %% tags=["hide-input"]
show_table(
    tables.floor(latency),
    "The floor: bytes of weights (every parameter once, of an embedding that the head does not share one row) and of cache, over the"
    " memory bandwidth measured in this run.",
    "latency/summary.json",
)

# %% [markdown]
# ## Memory
#
# Peak extra memory is counted above the state in which both models and the source's cache are resident; for native
# prefill, above the models alone. The source's cache itself is therefore not in these curves.
#
# {glue:text}`memory_ratios`

# %% tags=["hide-input"]
show(
    figures.peak_memory(peaks),
    "On a processor, one fresh process per path and length; on a GPU, the allocator's peak. Memory that a"
    " path needs only for a moment counts as much as what it keeps.",
    tables.memory(peaks),
    "latency/memory.parquet",
)

# %% [markdown]
# ## Cold, in a pipeline
#
# Where the source has yet to read the prompt, its prefill is most of the time. The target need not wait for the
# source's last layer: in a pipeline each layer's cache is handed over as soon as it is there. That is worth it where source
# and target do not share cores; on a processor a cold handoff runs one after the other unless a pipeline is asked for,
# as it was here.
#
# {glue:text}`pipeline`

# %% tags=["hide-input"]
show_table(
    tables.pipeline(latency),
    "Medians of the cold first token, one after the other and in a pipeline, repetitions interleaved.",
    "latency/pipeline.parquet",
)

# %% [markdown]
# ## The figures that were set beforehand
#
# Before the absorbed handoff was built, its figures were set: each a ratio within one run, with a limit that must hold
# and, for most, a closer one to aim at.
#
# {glue:text}`reached`

# %% tags=["hide-input"]
show_table(
    tables.targets(targets),
    "For a figure that is set for every length, the length that is furthest from its limit. The limits are in data/targets.yaml.",
    "latency/summary.json",
)

# %% [markdown]
# ## On a GPU: true shapes, random weights
#
# {glue:text}`gpu`

# %% tags=["hide-input"]
show_tables(gpu.gpu_tables(measured_on_gpu))
