"""`python -m logitless` is the command `logitless`."""

import sys

from logitless.cli import main

if __name__ == "__main__":
    sys.exit(main())
