"""A package, so that no other one called tests is found in its place."""
