"""Old name of `mdcs compare experiment=bench`; removed with the next release."""

raise SystemExit("mdcs bench has a new name: mdcs compare experiment=bench")
