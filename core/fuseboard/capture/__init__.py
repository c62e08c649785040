"""From Dynamo's graph to AOTAutograd's, and whether they agree."""
