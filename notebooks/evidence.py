# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 Evidence
#
# One mean difference on one set of prompts convinces no careful reader. Does it hold at other prefix lengths? Would
# more text have made it larger? What in the map brings it? Is a map that fits the target's cache better also closer
# to native? And could so many prompts have shown the difference at all? What follows looks at the frozen map and at
# how it was trained; nothing is chosen by it.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
prefix_tokens = None  # type: list[int] prefix lengths at which the paths are compared, shortest first
prompts = None  # type: list[int] prompts per length; fewer where the final articles are too short
windows = None  # type: list[int] numbers of training windows, the first so many of the confirmation's
steps = None  # type: list[int] training steps whose weights are scored

# %% tags=["hide-input"]
from kvlib.report.evidence import read_evidence
from kvlib.report.figures import evidence as figures
from kvlib.report.prose import evidence_facts, evidence_map_facts
from kvlib.report.renderer import glue_facts, show, use_book_renderer
from kvlib.report.tables import evidence as tables
from kvlib.study.evidence import run_evidence
from kvlib.study.stages import open_run

use_book_renderer("evidence")
overrides = {
    "evidence.prefix_tokens": prefix_tokens,
    "evidence.prompts": prompts,
    "evidence.windows": windows,
    "evidence.steps": steps,
}
study = open_run(profile, run, results=results, **overrides)
evidence = run_evidence(study)

# %% tags=["remove-cell"]
records = read_evidence(study.folder / "evidence")
glue_facts(evidence_facts(evidence) | evidence_map_facts(evidence, records))

# %% [markdown]
# The frozen map is {glue:text}`map`.
#
# ## Prefix lengths
#
# {glue:text}`length_trained` {glue:text}`length_gain` {glue:text}`length_clustered`
#
# {glue:text}`length_outside` {glue:text}`length_few`

# %% tags=["hide-input"]
show(
    figures.kl_by_length(evidence),
    "Above: mean KL32 of each path, with standard errors. Below: learned minus direct on the same prompts, with its"
    " normal 95 % interval; below zero the learned correction is closer to native. The grey band holds the prefix"
    " lengths that the map was trained on. Each length has prompts of its own from the final articles, so compare"
    " paths within a length rather than lengths with each other. Every interval stands for itself: of many, some"
    " miss the truth.",
    tables.lengths(evidence),
    "evidence/summary.json, evidence/lengths.parquet",
)

# %% [markdown]
# {glue:text}`length_ridge` {glue:text}`length_trend`
#
# ## Data and training
#
# The frozen arm is trained again on fewer windows, each set within the next, and looked at earlier in its training.
# {glue:text}`data_levels` {glue:text}`data_end`
#
# {glue:text}`steps_levels` {glue:text}`steps_end`

# %% tags=["hide-input"]
show(
    figures.learning(evidence, records),
    "KL32 on the validation prompts of the confirmation; direct reuse and the ridge map as levels, since no training"
    " here changes them. Whiskers are standard errors of the difference from direct reuse on the same prompts. Every"
    " point is one training with one seed, and all of them run for the same number of steps: fewer windows are"
    " seen more often. The learning rate falls along its schedule, so that a flat end over steps is partly the"
    " schedule's doing. These prompts also took part in choosing the map: the shape of a curve says more than its"
    " level.",
    tables.learning(evidence, records),
    "evidence/summary.json, evidence/learning.parquet",
)

# %% [markdown]
# ## What the map learned
#
# The correction is a product of two thin matrices for each head, so all that it does lies in a few directions.
# {glue:text}`strength` {glue:text}`directions`
#
# {glue:text}`size`

# %% tags=["hide-input"]
show(
    figures.correction(records),
    "Lines: means over the heads of a layer; bands: from the lowest head to the highest. The first panel is the"
    " largest singular value of the correction, as a map between vectors in units of the head's root mean square."
    " The second counts directions: how many equally strong ones would carry as much. The third sets the root mean"
    " square of the correction on the validation prompts beside that of the cache that it corrects. Layers are"
    " counted from zero.",
    tables.correction(records),
    "evidence/singular_values.parquet, evidence/size.parquet",
)

# %% [markdown]
# ## Where the gain comes from
#
# {glue:text}`parts`
#
# {glue:text}`layers_off` {glue:text}`layers_only` {glue:text}`layers_sum`

# %% tags=["hide-input"]
show(
    figures.layers(evidence, records),
    "Top: how much KL32 falls below direct reuse with the correction on keys alone, on values alone and on both."
    " Middle: how much KL32 rises when one layer goes without its correction and all others keep theirs. Bottom: how"
    " much it falls when one layer alone has its correction. Whiskers are standard errors of the paired difference;"
    " among so many layers a few can pass twice that by chance. Nothing is trained again for this.",
    tables.layers(evidence, records),
    "evidence/summary.json, evidence/ablation.parquet",
)

# %% [markdown]
# ## Reconstruction and fidelity
#
# The ridge map is fitted to reconstruct the target's own cache; the learned correction is trained on the target's
# next-token distributions. {glue:text}`ridge_reason`
#
# {glue:text}`learned_reason`
#
# {glue:text}`cosine`

# %% tags=["hide-input"]
show(
    figures.reconstruction(evidence, records),
    "Top: KL32 on the validation prompts. Middle: R² of each path's keys and values against the target's own, on"
    " prompts that no map was fitted to; one would be the target's cache itself, below zero its mean would have been"
    " closer. Bottom: cosine between what a layer's attention reads out of the handed-over prefix and what it reads"
    " out of the target's own, with native's queries.",
    tables.reconstruction(evidence, records),
    "evidence/summary.json, evidence/ridge.parquet",
)

# %% [markdown]
# ## What so many prompts can show
#
# {glue:text}`power_found` {glue:text}`power_needed`
#
# {glue:text}`power_detectable` {glue:text}`power_plan`

# %% tags=["hide-input"]
show(
    figures.power(evidence),
    "Power of a two-sided paired t-test on the final prompts' mean difference, if the true difference and its spread"
    " were those found. The dashed curve allows for what prompts of one article share: it counts prompts by the ratio"
    " of the clustered variance to the plain one. The ring marks this run's number of prompts.",
    tables.power(evidence),
    "evidence/summary.json",
)
