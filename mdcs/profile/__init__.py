"""What is known of a job before planning: units, slots and bytes (`contents`), the `link`, what collective `algorithms` send
and hold, and profiles that are calculated (`analytic`).

Plain data: imports nothing of mdcs but `mdcs.sizes`, no torch and no Hydra.
"""
