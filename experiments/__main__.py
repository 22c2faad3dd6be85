"""`python -m experiments NAME …` is `mdcs NAME …`, from the checkout; so is `torchrun … -m experiments NAME …`."""

import sys

from mdcs.cli import main

if __name__ == "__main__":
    sys.exit(main())
