"""Somebody's package: a strategy, a scheduler and a model that mdcs has never heard of."""
