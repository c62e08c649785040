"""What a call goes through: the life of its graph, the route, programs, weights."""
