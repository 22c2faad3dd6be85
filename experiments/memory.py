"""Old name of `mdcs report layers`; removed with the next release."""

raise SystemExit("mdcs memory has a new name: mdcs report layers")
