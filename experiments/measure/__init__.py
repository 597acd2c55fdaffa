"""What is measured, one module each: time, memory, race (engines alternating) and scaling."""
