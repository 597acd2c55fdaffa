"""A Julia on this machine, and in this process: found, proved, started through juliacall or by itself, and asked."""
