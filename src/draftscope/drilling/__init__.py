"""The exercise: known faults planted in known pairs, and what the diagnosis makes of their files."""
