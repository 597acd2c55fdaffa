"""One file per engine: the adapter between the session's protocol and what the engine itself offers."""
