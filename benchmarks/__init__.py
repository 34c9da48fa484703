"""What we claim, measured against a yardstick in the same run (docs/benchmarks.md)."""
