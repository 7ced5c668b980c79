"""The one exception for mistakes that a user can put right."""


class KvlibError(ValueError):
    """Bad input, in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence alone and exits with status 2.
    """
