"""Figures and the book. Nothing below this floor imports it, and a finished run's freeze does not cover it."""
