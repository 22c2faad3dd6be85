"""Hash of the code of an option: the module of its class, and the modules of the same project that it imports.

When a model's code has changed, its old profile no longer applies, even if all options are the same.
"""

from __future__ import annotations

from mdcs.model import code

_NOT_FOLLOWED = ("mdcs", "launch", "hydra_plugins", "experiments.config", "experiments.job")
"""Packages that run options but define none: `mdcs.profile.cache.MEASURED` is raised when they change."""


def code_of(cls: type) -> str:
    """Hash of the code of a class (`mdcs.model.code.code_of`)."""
    return code.code_of(cls, _NOT_FOLLOWED)
