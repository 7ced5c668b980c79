"""The names of the ways in which a map can reach the target; apart, so that settings are read without torch."""

WAYS = ("materialised", "in_place", "absorbed", "background", "compiled")
