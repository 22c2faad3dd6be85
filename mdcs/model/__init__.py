"""A live model: its units, the hooks that turn its passes into slots, and facts about its optimizer.

The one part below the runtime that needs torch. Imports nothing else of mdcs.
"""
