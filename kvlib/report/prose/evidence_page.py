"""The page that stands in the evidence chapter's place while there is none for the frozen map."""


def not_run_page(run: str, profile: str, made_for: str | None, present: str | None) -> str:
    """The chapter's page in a book whose run has no evidence for its present frozen map, as Markdown.

    Args: profile: as for `make`, a name or a path. made_for: hash of the frozen map that evidence on disk belongs to, None when there is none.
        present: hash of the one that the run has now.
    """
    settings = [f"PROFILE={profile}"] if profile != "laptop" else []
    settings += [f"RUN={run}"] if run != profile else []
    if made_for is None:
        why = "This part of the study has a command of its own, and it has not been run for this run."
    else:
        why = (
            f"It was made for another frozen map (manifest `{made_for[:16] or 'unknown'}…`) than the one that this run has now "
            f"(`{(present or 'none')[:16]}…`), so its figures are not shown here."
        )
    return (
        "# 05 Evidence (not run)\n\n"
        "How far does the result carry: over prefix lengths, over the amount of training, over layers, and over "
        "the number of prompts?\n\n"
        f"{why} From the project's folder:\n\n"
        f"```\n{' '.join(['make evidence', *settings])}\n```\n\n"
        "or, inside its environment:\n\n"
        f"```\npython -m kvlib evidence {run}\n```\n\n"
        "Finished parts are kept if it is interrupted, the ledger notes that the final articles are read once more, "
        "and this book is built again with the chapter in this place.\n"
    )
