"""Decide: pure functions from configuration to a plan. No process, no network, no torch."""
