"""What a consumer makes of a draft checkpoint, and what is wrong with it whoever reads it: nothing is run."""

from draftscope.linting.lint import lint
from draftscope.linting.report import Lint

__all__ = ["Lint", "lint"]
