"""From a user's files to the cause: what was measured, the ladder, the repair, the verdict."""
