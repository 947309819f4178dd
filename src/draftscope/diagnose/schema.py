from draftscope.findings import *  # noqa: F403
