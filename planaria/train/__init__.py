"""Trainers: what turns a configuration into a training run."""
