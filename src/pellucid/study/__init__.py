"""Studies: variants of one recipe over several seeds, run and compared."""
