"""Device meshes: which axes there are, what is cut along them, and code that runs once per shard."""
