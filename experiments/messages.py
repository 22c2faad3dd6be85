"""Old name of `mdcs compare compare=messages experiment=timed`; removed with the next release."""

raise SystemExit("mdcs messages has a new name: mdcs compare compare=messages experiment=timed")
