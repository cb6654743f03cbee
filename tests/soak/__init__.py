"""`make soak`: a daemon under a workload, killed at random for as long as one likes."""
