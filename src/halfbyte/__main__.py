"""`python -m halfbyte` is the `halfbyte` command."""

from halfbyte.cli import main

main()
