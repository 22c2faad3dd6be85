"""Old name of `mdcs dev messages`; removed with the next release."""

raise SystemExit("mdcs messages has a new name: mdcs dev messages")
