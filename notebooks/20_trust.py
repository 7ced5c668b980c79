# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Can this be trusted?
#
# The claim of this book is small: a few hundredths of a nat, paired, on some dozens of prompts. Divergence
# along forced tokens is also easy to please, since the forced tokens alone tell the target a great deal. This
# page attacks the claim from every side that its authors could think of, and says what came of it.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.agreement import read_raw_tables
from kvlib.report.prose import first_step_sentence, trust_facts
from kvlib.report.renderer import glue_facts, show, show_table, use_book_renderer
from kvlib.study.attacks import recorded_attacks
from kvlib.study.run import read_summary
from kvlib.study.stages import STAGES, open_run
from kvlib.study.verification import summary, verify

use_book_renderer("20_trust")
study = open_run(profile, run, results=results)
records = {stage: read_summary(study.stage(stage)) for stage in STAGES}
final = records["frozen_evaluation"]
# Notebooks are left out here: this one is not finished yet. `python -m kvlib verify` looks at them too.
checks = summary([check for check in verify(study) if check.name != "notebooks"])
attacks, evidence = recorded_attacks(study), study.finished("evidence")

# %% tags=["remove-cell"]
raw = read_raw_tables(study.folder)
glue_facts(trust_facts(records, checks, attacks, evidence))
glue_facts({"first_step": first_step_sentence(final, raw)})

# %% [markdown]
# ## Is the machinery neutral?
#
# Before each stage the target's *own* cache is taken out and handed back through every way in which a
# handoff can run and through a map of every kind that changes nothing. What comes back must be native's
# logits. {glue:text}`gates`

# %% tags=["hide-input"]
show_table(
    tables.gates(records),
    "Materialised: the mapped cache is written out. In place: mapped as it lies. Absorbed: folded into the"
    " attention. The numbers are the largest differences of any logit.",
    "screening/summary.json, confirmation/summary.json, frozen_evaluation/summary.json, latency/summary.json",
)

# %% [markdown]
# A map that changes nothing adds exactly nothing, so these gates test the machinery around a map and not the ways of applying
# one: for all kinds of maps and all modes they are one comparison. The frozen maps themselves were therefore run over the first
# final prompts in every way that they allow. {glue:text}`agreement`

# %% tags=["hide-input"]
show_table(
    tables.agreement(records["frozen_evaluation"]),
    "Each map over the source's caches, along the forced tokens. The reference is the corrected cache, written out.",
    "frozen_evaluation/summary.json",
)

# %% [markdown]
# ## Is the gain larger than the noise?
#
# {glue:text}`noise`

# %% tags=["hide-input"]
show_table(
    tables.noise(final),
    "Native prefill against itself on the final prompts, in the same unit as every result.",
    "frozen_evaluation/controls.parquet",
)

# %% [markdown]
# ## The first token
#
# {glue:text}`canary`

# %% tags=["hide-input"]
show_table(
    tables.first_step(final),
    "The first of the forced steps alone. Native is its own reference. These errors are of each mean by itself: what tells the"
    " paths apart is the paired difference in the next table.",
    "frozen_evaluation/summary.json",
)

# %% [markdown]
# {glue:text}`first_step`

# %% tags=["hide-input"]
show_table(
    tables.first_step_paired(raw.steps, raw.prompts, list(final["forcing"])),
    "The same step, each prompt its own control; below zero the path is closer to native than direct reuse.",
    "frozen_evaluation/steps.parquet, frozen_evaluation/prompts.parquet",
)

# %% [markdown]
# ## Would anything have done?
#
# {term}`Controls <control>` run on the same final prompts through the same code: caches without the right content, and maps
# without the right weights. If an empty cache scored like direct reuse, the measure would be worthless; if a
# map trained on the wrong prompts' caches gained as much as the learned one, the gain would have nothing to
# do with the cache. {glue:text}`controls`
#
# {glue:text}`wrong_trained`

# %% tags=["hide-input"]
show(
    figures.controls(final),
    "One row per path and control, closest to native on top; native itself has 0, which no logarithmic axis"
    " shows, and stands at the edge. The dotted line is direct reuse. Shuffled"
    " positions: every key is turned to another position's rotation, since permuting the rows of a cache"
    " alone changes nothing that attention can see. Random: drawn with each head's own mean and covariance"
    " over the prompt's positions.",
    tables.controls(final),
    "frozen_evaluation/controls.parquet",
)

# %% [markdown]
# ## What the rule says
#
# What would count as a gain was [written down](../decision_rule.md) before the run; the first stage recorded
# the SHA-256 of that page, {glue:text}`rule_hash`, and the frozen manifest fixed it.
#
# {glue:text}`verdict` {glue:text}`content`

# %% tags=["hide-input"]
show_table(
    tables.decision(final),
    "The criteria as the rule lists them, under the oracle's forcing where it was run.",
    "frozen_evaluation/summary.json",
)

# %% [markdown]
# ## Many comparisons
#
# {glue:text}`holm` Errors clustered by article stand beside the plain ones wherever a difference from direct reuse is judged,
# since prompts from one article are not independent.

# %% [markdown]
# ## Elsewhere, and why
#
# {glue:text}`evidence` [The evidence](evidence) has the charts.
#
# ## Can the records be believed?
#
# Final prompts, decision rule, weights, code and settings are fixed in a manifest before the final text is
# tokenised; the results carry its hash. {glue:text}`opened` `python -m kvlib verify` computes every figure
# again from the raw records and compares every hash. {glue:text}`verified`

# %% tags=["hide-input"]
show_table(
    tables.checks(checks),
    "Each check, how many numbers or hashes it compared, and how many of them do not match. Numbers are"
    " compared exactly.",
)

# %% [markdown]
# ## What was attacked, how often, what happened
#
# {glue:text}`attacks`

# %% tags=["hide-input"]
show_table(
    tables.attacked(records, checks, attacks),
    "How often: logits compared, prompts scored, numbers and hashes compared, openings, attacks. Runs are"
    " attacked on the smallest profile and compared with an undisturbed one.",
)
