# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 Frozen evaluation
#
# With the manifest in hand the final prompts are opened, and every path runs on every one of them. Nothing is
# chosen any more: whatever the figures say is the result.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
forcings = None  # type: list[str] along what the steps are forced: ["oracle"], ["text"] or both
batch_prompts = None  # type: int prompts per batch; a finished batch is never run again

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.explorer import explorer
from kvlib.report.prose import final_facts, step_facts, top1_sentence
from kvlib.report.renderer import glue_facts, glue_html, show, show_table, use_book_renderer
from kvlib.report.summaries import main_forcing
from kvlib.study.records import read_table
from kvlib.study.stages import open_run, run_frozen_evaluation

use_book_renderer("03_frozen_evaluation")
overrides = {"evaluation.forcings": forcings, "evaluation.batch_prompts": batch_prompts}
study = open_run(profile, run, results=results, **overrides)
final = run_frozen_evaluation(study)

# %% tags=["remove-cell"]
prompt = study.profile.prompt
glue_facts(final_facts(final) | {"prefix": f"{prompt.prefix_tokens}", "steps": f"{prompt.forced_steps}"})
prompts = read_table(study.folder / "frozen_evaluation" / "prompts.parquet")
steps = read_table(study.folder / "frozen_evaluation" / "steps.parquet")
glue_facts(step_facts(steps) | {"top1": top1_sentence(final, prompts)})
glue_html(
    "explorer", explorer(prompts, steps), "frozen_evaluation/steps.parquet, frozen_evaluation/prompts.parquet"
)
forcing = main_forcing(final)

# %% [markdown]
# There are {glue:text}`prompts` prompts of {glue:text}`prefix` tokens from {glue:text}`articles` articles.
# On each, native prefill decodes {glue:text}`steps` tokens greedily, the {term}`oracle`; every other path is {term}`forced <forced steps>`
# along the same tokens, and its distribution over the whole vocabulary is compared with native's at every
# step. {glue:text}`opened`
#
# ## Fidelity by path
#
# {glue:text}`oracle_learned_verdict`
#
# {glue:text}`oracle_ridge_verdict`

# %% tags=["hide-input"]
show(
    figures.kl_by_path(final),
    "Bars: mean KL32 over prompts with its standard error, lower is closer to native. Crosses: share of "
    "steps at"
    " which the most likely token is native's, on the right axis. Native is the reference itself, so its "
    "KL32 is"
    " zero by definition.",
    tables.paths(final),
    "frozen_evaluation/summary.json",
)

# %% [markdown]
# {glue:text}`top1`

# %% tags=["hide-input"]
show_table(
    tables.top1(prompts, list(final["forcing"])),
    "The share of steps at which the most likely token is native's, path minus direct reuse, each prompt its own control.",
    "frozen_evaluation/prompts.parquet",
)

# %% [markdown]
# {glue:text}`tail` What caches without the right content would score stands in
# [Can this be trusted?](20_trust).
#
# Forced along the text's own continuation instead of native's greedy choice, the picture is this:
# {glue:text}`text_learned_verdict` Greedy text is what a model finds easy to predict, so the two forcings
# need not agree.
#
# ## Prompt by prompt
#
# Prompts differ far more than paths do. The comparison is therefore paired: each prompt is its own control.
# Any one of them can be read, token by token, in [Prompt by prompt](../prompts).

# %% tags=["hide-input"]
show(
    figures.paired_prompts(prompts, forcing),
    "One marker per prompt; below the dashed diagonal the learned correction is closer to native than direct"
    " reuse. Point at a marker for the article and the end of the prompt. A click on the legend adds the "
    "ridge map.",
    tables.prompts(prompts, forcing),
    "frozen_evaluation/prompts.parquet",
)

# %% tags=["hide-input"]
show(
    figures.sorted_differences(prompts, forcing),
    "The same differences, sorted. A mean that rests on a few long bars would be a weaker result than the "
    "same"
    " mean spread over many short ones.",
    tables.paired(final),
    "frozen_evaluation/summary.json",
)

# %% [markdown]
# {glue:text}`oracle_learned_tests` Prompts from one article are not independent of each other, which is what
# the {term}`clustered error <clustered standard error>` allows for.
#
# ## Where it does harm
#
# {glue:text}`worse` The prompts on which it loses most, with the step at which its most likely token first
# differs from native's:

# %% tags=["hide-input"]
show_table(
    tables.worst(prompts, steps, final),
    "The five prompts with the largest difference, worst first; where the difference is negative the correction"
    " did no harm even there. Steps are forced, so a token that differs is not followed.",
    "frozen_evaluation/prompts.parquet, frozen_evaluation/steps.parquet",
)

# %% [markdown]
# ## Step by step
#
# The target's own tokens join the cache as decoding goes on, and they are computed by the target itself. What
# the handed-over part gets wrong could fade behind them, or could build up. {glue:text}`step_change`

# %% tags=["hide-input"]
show(
    figures.kl_by_step(steps),
    "Mean over prompts at each forced step. The first step reads the handed-over cache and one token of the"
    " target's own; every later step reads one more of them.",
    tables.steps(steps),
    "frozen_evaluation/steps.parquet",
)
