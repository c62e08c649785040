"""Dynamo's own graph, and whether AOTAutograd's compute the same."""
