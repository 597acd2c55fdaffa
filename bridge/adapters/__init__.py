"""One file per engine: the adapter between the Engine protocol and what the engine itself offers."""
