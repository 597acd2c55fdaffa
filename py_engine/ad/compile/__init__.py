"""From a traced program to a tape that replays it: rewriting, memory plan, calls, `compile`."""
