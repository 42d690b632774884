"""Act: start, watch and stop processes, and look at run folders. No torch."""
