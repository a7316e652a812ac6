"""From a module to a graph: record one real run of it."""
