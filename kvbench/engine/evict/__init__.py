"""Who leaves a full pool. The contract is `Policy` in the engine's door; POLICIES in policies.py holds the names of scenarios.

A policy is told of every access and keeps its own books; what it keeps beyond the resident keys is bounded by its capacity.
"""
