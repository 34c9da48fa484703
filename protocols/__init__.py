"""Rules without I/O: what is decided, never how it is carried.

Nothing here knows the clock, the network, the disk or torch. The drivers in `swarm/` bring events
in and carry actions out; the same code runs in production and in the seeded simulations of `tests/`.
"""

PROTOCOL = "echo-swarm/2"
