"""Pure logic: no I/O, no clock, no threads, no torch. All decisions are here; time is an argument."""
