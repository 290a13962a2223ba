"""Measurements of speed, memory and bytes, and the runs behind RESULTS.md."""
