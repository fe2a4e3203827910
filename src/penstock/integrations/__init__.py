"""Penstock's rewards in other frameworks: verl, TRL, slime. Thin adapters; each framework is imported by its own only.

What all of them share is in `common`. This room may import any other, and none imports it.
"""
