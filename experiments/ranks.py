"""Old name of `mdcs compare compare=ranks experiment=timed-8`; removed with the next release."""

raise SystemExit("mdcs ranks has a new name: mdcs compare compare=ranks experiment=timed-8")
