"""Old name of `mdcs dev replays`; removed with the next release."""

raise SystemExit("mdcs replays has a new name: mdcs dev replays")
