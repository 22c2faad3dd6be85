"""A live model: its units, the hooks that turn its passes into slots, and facts about its optimizer.

The only package below the runtime that needs torch, besides `mdcs.checkpoint`. Imports nothing else of mdcs.
"""
