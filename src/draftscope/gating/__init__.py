"""A build of a trainer or a server against its baseline: for continuous integration."""
