"""The peer-to-peer runtime: carries what `protocols/` decides. Knows nothing of learning."""
