# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Running the study on a GPU
#
# The default of this book runs on any laptop. The study itself used two models of several billion parameters on
# a card, and the profile that repeats it is part of this version: the same notebooks, the same records, the same
# book. What it takes is computed below, before anything is downloaded.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file: this book's own
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
planned = "paper"  # the profile that is planned on this page
cards = ["h100", "4090"]  # which cards for, by their names in data/devices.yaml; the study's own first

# %% tags=["hide-input"]
from kvlib.report import tables
from kvlib.report.prose import plan_facts
from kvlib.report.renderer import glue_facts, show_table, show_tables, use_book_renderer
from kvlib.study.plan import device_named, make_plan
from kvlib.study.profile import load_profile

use_book_renderer("30_gpu")
settings = load_profile(planned)
plans = {name: make_plan(settings, device_named(name)) for name in cards}

# %% tags=["remove-cell"]
glue_facts(plan_facts(plans))

# %% [markdown]
# ## What to have
#
# - **A card** of NVIDIA's with bfloat16, on Linux, and its driver. How much memory it needs is in the tables below.
# - **Disk**: {glue:text}`downloads` to download, once, and {glue:text}`disk` for the run's own folder: nearly all of
#   it caches of training windows, which are computed once and then read at every step. The fastest disk you have.
# - **Python** as for the default. `pip install -r requirements-gpu.txt -c requirements.lock` in an environment of
#   its own: on Linux the pinned torch is a build with CUDA unless pip was told to prefer another.
# - **Access** to the target, which is gated: accept its licence on its page on the hub, then `hf auth login`. A
#   folder with the model in it may stand wherever a hub id stands, and then no account is asked for.

# %% [markdown]
# ## The commands
#
# | command | what it does |
# |---|---|
# | `python -m kvlib plan paper` | says what the run will take on the card that is found, and refuses what cannot fit |
# | `python -m kvlib fetch --profile paper` | downloads models and texts |
# | `python -m kvlib run --profile paper` | all stages, then the book; after any stop the same command goes on from there |
# | `python -m kvlib status paper` | what is done, how long it took, what is left |
# | `python -m kvlib evidence paper` | asks more of the frozen map, then builds the book again |
# | `python -m kvlib verify paper` | recomputes every published number from the records |
#
# `plan` answers “what if” without changing anything: `--device` names a card that is not here, and `-p` gives a key of
# the profile another value, as in `python -m kvlib plan paper --device 4090 -p training.micro_batch 2`. To run with
# such a value, write a profile of a few lines that `extends` this one and give its path.

# %% [markdown]
# ## The plan
#
# {glue:text}`verdicts`

# %% tags=["hide-input"]
show_table(
    tables.plan_cards(plans),
    "Times are estimates: the slowest of arithmetic, memory, launches and transfers of every part, at the share of "
    "the maker's figures that data/devices.yaml states.",
)
show_tables(
    {f"{plan.profile.label}, on {plan.device.name}.": tables.plan_stages(plan) for plan in plans.values()}
)
show_table(
    tables.plan_memory(plans[cards[0]]),
    "The worst moment of each stage, in GiB: what is in the card's memory then, and for what.",
)
show_table(
    tables.plan_downloads(plans[cards[0]]),
    "What is downloaded, where it is not there yet. Texts are read in part.",
)

# %% [markdown]
# *Operations* are floating-point operations of matrix products, in powers of a thousand (T, P). *Device memory* is the
# worst moment of a stage: the weights that must be there then, caches in flight, activations, logits, and what the
# optimiser keeps. No stage but the last holds both models: the source passes over all text first,
# then the target. In the last stage both are there, because that is what is timed.
#
# A smaller card takes fewer prompts at a time, at the same result: `training.micro_batch` sets how many go through
# training together (the gradient is the whole step's), `evaluation.batch_prompts` how many are scored together, and
# `training.checkpoint_activations` computes layers again instead of keeping them. When memory runs out all the same,
# the run halves what it takes at a time, says so, and goes on.

# %% [markdown]
# ## How long
#
# On {glue:text}`card` about {glue:text}`time`, downloads not counted; {glue:text}`longest` is the longest stage, with
# about {glue:text}`longest_time`. The estimate knows how fast the card multiplies and reads. It does not know your
# disk, nor what else the machine does, and a stage that is made of many small steps depends on the processor that
# launches them. Twice as long is no reason to worry; ten times as long is one to look at the log.

# %% [markdown]
# ## What to expect
#
# - **The first gate** comes within minutes: the target's own cache, handed back, must give its own logits. In half
#   precision they differ by rounding, and the profile's tolerance says by how much they may.
# - **Direct reuse** should come out close to the study's figure: it depends on the models and the text, on no
#   training. [The comparison](10_study_and_run) lists every figure beside the study's and says better, same or worse.
# - **The order** of the paths is the result: learned below direct, ridge above both. Which arm is frozen, and its last
#   digits, may differ from the study's: its data order and seeds are not public.
# - **Times** differ most: here an affine correction is absorbed into the attention, and the study's, by its figures, was not.

# %% [markdown]
# ## What to send back
#
# The records, not the caches: summaries, how they were made, tables, the manifest and the plan. They are small.
#
# ```bash
# python -m kvlib plan paper --json results/paper/plan.json
# tar czf paper.tar.gz --exclude=book --exclude=arms --exclude='windows-*' --exclude='prompts-*' --exclude='work-*' \
#     --exclude=articles --exclude='*.bin' -C results paper
# python benchmarks/gpu.py --out gpu.json
# ```
#
# The last command needs no model and no network. It times the handoff on random weights in the true shapes, so that
# what is the card's can be told from what is a fault. With both files anyone can set your figures beside the study's
# and hold the plan's estimates against what was measured.
