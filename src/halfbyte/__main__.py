"""`python -m halfbyte` is the `halfbyte` command."""

import sys

from halfbyte.cli import main

sys.exit(main())
