"""Run folders: names of their files, the lock, checkpoint manifests, and loading saved models."""
