"""Sentences of the comparison with the study: what was the same in this run, and what was not."""

from kvlib.report.wording import join, plural


def difference_facts(published: dict, records: dict[str, dict]) -> dict[str, str]:
    """What this run repeats, and its pair, text and machine beside the study's. `published`: data/published.yaml."""
    pair, study = records["pair"], published["study"]
    target, source = pair["target"]["name"], pair["source"]["name"]
    same = (target, source) == (study["target"], study["source"])
    if same:
        repeats = f"This run takes the study's own pair, {target} and {source}."
    else:
        repeats = f"The study handed over from {study['source']} to {study['target']}, this run from {source} to {target}."
    return {
        "repeats": repeats,
        "the_pair": _pair(pair, same),
        "the_text": _text(pair),
        "the_machine": f"The study timed on {study['device']}, this run on {records['latency']['device']}.",
    }


def _pair(pair: dict, same: bool) -> str:
    if same:
        return (
            "It is the study's. What the study does not state, such as the number of training steps, is a choice of this "
            "project, and so is the code."
        )
    distilled = (
        "The study's source was pruned and then distilled on a large corpus; it learned to speak again."
    )
    if pair["pruning"] is None:
        own = "How close this run's source is to its target is a matter of how the two were made."
    else:
        own = "A source that is pruned in closed form has had no such schooling, and its text is worse."
    return (
        f"{distilled} {own} Where the study and this run agree all the same, the agreement is about caches rather than about one "
        "pair."
    )


def _text(pair: dict) -> str:
    parts = [pair["partitions"][name] for name in ("screen_train", "confirm_train")]
    windows = join([f"{part['items']:,} windows of {part['tokens_each']:,} tokens" for part in parts])
    return (
        f"A correction is trained on what there is: here {windows}, from {plural(sum(p['articles'] for p in parts), 'article')} of "
        f"{pair['corpus']['name']}. The study does not say how much it trained on."
    )
