"""Fault schedules, injectors, and the verifier that compares a troubled run with a quiet one."""
