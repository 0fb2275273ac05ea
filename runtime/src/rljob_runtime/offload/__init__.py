"""Time-division: components that share devices use their memory one after the other."""
