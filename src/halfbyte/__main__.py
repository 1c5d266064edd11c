"""`python -m halfbyte` is the `halfbyte` command."""

from .cli import main

main()
