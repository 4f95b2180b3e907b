"""The plugin held against the one-process reference on the bench."""
