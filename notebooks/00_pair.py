# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 The pair
#
# A cache can only be handed over between two models that agree on its shape. This chapter loads the
# {term}`target`, the model that is to answer, makes or loads the {term}`source`, the cheaper model whose cache is
# to be used, checks that the two fit, and divides the text before anything is trained on it.

# %% tags=["parameters"]
profile = "laptop"  # a profile's name (data/profiles/NAME.yaml) or a path to such a file
run = None  # type: str the folder under `results`; None: the profile's name
results = "results"  # where the runs live
seed = None  # type: int draws the partitions; None: as the run or its profile has it

# %% tags=["hide-input"]
from kvlib.report import figures, tables
from kvlib.report.prose import pair_facts, text_facts
from kvlib.report.renderer import glue_facts, show, show_table, use_book_renderer
from kvlib.study.stages import open_run, run_pair

use_book_renderer("00_pair")
study = open_run(profile, run, results=results, seed=seed)
pair = run_pair(study)

# %% tags=["remove-cell"]
glue_facts(pair_facts(pair) | text_facts(study))

# %% [markdown]
# ## Two models, one cache shape
#
# The target is {glue:text}`target`. {glue:text}`target_format` For every position of a prompt it caches a key and a value in each of
# {glue:text}`cache_shape`, and the source's cache has the same shape. {glue:text}`widths`
#
# {glue:text}`source_made`

# %% tags=["hide-input"]
show_table(
    tables.models(pair),
    "The two models. KV heads, head dimension and layers must agree; widths need not.",
    "pair/summary.json",
)

# %% [markdown]
# The loss on held-out text tells how much of a language model the source still is: the target needs
# {glue:text}`target_nll` nats per token and the source {glue:text}`source_nll`, over {glue:text}`nll_tokens`
# tokens that {glue:text}`unseen`.
#
# ## What pruning costs, layer by layer
#
# {glue:text}`layer_by_layer`

# %% tags=["hide-input"]
layers = tables.read_layers(study.folder)
if len(layers):
    show(
        figures.residual_error(layers),
        "Errors that a layer makes are inherited by all layers after it; the refit of every output projection"
        " works against that.",
        tables.layers(layers),
        "pair/layers.parquet",
    )

# %% [markdown]
# ## The gate
#
# Before any map is judged, the machinery is: the target's *own* cache is taken out, handed back through
# each of the three ways in which a {term}`handoff` can run, and the next token's logits are compared with those of
# ordinary {term}`prefill`. An error here would be mistaken for a property of the source.
#
# {glue:text}`gate`

# %% tags=["hide-input"]
show_table(
    tables.gate(pair),
    "Materialised: the mapped cache is written out. In place: it is mapped layer by layer as it is read."
    " Absorbed: the map is folded into the attention and the cache stays as it is.",
    "pair/summary.json",
)

# %% [markdown]
# ## The text
#
# The corpus has {glue:text}`corpus`: {glue:text}`corpus_origin`. It is divided by article, so
# that no two partitions share a sentence, and every span is listed with its hash in
# `pair/partitions.json` before the first map is trained. The final partition is drawn but not yet
# tokenised: {glue:text}`final_prompts` prompts from {glue:text}`final_articles` articles.
# {glue:text}`texts` {glue:text}`spread`

# %% tags=["hide-input"]
if pair["corpus"]["texts"]:
    show_table(
        tables.texts(pair), "What was read. Commits are cut to sixteen digits; a local folder has none."
    )
show_table(
    tables.partitions(pair),
    "The partitions, in the order in which they are used. Hashes are cut to sixteen digits here.",
    "pair/partitions.json",
)
