"""The plan: strategies and messages of one period, what makes them valid, and what they hold (`ledger`) and take (`cost`).

Imports `mdcs.profile` alone; everything else of mdcs may import it.
"""
