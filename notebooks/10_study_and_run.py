# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The study and this run
#
# The book repeats a published study. What is compared here is the shape of the result, not its milliseconds.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.agreement import read_raw_tables
from kvlib.report.comparison import compare, ordering_sentence, read_published, summary_sentence
from kvlib.report.headline import tiles
from kvlib.report.prose import colophon_facts, difference_facts, front_facts
from kvlib.report.renderer import (
    glue_chart,
    glue_facts,
    glue_html,
    glue_tables,
    show_table,
    use_book_renderer,
)
from kvlib.study.records import read_lines
from kvlib.study.run import read_summary
from kvlib.study.stages import open_run

use_book_renderer("10_study_and_run")
study = open_run(profile, run, results=results)
stages = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")
records = {stage: read_summary(study.stage(stage)) for stage in stages}
published = read_published()
raw = read_raw_tables(study.folder)
comparison = compare(published, records, raw)

# %% tags=["remove-cell"]
glue_facts(
    {"summary": summary_sentence(comparison), "ordering": ordering_sentence(records["frozen_evaluation"])}
)
glue_facts(difference_facts(published, records))

# %% [markdown]
# {glue:text}`repeats` {glue:text}`ordering`
#
# {glue:text}`summary`

# %% tags=["hide-input"]
show_table(
    comparison,
    "“Good” names the direction that is good of a ratio or a share within one run; only these are judged. Absolute"
    " figures of another pair on another text, times and settings are listed, so that a difference in outcome can be"
    " read beside the differences in what was done.",
    "frozen_evaluation/summary.json, frozen_evaluation/prompts.parquet, latency/summary.json, latency/raw.parquet,"
    " data/published.yaml",
)

# %% [markdown]
# ## Why the figures need not agree
#
# - **The pair.** {glue:text}`the_pair`
# - **The text.** {glue:text}`the_text` With less text a correction overfits sooner, and the best residual scale
#   may be another.
# - **The machine.** {glue:text}`the_machine` A GPU is limited by launches at short prefixes and by bandwidth at long ones; a
#   processor with few cores is limited by arithmetic almost from the start. Native prefill is all arithmetic,
#   so it becomes the slow path at shorter prefixes. That is why times are only listed, and why a ratio of
#   times that is larger than the study's praises the machine's slowness as much as the handoff.
# - **Another way to apply the map.** A corrected cache that is written out costs time in proportion to the
#   prefix, and the study's figures look like that. Here a correction that is affine in a head's own vector
#   is absorbed into the attention, and what it adds to direct reuse hardly grows with the prefix; any other
#   is written into the cache, as in the study. {glue:text}`learned_mode`
#   A ratio of times that comes out better than the study's for this reason is a better implementation, not a better map.
# - **Repetitions.** A run with fewer of them than the study has less certain figures; the chapters say how many
#   there were.

# %% tags=["remove-cell"]
prefix_tokens = study.profile.prompt.prefix_tokens
glue_facts(front_facts(records, prefix_tokens, raw))
glue_chart(
    "frontier",
    figures.frontier(records["frozen_evaluation"], records["latency"], study.profile.prompt.prefix_tokens),
    "Lower is closer to native, further left is sooner. Filled markers: the source's cache is already there; open markers:"
    f" the source's own prefill counts too. Fidelity was measured at {prefix_tokens:,} tokens only, as a mean over all forced steps,"
    " so the slider moves the times alone; at the first token, which is what is timed, fidelity is another figure. Whiskers are"
    " standard errors.",
    tables.frontier(records["frozen_evaluation"], records["latency"]),
    "frozen_evaluation/summary.json, latency/summary.json",
)
glue_html("tiles", tiles(records["frozen_evaluation"], records["latency"], raw.latency, prefix_tokens))
glue_tables({"headline": tables.headline(records["frozen_evaluation"], records["latency"], raw.prompts)})

# %% tags=["remove-cell"]
ledger = read_lines(study.folder / "frozen_evaluation" / "ledger.jsonl")
glue_facts(colophon_facts(records))
glue_tables(tables.colophon(records, ledger))
