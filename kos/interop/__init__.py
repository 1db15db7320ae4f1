"""Other frameworks on kos.  Each module imports its framework; nothing else of kos does."""
