"""Old name of `mdcs dev planners`; removed with the next release."""

raise SystemExit("mdcs planners has a new name: mdcs dev planners")
