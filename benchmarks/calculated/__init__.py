"""Profiles of clusters and models that are calculated from published rates instead of measured."""
