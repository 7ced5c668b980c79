# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Screening
#
# Which learned correction is worth a second look? Many small variants are trained on one partition and
# ranked on prompts from another. Each differs from one *centre* in a single setting, so that the
# comparison of two neighbours says something about that setting. Nothing here touches the final prompts.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
steps = None  # type: int training steps of every arm, warm-up included; fewer take the checkpoints along
prompts_per_step = None  # type: int prefixes per training step
learning_rates = None  # type: list[float] three learning rates of the slice, such as [0.001, 0.003, 0.01]
rank_slice = None  # type: list[int] ranks of the slice, such as [4, 8]; the profile's centre must be one of them
warmup_steps = None  # type: int steps on the cache's squared error before the training on KL
scales = None  # type: list[float] residual scales tried for the selected arms
checkpoints = None  # type: list[int] training steps whose weights are kept and tried
arms = None  # type: list[str] ids of the arms to screen; None: all of them

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.prose import screening_facts
from kvlib.report.renderer import glue_facts, show, use_book_renderer
from kvlib.study.records import read_table
from kvlib.study.stages import open_run, run_screening

use_book_renderer("01_screening")
overrides = {
    "training.steps": steps,
    "training.prompts_per_step": prompts_per_step,
    "screening.learning_rates": learning_rates,
    "screening.ranks": rank_slice,
    "screening.warmup_steps": warmup_steps,
    "screening.scales": scales,
    "screening.checkpoints": checkpoints,
    "screening.arms": arms,
}
study = open_run(profile, run, results=results, **overrides)
screening = run_screening(study)

# %% tags=["remove-cell"]
glue_facts(screening_facts(screening))

# %% [markdown]
# Each of this run's {glue:text}`arms` {term}`arms <arm>` trained for {glue:text}`steps` steps of
# {glue:text}`prompts_per_step` prompts; what counts is the {term}`KL32` on {glue:text}`prompts` validation prompts.
#
# {glue:text}`outcome`
#
# {glue:text}`bases` {glue:text}`broken`
#
# ## One setting at a time
#
# {glue:text}`slices` Differences far smaller than the standard errors say little by themselves.

# %% tags=["hide-input"]
show(
    figures.slices(screening, read_table(study.folder / "screening" / "validation.parquet")),
    "Each panel varies one setting and holds the others at the centre. Whiskers are standard errors of the"
    " difference from the base's centre on the same prompts, so the centre has none; what arms share, how hard a prompt is, is"
    " not in them. Lines join settings that have values in between."
    " Dotted lines: the two maps without a trained residual. Among the features, “RMS” is normalised at each"
    " position and “no RoPE” has the rotary embedding taken out. Lower is better.",
    tables.arms(screening),
    "screening/summary.json, screening/validation.parquet",
)

# %% [markdown]
# ## Training
#
# After a few {term}`warm-up` steps that reconstruct the target's cache, every arm minimises the KL divergence
# between the native next-token distribution and its own, on windows of text cut at random places.

# %% tags=["hide-input"]
curves = read_table(study.folder / "screening" / "curves.parquet")
show(
    figures.curves(curves, screening),
    "The loss along training text, cut at other lengths than the validation prompts: not to be compared with their KL32. A curve that stops"
    " early belongs to an arm whose loss was no longer finite. The selected arms are drawn strongly, the "
    "others faintly.",
    tables.curves(curves),
    "screening/curves.parquet",
)

# %% [markdown]
# ## Checkpoints and residual scales
#
# The {glue:text}`selected` best arms are tried at several checkpoints and with their {term}`residual scaled <residual scale>`
# down or up, {glue:text}`grid_cells` combinations in all. A best scale below one would mean that the trained correction
# points the right way but, off its training text, goes too far; above one, that it stops short.
#
# {glue:text}`chosen`

# %% tags=["hide-input"]
show(
    figures.grid(screening),
    "One panel per selected arm, one line per checkpoint; the star marks the arm's lowest cell, with which it"
    " goes on. All cells are scored on the same validation prompts.",
    tables.grid(screening),
    "screening/summary.json",
)

# %% [markdown]
# The finalists are {glue:text}`finalists`. Arms that these prompts cannot tell apart tie, and the
# [decision rule](../decision_rule.md) says how a tie is decided. {glue:text}`places` Scores of finalists are the best of
# many and so are flattering; the next chapter trains both again, on other text.
