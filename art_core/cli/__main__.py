"""``python -m art_core.cli``: the command line where its script is not on the path."""

from art_core.cli import main

main()
