# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 Confirmation and freeze
#
# The lowest of many noisy scores is too low. The finalists are therefore trained again from the beginning
# on a partition that the screen has not used, with several seeds each, and scored on fresh prompts. Then one
# configuration is frozen, and its record is sealed with hashes before the final prompts are opened.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
seeds = None  # type: list[int] training seeds of every finalist, such as [11, 12, 13]

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.prose import confirmation_facts
from kvlib.report.renderer import glue_facts, show, use_book_renderer
from kvlib.study.run import read_summary
from kvlib.study.stages import open_run, run_confirmation

use_book_renderer("02_confirmation")
study = open_run(profile, run, results=results, **{"confirmation.seeds": seeds})
confirmation = run_confirmation(study)

# %% tags=["remove-cell"]
screening = read_summary(study.stage("screening"))
glue_facts(confirmation_facts(confirmation, screening))

# %% [markdown]
# There are {glue:text}`finalists` finalists with {glue:text}`seeds` seeds each, scored on
# {glue:text}`prompts` prompts. {glue:text}`means`
#
# {glue:text}`spread`

# %% tags=["hide-input"]
show(
    figures.confirmation(confirmation, screening),
    "Every marker is one training run. The ring marks the frozen one: the median seed of the arm that was frozen, not"
    " its luckiest. The dashed line is direct reuse on the same prompts.",
    tables.confirmation(confirmation),
    "confirmation/summary.json",
)

# %% [markdown]
# ## What was frozen
#
# {glue:text}`frozen`
#
# {glue:text}`why` {glue:text}`decided`
#
# The {term}`manifest` holds this choice, the rule that made it, the hashes of the weights, of every partition and
# of the code, the fingerprints of both models and the versions of the packages. Its own hash begins with
# {glue:text}`manifest`, that of the weights with {glue:text}`weights`; the [colophon](../colophon.md) has
# them whole. The next chapter refuses to open the final prompts if any of them has changed.
