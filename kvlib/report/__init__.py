"""Figures and the book. Nothing below this floor imports it, and a run's freeze does not cover it."""
