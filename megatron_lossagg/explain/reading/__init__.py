"""Rollouts from files."""
