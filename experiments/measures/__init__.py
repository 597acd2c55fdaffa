"""What is measured, one module each: time, own, variants, memory, race (engines alternating), scaling and ablation."""
