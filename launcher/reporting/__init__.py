"""Turns run folders into pages for people: read, drawn, written; nothing is started and no rank is asked."""
