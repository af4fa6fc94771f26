"""Pure logic: no I/O, no clock, no threads, no torch. Everything that decides is here, and takes time as an argument."""
