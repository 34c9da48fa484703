"""What peers do: train, generate. Knows engines, environments and learning; the network is `swarm/`'s."""
