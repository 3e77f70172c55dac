"""python -m lily: the same as the command lily."""

import sys

from lily.cli import main

sys.exit(main())
