"""What went wrong when a model or a text was loaded, in one sentence: access, token, network, files, room.

The library floor does not import the hub's client, whose exceptions are known here by their names.
"""

import errno
import os
from collections.abc import Iterator

from kvlib.errors import KvlibError

HUB = "https://huggingface.co/"
NETWORK = {
    "ConnectError",
    "ConnectTimeout",
    "TimeoutException",
    "ConnectionError",
    "TimeoutError",
    "NetworkError",
}
MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "cannot allocate memory")


def check_place(place, what: str):
    """Returns `place`; raises KvlibError unless it can name `what`: anything else would be looked for by its text."""
    if not isinstance(place, (str, os.PathLike)) or not str(place).strip():
        raise KvlibError(
            f"{place!r} given as {what}, expected its name or path: pass a text or a pathlib.Path"
        )
    return place


def first_line(error: BaseException) -> str:
    """An error's first line: libraries put advice of many lines behind it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_error(error: BaseException, place, expected: str, remedy: str = "") -> KvlibError:
    """The sentence for an error that a library raised over `place`, a hub id or a folder.

    Args:
        expected: what `place` should have been, such as "a folder or hub id with a tokenizer". remedy: what to do where
            nothing better is known than the library's own message.
    """
    chain = list(_chain(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    gated, by_hand = HUB + str(place), "or name a local folder that holds it"
    if "GatedRepoError" in names:
        return KvlibError(_no_access(chain, place, gated, by_hand))
    if "HFValidationError" in names:
        return KvlibError(
            f"{place} given, expected {expected}: there is no such folder and no hub id looks like this, so correct it"
        )
    if "LocalTokenNotFoundError" in names:
        return KvlibError(
            f"{place} was asked for and there is no access token, expected one: run `hf auth login` or set HF_TOKEN, {by_hand}"
        )
    if "RevisionNotFoundError" in names:
        return KvlibError(
            f"{place} has no such revision, expected a branch, tag or commit that {gated} lists: correct or remove `revision`"
        )
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return KvlibError(
            f"{place} given, expected {expected}: the hub shows none of this name to you, so correct the spelling, or run "
            "`hf auth login` if it is private"
        )
    if "OfflineModeIsEnabled" in names:
        return KvlibError(
            f"{place} is not on this disk and HF_HUB_OFFLINE is set, expected it in the hub's cache: unset HF_HUB_OFFLINE and run "
            f"again, {by_hand}"
        )
    if any(getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        return KvlibError(
            f"no room on the disk for {place}, expected space for all of its files: free some, or set HF_HOME to a folder on a "
            "larger disk, then run again"
        )
    if isinstance(error, MemoryError) or any(part in str(error).lower() for part in MEMORY):
        return KvlibError(
            f"the weights of {place} do not fit into memory, expected room for all of them: close what else uses it, choose a "
            "narrower pair.dtype or a machine with more"
        )
    if names & NETWORK or any("couldn't connect to" in str(each) for each in chain):
        return KvlibError(
            f"no network: {place} is not on this disk and the hub could not be reached, expected either: connect and run again, "
            f"{by_hand}"
        )
    if "HfHubHTTPError" in names:
        return KvlibError(
            f"the hub refused {place} ({first_line(error)}), expected {expected}: run again later, {by_hand}"
        )
    if "LocalEntryNotFoundError" in names:
        return KvlibError(
            f"{place} is not on this disk as a whole, expected {expected}: run again with a network, {by_hand}"
        )
    said = first_line(error).rstrip(".:").replace(". ", "; ")
    if "backend tokenizer" in said:
        said, remedy = "its tokenizer files are missing or cut short", "download it again"
    after = f"; {remedy or 'correct it, or download it again'}"
    return KvlibError(f"{place} given, expected {expected}: {said}{after}")


def _no_access(chain: list[BaseException], place, gated: str, by_hand: str) -> str:
    """The hub answers 401 to nobody in particular and 403 to an account that it knows and that was not let in."""
    answers = [getattr(getattr(each, "response", None), "status_code", None) for each in chain]
    if 403 in answers:
        return (
            f"the model or data set {place} is gated and your account has no access, expected an account that was granted it: ask "
            f"for access at {gated}, {by_hand}"
        )
    return (
        f"the model or data set {place} is gated and no valid access token was given, expected one of an account with access: ask "
        f"for access at {gated} and run `hf auth login` or set HF_TOKEN, {by_hand}"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
