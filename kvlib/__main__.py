"""`python -m kvlib`: the command line of `kvlib.cli`."""

from kvlib.cli import main

main()
