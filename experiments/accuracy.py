"""Old name of `mdcs compare compare=accuracy experiment=bench`; removed with the next release."""

raise SystemExit("mdcs accuracy has a new name: mdcs compare compare=accuracy experiment=bench")
