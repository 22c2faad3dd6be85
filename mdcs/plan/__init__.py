"""The plan: strategies and messages of one period, what makes them valid, what they hold (`ledger`) and take (`cost`), and the
words for where a step's time goes (`times`).

Imports `mdcs.profile` alone; everything else of mdcs may import it.
"""
